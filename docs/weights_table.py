"""Print the table of the models that ship with the package, as Markdown, from their cards.

python docs/weights_table.py
"""

import equipoise as eq
from equipoise.lab.runs.shipped import Card, read_card
from equipoise.lab.training.evaluate import format_metric

HEADING = ("name", "model", "trained on", "epochs", "test metric", "parameters", "size", "terms of the data")


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


if __name__ == "__main__":
    for cells in (HEADING, ("---",) * len(HEADING), *(row(read_card(name)) for name in eq.list_weights())):
        print(f"| {' | '.join(cells)} |")
