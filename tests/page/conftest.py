"""The server that the tests of the page share; without its packages there is nothing to test."""

import importlib.util
import time

import pytest

if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    from page_server import RUNS, write_run

    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder, name) for name in RUNS]


@pytest.fixture(scope="session")
def server(runs):
    from page_server import Server

    with Server(runs).running() as served:
        yield served


@pytest.fixture
def visitor(server):
    from page_server import Visitor

    return Visitor(server)


@pytest.fixture
def slow(monkeypatch, request):
    """Make every step of a solve take 20 milliseconds more, or the time that a test asks for."""
    from equipoise.page.jobs import Job

    check = Job.check

    def slowly(job):
        check(job)
        time.sleep(getattr(request, "param", 0.02))

    monkeypatch.setattr(Job, "check", slowly)
