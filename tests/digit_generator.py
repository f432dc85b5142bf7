"""A recipe that trains a generator of 8x8 digits in seconds."""

RECIPE = """
title = "a generator of digits"
[data]
name = "digits"
limit = 60
validation = 10
[model]
name = "generator"
latent = 4
channels = [8, 8]
downsamplings = 0
expansion = 1.0
[task]
name = "generation"
steps = 6
penalty_from = 3
[training]
batch_size = 30
[[phases]]
epochs = 1
"""
