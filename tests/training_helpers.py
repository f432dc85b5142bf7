"""Training by the command line, in the process of the test."""

from equipoise.cli import main


def train_here(folder, name, recipe):
    """Train a recipe, given as text, in a folder; returns the folder of the run."""
    file = folder / f"{name}.toml"
    file.write_text(recipe)
    assert main(["train", str(file), "--runs", str(folder), "--threads", "1"]) == 0
    return folder / f"{name}-001"
