"""Downloading data sets and unpacking them."""
