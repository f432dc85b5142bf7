"""
Why per-sample stopping matters
===============================

The samples of a batch are independent problems, and some are harder than others. equipoise stops each of them by its
own residual and leaves finished samples out of further evaluations. Here one sample of 64 needs hundreds of steps.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

SAMPLES = 64
torch.manual_seed(0)

# %%
# Sample ``i`` contracts by its own factor ``rate[i]``. The rates travel as an input, so that they can be gathered
# with their samples.

rate = 0.3 + 0.3 * torch.rand(SAMPLES, 1)
rate[0] = 0.97
x = torch.randn(SAMPLES, 32)
Q = torch.linalg.qr(torch.randn(32, 32))[0]
rows = []  # how many samples each evaluation of f computes


def f(z, x, rate):
    rows.append(len(z))
    return rate * (z @ Q) + x


options = {"solver": eq.Picard(), "tolerance": eq.Tolerance(relative=1e-6, max_steps=2000, patience=None)}
solution = eq.fixed_point(f, torch.zeros(SAMPLES, 32), x, rate, trace=True, **options)
per_sample = list(rows)
print(solution)

# %%
# With ``coupled=True`` the whole batch is one problem with one residual. It stops when the batch does, so all 64
# samples are computed until the slow one is done.

rows.clear()
together = eq.fixed_point(f, torch.zeros(SAMPLES, 32), x, rate, coupled=True, **options)
print(f"rows computed: {sum(per_sample)} per sample, {sum(rows)} as one problem")

# %%
# There is a second reason. Because nothing is shared, the answer for a sample does not depend on its batch-mates:
# solved alone, it takes the same number of steps to the same value.

alone = eq.fixed_point(f, torch.zeros(1, 32), x[5:6], rate[5:6], **options)
difference = (alone.value - solution.value[5:6]).abs().max().item()
print(
    f"sample 5: {alone.stats.steps.item()} steps alone, {solution.stats.steps[5]} in the batch; {difference:.0e} apart"
)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for sample in range(SAMPLES):
    last = int(solution.stats.steps[sample])
    color = "tab:red" if sample == 0 else "0.6"
    left.loglog(range(1, last + 1), solution.stats.trace[:last, sample].numpy(), color=color, linewidth=0.8)
left.axhline(1e-6, color="black", linestyle="--", linewidth=0.8)
left.set(title="Residual of each sample", xlabel="step", ylabel="relative residual")
right.step(range(1, len(per_sample) + 1), per_sample, label="per sample")
right.step(range(1, len(rows) + 1), rows, label="as one problem")
right.set(title="Samples computed at each evaluation", xlabel="evaluation of f", xscale="log", ylim=(0, SAMPLES + 4))
right.legend()
plt.show()
