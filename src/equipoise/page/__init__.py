"""The local page of `equipoise page`: watch equilibria being found, in a browser, without network access."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.lab.runs.machine import Machine
from equipoise.lab.trust import Trust
from equipoise.registry import MissingPackage


def run_page(
    runs: Sequence[str], machine: Machine, host: str, port: int, trust: Trust, folders: Sequence[Path] = ()
) -> None:
    """Serve the page until it is interrupted, and print its address.

    Args:
        runs: folders of runs to show beside the models that ship with the package.
        machine: device of the solves.
        host, port: address to listen on; port 0 is a free one.
        trust: modules outside the package that the files of runs may name.
        folders: folders to look for data in first.
    """
    try:
        from equipoise.page.server import VIEWS, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        message = f"the page needs the package {error.name!r}: pip install 'equipoise[page]'."
        raise MissingPackage(message, name=error.name) from None
    from equipoise.page.available import available
    from equipoise.page.guard import is_loopback

    models = []
    for model in available(runs, machine, trust, folders):
        if any(view.takes(model) for view in VIEWS.values()):
            models.append(model)
        elif model.name in runs:  # a shipped model that no view shows is left out
            raise ValueError(f"--run {model.name}: no view of the page shows this kind of model.")

    def ready(address: str) -> None:
        print(f"models            {', '.join(model.name for model in models) or 'none'}")
        if not is_loopback(host):
            print("note              others on the network can reach this page, unencrypted; the token admits them")
        print(f"page              {address}", flush=True)

    serve(models, host, port, ready)
