"""
A transformer block at equilibrium solves Sudoku
================================================

The recursive reasoning models of 2025 and 2026 (HRM, TRM) apply one small network to its own state again and again. They
are trained with the gradient of the last step only, with a loss after every few steps. This script does the same with
4 x 4 Sudoku: one transformer block is the f of an equilibrium layer, each puzzle halts by its own residual, and at test
time several random starts add breadth.
"""

from itertools import permutations, product

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import equipoise as eq

UPDATES, WIDTH, PUZZLES, STARTS = 2400, 48, 600, 16
torch.manual_seed(0)

# %%
# There are 288 grids; 58 are held out. A puzzle shows 5 to 8 of the 16 digits and has exactly one solution.

grids = torch.tensor(list(product(permutations(range(4)), repeat=4))).flatten(1)
cell = torch.arange(16)
units = [cell // 4, cell % 4, cell // 8 * 2 + cell % 4 // 2]  # row, column and box of each cell
for number in [digit for unit in units for digit in [torch.stack([unit == i for i in range(4)])]]:
    counts = torch.stack([(F.one_hot(grids, 4)[:, part]).sum(1) for part in number], 1)
    grids = grids[(counts == 1).flatten(1).all(1)]
grids = grids[torch.randperm(288)]


def puzzles(count, solutions):
    """Return puzzles (0 for a hidden cell, else digit + 1) and their solutions."""
    solution = solutions[torch.randint(len(solutions), (3 * count,))]
    shown = torch.rand(3 * count, 16).argsort(1).argsort(1) < torch.randint(5, 9, (3 * count, 1))
    unique = ((grids == solution[:, None]) | ~shown[:, None]).all(2).sum(1) == 1
    return torch.where(shown, solution + 1, 0)[unique][:count], solution[unique][:count]


# %%
# Three attention heads see the row, the column and the box of a cell, the fourth sees everything.


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.register_buffer("sees", torch.stack([*(u[:, None] == u for u in units), torch.ones(16, 16).bool()]))

    def forward(self, z, x):
        z = z + x
        q, k, v = self.qkv(z).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=self.sees)
        z = self.norm1(z + self.out(heads.transpose(1, 2).flatten(2)))
        return self.norm2(z + self.mlp(z))


embed, head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 4)
few = eq.Tolerance(relative=1e-3, max_steps=3)
layer = eq.Equilibrium(
    Block(WIDTH), solver=eq.Picard(), tolerance=few, gradient=eq.PhantomGradient(steps=1), on_failure="ignore"
)

# %%
# Every third update starts new puzzles from random states; the others continue from the states reached so far.

given, answers = puzzles(8000, grids[:230])
parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=UPDATES, pct_start=0.05)
for update in range(UPDATES):
    if update % 4 == 0:
        batch = torch.randint(len(given), (64,))
        z = torch.randn(64, 16, WIDTH)
    z = layer(embed(given[batch]), z0=z.detach())
    loss = F.cross_entropy(head(z).flatten(0, 1), answers[batch].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
    import os
    if os.environ.get("DBG") and update%300==299:
        with torch.no_grad():
            layer.tolerance = eq.Tolerance(relative=2e-2, max_steps=64, patience=None)
            p,s=puzzles(300, grids[230:]); x=embed(p)
            runs=[layer.solve(x, z0=torch.randn_like(x)) for _ in range(4)]
            ok=torch.stack([(head(r.value).argmax(-1)==s).all(1) for r in runs]); res=torch.stack([r.stats.residual for r in runs])
            print(update+1, loss.item(), ok.float().mean(), "best", ok.gather(0,res.argmin(0)[None]).float().mean(), "any", ok.any(0).float().mean(), "conv", runs[0].converged.float().mean(), runs[0].stats.steps.float().mean(), "res", res.median())
            layer.tolerance=few
