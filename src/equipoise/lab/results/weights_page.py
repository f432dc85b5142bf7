"""The table of shipped models in docs/weights.md: generated from their cards, and kept up to date by ``--add``."""

import re
from pathlib import Path

from equipoise.lab.files import write_text
from equipoise.lab.runs import shipped
from equipoise.lab.runs.shipped import Card, list_weights, read_card
from equipoise.lab.training.evaluate import format_metric

HEADING = ("name", "model", "trained on", "epochs", "test metric", "parameters", "size", "terms of the data")
TABLE = re.compile(r"(?<=<!-- output of: python docs/weights_table\.py -->\n).*?(?=<!-- end of output -->)", re.S)


def weights_table() -> str:
    """Return the table of all shipped models as Markdown."""
    lines = (HEADING, ("---",) * len(HEADING), *(row(read_card(name)) for name in list_weights()))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def row(card: Card) -> tuple[str, ...]:
    training, test = card.training, card.test
    return (
        f"`{card.name}`",
        card.title,
        f"{training.data}, {training.samples:,} samples, seed {training.seed}",
        f"{training.epochs}" + (f" (weights of {training.epoch})" if training.epoch != training.epochs else ""),
        f"{test.metric} {format_metric(test.metric, test.value)} of {test.samples:,}",
        f"{card.parameters:,}",
        f"{card.bytes / 1e6:.2f} MB ({card.stored})",
        card.terms.data,
    )


def update_page() -> Path | None:
    """Write the table into the page of a clone; return the page, or None for an installed package, which has none."""
    page = shipped.weights_folder().parents[2] / "docs" / "weights.md"  # beside src/equipoise/weights
    if not page.is_file() or not TABLE.search(text := page.read_text(encoding="utf-8")):
        return None
    write_text(page, TABLE.sub(lambda _: weights_table(), text))
    return page
