"""
Train on two processes
======================

``torchrun`` starts the same training command on several processes. The batch size of a recipe is the total over all
processes, so two of them take the same steps as one, up to rounding. This script trains a classifier of 8x8 digits
both ways and compares the weights.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import equipoise as eq

EPOCHS = 3
folder = Path(tempfile.mkdtemp())

# %%
# In a shell these are two lines::
#
#     equipoise train core/digits
#     torchrun --nproc-per-node 2 -m equipoise train core/digits
#
# Random shifts of the images are switched off, because each process draws those of its own part of the batch.

options = [
    f"phases.0.epochs={EPOCHS}",
    "task.shift=0",
    "tolerance.relative=1e-6",
    "training.log_every=2",
    "--threads",
    "1",
]
torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
for name, launcher in (("one", []), ("two", torchrun)):
    command = [sys.executable, "-m", *launcher, "equipoise", "train", "core/digits", *options, "--runs", folder / name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(f"{name}:", *re.findall(r"^(test accuracy) +(\S+)", done.stdout, re.M)[0])

# %%
# Process 0 writes the folder of the run: the log, the checkpoints, the result. Any number of processes can open it.

runs = {name: folder / name / "core-digits-001" for name in ("one", "two")}
one, two = (torch.cat([p.detach().flatten() for p in eq.load(run).parameters()]) for run in runs.values())
apart = ((one - two).norm() / one.norm()).item()
print(f"relative difference of all weights: {apart:.0e}")

figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
    records = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    points = [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
    axis.plot(*zip(*points, strict=True), style, label=f"{name} process{'es' if name == 'two' else ''}", linewidth=2)
axis.set(xlabel="step", ylabel="training loss", title="One process and two take the same steps")
axis.legend()
plt.show()
