"""Checkpoints that the authors of MDEQ and monDEQ published, read without running code and converted."""
