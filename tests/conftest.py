"""What every test shares: one thread (small tensors are slower with more), one seed, no deadlines."""

import os
import tempfile
import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.autograd import forward_ad

torch.set_num_threads(1)

# Compiled code of this process alone: what another processor or worker left in the common cache may crash.
COMPILED = tempfile.TemporaryDirectory(prefix="equipoise-inductor-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED.name

with warnings.catch_warnings():
    # torch warns about itself at the first use of forward-mode differentiation: its rules are written in torch.jit.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=DeprecationWarning)
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))

settings.register_profile(
    "equipoise",
    deadline=None,
    derandomize=True,  # the same examples at every run
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("equipoise")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report() -> None:
    """Seed what a module draws while it is imported, such as the weights of a parametrised layer."""
    torch.manual_seed(0)
