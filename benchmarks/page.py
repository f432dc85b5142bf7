"""Measure the page in headless Chromium: time from a stroke to its first frame, and frames per second.

    python benchmarks/page.py [--run RUN] [--recipe RECIPE] [--rounds N]

Draws the same digit again and again. The first frame is the first change of the residual curve, the bars and the state
after the pointer has been lifted. Without a run, the model of a recipe is built with random weights. Times depend on
the machine and on what else runs on it, so they are printed and never tested.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import page_server
from page_browser import open_browser
from page_server import Server, wait, write_run

STATUS = "return document.querySelector('#view-draw .status').textContent"
MEASURE = """
const done = arguments[arguments.length - 1];
const canvas = document.querySelector(".sketch"), shown = document.querySelector("#view-draw .player output");
const status = document.querySelector("#view-draw .status");
const box = canvas.getBoundingClientRect();
const at = (x, y) =>
  ({clientX: box.left + x * box.width, clientY: box.top + y * box.height, pointerId: 1, bubbles: true});
canvas.setPointerCapture = () => {};
document.querySelector("[name=clear]").click();
canvas.dispatchEvent(new PointerEvent("pointerdown", at(0.3, 0.25)));
for (const place of [[0.7, 0.25], [0.6, 0.5], [0.5, 0.8]])
  canvas.dispatchEvent(new PointerEvent("pointermove", at(...place)));
const frames = [];
const watch = new MutationObserver(() => {
  if (!shown.textContent) return;
  requestAnimationFrame(() => requestAnimationFrame((now) => {
    const [step, , last] = shown.textContent.split(" ");
    if (frames.at(-1)?.[1] !== step) frames.push([now, step]);
    if (!status.textContent.startsWith("Settled") || step !== last) return;
    watch.disconnect();
    done(frames.map(([time]) => time - begin));
  }));
});
for (const text of [shown, status]) watch.observe(text, {childList: true, characterData: true, subtree: true});
const begin = performance.now();
canvas.dispatchEvent(new PointerEvent("pointerup", at(0.5, 0.8)));
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, metavar="RUN", help="run of a classifier of 28 x 28 digits")
    parser.add_argument("--recipe", default="mondeq/mnist-fc", help="recipe of the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="number of strokes (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        *_, facts = page_server.RUNS["draw"]
        page_server.RUNS["draw"] = (arguments.recipe, [], facts)
        run = arguments.run or write_run(Path(folder), "draw")
        with Server([run]).running() as server:
            browser = open_browser()
            try:
                browser.set_script_timeout(120)
                browser.get(server.address)
                wait(lambda: browser.execute_script(STATUS).startswith("Settled"))  # the example is solved
                rounds = [browser.execute_async_script(MEASURE) for _ in range(arguments.rounds + 1)][1:]
            finally:
                browser.quit()
    first = sorted(times[0] for times in rounds)
    rates = [1000 * (len(times) - 1) / (times[-1] - times[0]) for times in rounds if len(times) > 1]
    print(f"first frame       median {median(first):.0f} ms, worst {first[-1]:.0f} ms after the stroke")
    print(f"frames            median {median(rates):.1f} per second, lowest {min(rates):.1f}")


if __name__ == "__main__":
    main()
