"""What the tests of figures share: one drawn by the command line."""

import json

from equipoise.cli import main


def drawn_figure(folder, text, recipes, runs):
    """Draw a figure from trained runs; returns the numbers beside the picture."""
    out = folder / "figure.png"
    given = [word for run in runs for word in ("--run", str(run))]
    assert main(["figure", str(figure_file(folder, text, recipes)), "--out", str(out), "--threads", "1", *given]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    return json.loads(out.with_suffix(".json").read_text())


def figure_file(folder, text, recipes):
    file = folder / "mine.toml"
    file.write_text(f'title = "A figure"\nrecipes = {json.dumps([f"{name}.toml" for name in recipes])}\n{text}\n')
    return file
