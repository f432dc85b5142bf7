"""The server of the page: its addresses, and the streams of events that jobs report."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from equipoise.page.available import Available
from equipoise.page.guard import Door, Guard
from equipoise.page.jobs import Job, Queue, as_event
from equipoise.page.limits import LIMITS, Limits
from equipoise.page.pictures import decoded, table
from equipoise.page.refused import Refused
from equipoise.page.sent import Sent
from equipoise.page.views import draw, generate, inside, restore, segment
from equipoise.page.views.view import View

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
VIEWS = {view.name: view for view in (draw.VIEW, restore.VIEW, generate.VIEW, inside.VIEW, segment.VIEW)}
PATIENCE = 1.0  # seconds without an event after which a keep-alive comment is sent


@dataclass
class Page:
    """The models of the page by view, its files, and the queue of jobs.

    Args:
        models: models to show; each appears in the views that take it.
        limits: bounds on requests and jobs.

    Example:
        >>> app = Page(available(["runs/mondeq-mnist-fc-001"], machine, Trust())).application(door)
    """

    models: Sequence[Available]
    limits: Limits = LIMITS
    by_view: dict[str, dict[str, Available]] = field(init=False)
    queue: Queue = field(init=False)
    files: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.by_view = {
            view.name: {model.name: model for model in self.models if view.takes(model)} for view in VIEWS.values()
        }
        self.files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in KINDS}

    def application(self, door: Door) -> ASGIApp:
        """Return the ASGI application behind its guard."""
        routes = [
            Route("/", self.file),
            Route("/static/{name}", self.file),
            Route("/facts", self.facts),
            Route("/upload/{view}", self.upload, methods=["POST"]),
            Route("/{view}/{action}", self.act, methods=["POST"]),
        ]
        handlers = {Refused: refused, ClientDisconnect: left}
        return Guard(Starlette(routes=routes, lifespan=self.life, exception_handlers=handlers), door)

    # Answers

    async def file(self, request: Request) -> Response:
        """Return a file of the page; they are few and small, and were read when the server started."""
        name = request.path_params.get("name", "index.html")
        if name not in self.files:
            raise HTTPException(404)
        return Response(self.files[name], media_type=KINDS[Path(name).suffix])

    async def facts(self, request: Request) -> Response:
        """Return what the page needs to know of the models of each view."""
        views = {
            name: {
                "missing": view.missing,
                "models": [{"name": key, **view.describe(model)} for key, model in self.by_view[name].items()],
            }
            for name, view in VIEWS.items()
        }
        return JSONResponse({"views": views, "upload": self.limits.upload})

    async def upload(self, request: Request) -> Response:
        """Decode an image file for a view."""
        view, model = self.chosen(request, request.query_params.get("model"))
        data = await self.body(request, self.limits.upload, "upload")

        def work(job: Job) -> None:
            image, note = decoded(data, view.upload(model), self.limits)
            job.emit("picture", {"picture": table(image), "note": note})

        return self.stream(request, work)

    async def act(self, request: Request) -> Response:
        """Start a job of a view, and stream its events."""
        sent = Sent.of(await self.body(request, self.limits.body))
        view, model = self.chosen(request, sent.take("model"))
        if (name := request.path_params["action"]) not in view.actions:
            raise HTTPException(404)
        work = view.actions[name](sent, model)
        sent.done()
        return self.stream(request, work)

    def chosen(self, request: Request, name: object) -> tuple[View, Available]:
        """Return the view of an address, and its model of that name."""
        if (view := VIEWS.get(request.path_params["view"])) is None:
            raise HTTPException(404)
        models = self.by_view[view.name]
        if not models:
            raise Refused(view.missing, "model")
        if not isinstance(name, str) or name not in models:
            raise Refused(f"There is no such model in this view; models: {', '.join(models)}.", "model")
        return view, models[name]

    async def body(self, request: Request, most: int, control: str = "") -> bytes:
        """Return the body of a request, or raise Refused as soon as it is too large or too slow."""
        too_large = Refused(f"The request is larger than the limit of {most / 1e6:g} MB.", control, 413)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise too_large
        except TimeoutError:
            raise Refused("The request took too long to arrive.", control, 408) from None
        return bytes(data)

    # Jobs

    def stream(self, request: Request, work: Callable[[Job], object]) -> Response:
        """Queue a job, and answer with its events."""
        job = self.queue.submit(request.scope["visitor"], work)
        return StreamingResponse(self.events(job), media_type="text/event-stream")

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """Yield the events of a job; when the visitor leaves, the job is stopped."""
        try:
            while True:
                if (ahead := self.queue.ahead(job)) is not None and job.events.empty():
                    yield as_event("waiting", {"ahead": ahead + len(self.queue.running)})
                try:
                    event = await asyncio.wait_for(job.events.get(), PATIENCE)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self.queue.leave(job)

    @contextlib.asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """Prepare every thread, so that the first visitor does not wait, and stop all jobs at the end."""
        self.queue = Queue(self.limits)
        for thread in range(self.limits.at_once):
            self.queue.submit(f"thread {thread}", self.prepare)
        yield
        self.queue.close()

    def prepare(self, job: Job) -> None:
        for model in self.by_view["draw"].values():
            job.check()
            draw.prepare(model)


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.record(), error.status)


async def left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 is a free one."""
    if not host:  # which the operating system would take for every address of this machine
        raise ValueError("--host is empty; use 127.0.0.1 for this machine only, or 0.0.0.0 for the network.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            stack.pop_all()
            return listener
    except (OSError, OverflowError) as error:
        if isinstance(error, socket.gaierror):
            raise ValueError(f"--host is {host!r}: {error.strerror}; use 127.0.0.1 for this machine only.") from None
        reason = getattr(error, "strerror", None) or "the port must be from 0 to 65535"
        raise ValueError(
            f"--host {host} --port {port}: {reason}. Give another port; --port 0 selects a free one."
        ) from None


def serve(
    models: Sequence[Available],
    host: str,
    port: int,
    ready: Callable[[str], object],
    limits: Limits = LIMITS,
) -> None:
    """Serve the page until it is interrupted; ``ready`` is called with the complete address."""
    import uvicorn

    listener = listening(host, port)
    door = Door(host, listener.getsockname()[1], secrets.token_urlsafe(24))
    config = uvicorn.Config(
        Page(models, limits).application(door),
        log_level="warning",
        access_log=False,
        server_header=False,
        http="h11",
        ws="none",
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=2,
    )
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{door.port}/?token={door.token}")
    with contextlib.suppress(KeyboardInterrupt), listener:
        uvicorn.Server(config).run(sockets=[listener])
