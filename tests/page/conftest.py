"""The server of the tests of the page; without its two packages there is nothing to test."""

import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from equipoise.page.jobs import Job
from page_server import RUNS, Server, Visitor, write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder, name) for name in RUNS]


@pytest.fixture(scope="session")
def server(runs):
    with Server(runs).running() as served:
        yield served


@pytest.fixture
def visitor(server):
    return Visitor(server)


@pytest.fixture
def slow(monkeypatch):
    """Make every step of a solve take 20 milliseconds more."""
    check = Job.check

    def slowly(job):
        check(job)
        time.sleep(0.02)

    monkeypatch.setattr(Job, "check", slowly)
