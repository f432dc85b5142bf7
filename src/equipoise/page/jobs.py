"""Jobs and their queue: solves run on a few threads, visitors take turns, and every job can be stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from equipoise.lab.files import finite
from equipoise.page.limits import LIMITS, Limits
from equipoise.page.refused import Refused

log = logging.getLogger("equipoise.page")


class Stopped(Exception):
    """The visitor stopped the job, or left."""


class Job:
    """Work for one visitor, and the events that it reports.

    The work runs on a thread of the queue. It calls :meth:`check` at every step and reports with :meth:`emit`; the
    event loop reads :attr:`events`, which ends with None.
    """

    def __init__(self, visitor: str, work: Callable[[Job], object], limits: Limits = LIMITS):
        self.visitor, self.work, self.limits = visitor, work, limits
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.stopped = threading.Event()
        self.deadline = float("inf")

    def check(self) -> None:
        """Raise Stopped if nobody waits for the job, and Refused if it has run for too long."""
        if self.stopped.is_set():
            raise Stopped
        if time.monotonic() > self.deadline:
            raise Refused(
                f"This took longer than {self.limits.seconds:g} seconds, the limit, and was stopped: allow fewer "
                "steps or choose a smaller image.",
                "stop",
            )

    def emit(self, kind: str, data: Mapping[str, Any], pictures: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Report an event.

        Args:
            kind: name of the event.
            data: numbers and strings.
            pictures: function that returns the larger part of the event. It is left out while the visitor's connection
                lags behind, so that memory stays bounded.
        """
        self.check()
        if pictures is not None and self.events.qsize() < self.limits.backlog:
            data = {**data, **pictures()}
        self.put(as_event(kind, data))

    def put(self, event: bytes | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the server has ended
            self.stopped.set()

    def run(self) -> None:
        """Do the work; whatever happens, the events end."""
        self.deadline = time.monotonic() + self.limits.seconds
        try:
            self.check()
            self.work(self)
        except Stopped:
            pass
        except Refused as refused:
            self.put(as_event("refused", refused.record()))
        except Exception:
            log.exception("a job failed")
            message = "The server made a mistake, which it has printed in its terminal. Please report it."
            self.put(as_event("refused", {"message": message, "control": ""}))
        finally:
            self.put(None)


def as_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(finite(dict(data)), allow_nan=False)}\n\n".encode()


class Queue:
    """Let visitors take turns: each runs one job at a time, and who has waited longest is next.

    All methods are called from the event loop.
    """

    def __init__(self, limits: Limits = LIMITS):
        self.limits = limits
        self.pool = ThreadPoolExecutor(limits.at_once, thread_name_prefix="equipoise-page")
        self.waiting: dict[str, deque[Job]] = {}  # by visitor, in the order of their turns
        self.running: dict[str, Job] = {}

    def submit(self, visitor: str, work: Callable[[Job], object]) -> Job:
        """Add a job, or raise Refused if too many wait."""
        own = self.waiting.get(visitor, ())
        if len(own) >= self.limits.waiting_each:
            raise Refused(f"{len(own)} of your requests are waiting already: stop them, or wait.", status=429)
        if sum(map(len, self.waiting.values())) >= self.limits.waiting:
            raise Refused("Too many visitors are waiting: try again in a minute.", status=429)
        job = Job(visitor, work, self.limits)
        self.waiting.setdefault(visitor, deque()).append(job)
        self.start()
        return job

    def start(self) -> None:
        """Start the jobs whose turn it is."""
        for visitor in list(self.waiting):
            if len(self.running) >= self.limits.at_once:
                return
            if visitor not in self.running:
                job = self.waiting[visitor].popleft()
                own = self.waiting.pop(visitor)
                if own:
                    self.waiting[visitor] = own  # at the end of the line
                self.running[visitor] = job
                job.loop.run_in_executor(self.pool, job.run).add_done_callback(partial(self.finish, job))

    def finish(self, job: Job, done: object) -> None:
        del self.running[job.visitor]
        self.start()

    def leave(self, job: Job) -> None:
        """Stop a job: one that waits is removed, one that runs ends at its next step."""
        job.stopped.set()
        own = self.waiting.get(job.visitor)
        if own is not None and job in own:
            own.remove(job)
            if not own:
                del self.waiting[job.visitor]

    def ahead(self, job: Job) -> int | None:
        """Return the number of jobs that start before this one; None if it does not wait."""
        own = self.waiting.get(job.visitor)
        if own is None or job not in own:
            return None
        turn, before, earlier = own.index(job), 0, True
        for visitor, jobs in self.waiting.items():
            if visitor == job.visitor:
                before, earlier = before + turn, False
            else:
                before += min(len(jobs), turn + earlier)
        return before

    def close(self) -> None:
        """Stop every job, and wait for the threads."""
        for jobs in [*self.waiting.values(), self.running.values()]:
            for job in list(jobs):
                job.stopped.set()
        self.waiting.clear()
        self.pool.shutdown(wait=True)
