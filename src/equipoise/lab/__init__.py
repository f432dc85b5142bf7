"""The lab: data sets, recipes, training runs, checkpoints and reports; all that deals with files."""
