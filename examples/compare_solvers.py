"""
Compare solvers and read a diagnosis
====================================

Which solver suits an f is a question to measure. When a solve fails, the :class:`equipoise.Solution` holds what is
needed to find out why.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

WIDTH = 64
torch.manual_seed(0)

# %%
# This f has an equilibrium, but it is not a contraction: near it, the Jacobian has eigenvalues beyond -1, so plain
# iteration overshoots more at every step.

Q = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
W = Q @ torch.diag(torch.linspace(-2.0, 0.6, WIDTH)) @ Q.T
x = 0.5 * torch.randn(32, WIDTH)
z0 = torch.zeros(32, WIDTH)


def f(z, x):
    return torch.tanh(z @ W + x)


failed = eq.fixed_point(f, z0, x, solver=eq.Picard(), on_failure="ignore")
print(failed)

# %%
# The summary says that the residual stopped shrinking. ``diagnose`` looks closer: it measures the spectral radius of
# df/dz at the best iterate and names the solvers and changes of f that would help.

print(eq.diagnose(failed))

# %%
# ``compare_solvers`` runs the general solvers on the same problem. Damped iteration and the accelerated methods
# converge; what they cost differs.

tolerance = eq.Tolerance(relative=1e-6, max_steps=150)
comparison = eq.compare_solvers(f, z0, x, tolerance=tolerance)

# %%
# The whole story in one picture: the residual of the slowest sample over the evaluations of f.

solvers = [eq.Picard(), eq.Picard(damping=0.5), eq.Anderson(memory=5), eq.Broyden(memory=20)]
figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
curves = {}
for solver in solvers:
    solution = eq.fixed_point(f, z0, x, solver=solver, tolerance=tolerance, trace=True, on_failure="ignore")
    curves[str(solver)] = solution.stats.trace.nan_to_num(nan=0.0).amax(dim=1)
    axis.semilogy(curves[str(solver)].numpy(), label=str(solver))
axis.axhline(tolerance.relative, color="black", linestyle="--", linewidth=0.8)
axis.set(xlabel="step", ylabel="largest relative residual", ylim=(1e-7, 3), title="Four solvers on one f")
axis.legend()
plt.show()
