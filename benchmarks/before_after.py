"""Compare the package of another tree with this one: every problem and contender of bench.py, in alternating processes.

    python benchmarks/before_after.py OLD_SRC [--rounds N] [--only dense conv mdeq] [--json FILE]

OLD_SRC is a folder that contains the package `equipoise`, such as the folder `src` of

    git archive COMMIT src | tar -x -C FOLDER

Two processes, one with each tree, run every row in turns with one thread, and stand still while the other runs. The
table shows the processor time of the new tree divided by that of the old one in the same round: median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import IO, cast

HERE = Path(__file__).parent


def serve() -> None:
    """Answer requests, lines of JSON with a problem, a contender and whether to differentiate, with a time."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not mix with the answer

    import torch

    import equipoise as eq
    from bench import LIMIT, TIGHT, timed_solve, timed_step
    from contenders import Equipoise
    from problems import PROBLEMS

    torch.set_num_threads(1)
    solvers = {
        "Picard()": eq.Picard(),
        "Anderson(6)": eq.Anderson(memory=6),
        "Anderson(6, kind=1)": eq.Anderson(memory=6, kind=1),
        "Broyden(12)": eq.Broyden(memory=12),
    }
    prepared = {}
    for line in sys.stdin:
        name, contender, differentiate = json.loads(line)
        if (name, contender) not in prepared:
            problem = prepared.get(name) or PROBLEMS[name]()
            player = Equipoise(contender, solvers[contender], LIMIT)
            calls = [player.prepare(problem, TIGHT), player.prepare_backward(problem, TIGHT)]
            prepared |= {name: problem, (name, contender): (player, calls)}
        player, calls = prepared[name, contender]
        began = process_time()
        (timed_step if differentiate else timed_solve)(prepared[name], player)
        answers.write(json.dumps([process_time() - began, calls]) + "\n")
        answers.flush()


def start(src: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(src), str(HERE)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(HERE / "before_after.py"), "--serve"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], request: list[object]) -> tuple[float, list[int | None]]:
    questions, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
    questions.write(json.dumps(request) + "\n")
    questions.flush()
    seconds, calls = json.loads(answers.readline())
    return seconds, calls


def main() -> None:
    from bench import in_turns
    from problems import PROBLEMS
    from tables import Row, show

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path, metavar="OLD_SRC", help="folder that contains the other package")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="number of rounds (default 9)")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()

    trees = {"old": start(arguments.old.resolve()), "new": start(HERE.parent / "src")}
    rows: list[Row] = []
    for name in arguments.only:
        for contender in ("Picard()", "Anderson(6)", "Anderson(6, kind=1)", "Broyden(12)"):
            for differentiate in (False, True):
                request: list[object] = [name, contender, differentiate]
                counts = {tree: ask(process, request)[1] for tree, process in trees.items()}  # also a warm-up
                runs = {tree: partial(ask, process, request) for tree, process in trees.items()}
                answers = in_turns(runs, arguments.rounds, budget=float("inf"))
                ratios = [new[0] / old[0] for new, old in zip(answers["new"], answers["old"], strict=True)]
                low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
                row: Row = {"problem": name, "solver": contender, "what": "step" if differentiate else "solve"}
                row |= {f"calls {tree}": calls[differentiate] for tree, calls in counts.items()}
                row |= {"new / old": median(ratios), "quartile 1": low, "quartile 3": high}
                rows.append(row)
                print(*row.values(), file=sys.stderr, flush=True)
    show(f"processor time of {HERE.parent.name} divided by that of {arguments.old}", rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    for process in trees.values():
        cast(IO[str], process.stdin).close()
        process.wait()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
