"""The lab: real data, recipes, training, checkpoints, reports. The only floor that knows files and runs."""
