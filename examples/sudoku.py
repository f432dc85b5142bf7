"""
A transformer block at equilibrium solves Sudoku
================================================

The recursive reasoning models of 2025 and 2026 (HRM, TRM) apply one small network to its own state again and again.
They are trained with the gradient of the last step only and with a loss after every few steps. This script does the
same with 4 x 4 Sudoku: one transformer block is the f of an equilibrium layer, each puzzle halts by its own residual,
and at test time several random starts add breadth.
"""

from itertools import permutations, product

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq

UPDATES, WIDTH, PUZZLES, STARTS, START = 500, 48, 300, 8, 1.0
torch.manual_seed(2)

# %%
# There are 288 grids; 58 are held out. A puzzle shows 5 to 8 of the 16 digits and has exactly one solution.

cell = torch.arange(16)
units = [cell // 4, cell % 4, cell // 8 * 2 + cell % 4 // 2]  # row, column and box of each cell
grids = torch.tensor(list(product(permutations(range(4)), repeat=4))).flatten(1)
for unit in units[1:]:
    for i in range(4):
        grids = grids[(grids[:, unit == i].sort(dim=1).values == torch.arange(4)).all(dim=1)]
grids = grids[torch.randperm(288)]


def puzzles(count, solutions):
    """Return puzzles (0 for a hidden cell, else digit + 1) and their solutions."""
    solution = solutions[torch.randint(len(solutions), (3 * count,))]
    shown = torch.rand(3 * count, 16).argsort(1).argsort(1) < torch.randint(5, 9, (3 * count, 1))
    unique = ((grids == solution[:, None]) | ~shown[:, None]).all(2).sum(1) == 1
    return torch.where(shown, solution + 1, 0)[unique][:count], solution[unique][:count]


# %%
# Three attention heads see the other cells of the row, of the column and of the box of a cell, the fourth sees all
# cells. Without the cell itself, the three tell a cell which digits are taken, and training is robust: with the seeds
# 0 to 4, between 96.3% and 99.3% of the puzzles are solved. With it, and smaller random states, 17% were solved with
# seed 0 and 96% with seed 1, after twice as many updates.


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        others = [(unit[:, None] == unit) & (cell[:, None] != cell) for unit in units]
        self.register_buffer("sees", torch.stack([*others, torch.ones(16, 16).bool()]))

    def forward(self, z, x):
        z = z + x
        q, k, v = self.qkv(z).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees)
        z = self.norm1(z + self.out(heads.transpose(1, 2).flatten(2)))
        return self.norm2(z + self.mlp(z))


embed, head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 4)
layer = eq.Equilibrium(Block(WIDTH), solver=eq.Picard(), on_failure="ignore")
layer.tolerance = eq.Tolerance(relative=3e-2, max_steps=32, patience=None)

# %%
# Every fourth update starts new puzzles from random states; the others continue from the states reached so far. An
# update takes two steps, and only the second one is differentiated. The learning rate warms up, and gradients are
# clipped.

given, answers = puzzles(8000, grids[:230])
parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, UPDATES, pct_start=0.1, cycle_momentum=False)
for update in range(UPDATES):
    if update % 4 == 0:
        batch = torch.randint(len(given), (64,))
        z = START * torch.randn(64, 16, WIDTH)
    x = embed(given[batch])
    with torch.no_grad():
        z = layer.f(z, x)
    z = layer.f(z, x)
    loss = F.cross_entropy(head(z).flatten(0, 1), answers[batch].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()

# %%
# At test time each puzzle of a held-out grid halts by its own residual. Breadth: among several random starts, the one
# with the lowest residual counts. No rule of Sudoku is checked.

given, answers = puzzles(PUZZLES, grids[230:])
with torch.no_grad():
    x = embed(given)
    runs = [layer.solve(x, z0=START * torch.randn_like(x)) for _ in range(STARTS)]
    right = torch.stack([(head(run.value).argmax(dim=-1) == answers).all(dim=1) for run in runs])
residual = torch.stack([run.stats.residual for run in runs])
breadth = range(1, STARTS + 1)
accuracy = [right[:n].gather(0, residual[:n].argmin(0)[None]).float().mean().item() for n in breadth]
print(f"one start {accuracy[0]:.1%}, {STARTS} starts {accuracy[-1]:.1%} of {PUZZLES} puzzles solved")

means = [runs[0].stats.steps[(given > 0).sum(dim=1) == count].float().mean().item() for count in range(5, 9)]

figure, (left, middle) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.plot(breadth, accuracy, marker="o")
left.set(title="Breadth", xlabel="random starts", ylabel="puzzles solved", ylim=(0.9, 1.005))
middle.bar(range(5, 9), means)
middle.set(title="Each puzzle halts on its own", xlabel="digits shown", ylabel="mean solver steps", xticks=range(5, 9))
plt.show()
