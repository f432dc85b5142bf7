"""One file over HTTP: continued where it was cut off, asked for again after a passing fault, checked as it arrives."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from ssl import SSLCertVerificationError
from typing import cast

from equipoise.lab.data.get.sources import Source
from equipoise.lab.files import write_json

CHUNK = 1 << 18
Report = Callable[[int, int | None], object]  # is told how many bytes are here, and of how many


class DownloadError(OSError):
    """A data set that could not be had; its sentence names the address, what happened and what to do."""


class Lost(DownloadError):
    """A passing fault: the same address may work later, and what has arrived is kept if it can be continued."""


class Refused(DownloadError):
    """An address that does not have the published file: asking again does not help."""


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a part came from, and what tells whether the file there is still the same."""

    url: str = ""
    size: int | None = None
    etag: str | None = None
    modified: str | None = None

    @classmethod
    def of(cls, response: HTTPResponse, url: str, size: int | None) -> Origin:
        etag = response.headers["ETag"] or ""
        strong = etag if not etag.startswith("W/") else ""  # a weak one may stand for different bytes
        return cls(url, size, strong or None, response.headers["Last-Modified"])

    def continued_by(self, response: HTTPResponse, start: int) -> bool:
        """Whether the response is the rest of the same file; it need not repeat both of the file's marks."""
        here, there = self, Origin.of(response, self.url, self.size)
        return (
            response.status == 206
            and response.headers["Content-Range"] == f"bytes {start}-{(self.size or 0) - 1}/{self.size}"
            and there.etag in (None, here.etag)
            and there.modified in (None, here.modified)
        )


class Part:
    """The bytes of a file that has not arrived whole, and beside them a note of their origin.

    Args:
        source: the file.
        target: the folder it belongs in.
    """

    def __init__(self, source: Source, target: Path):
        self.path = target / f"{source.file}.part"
        self.note = target / f"{source.file}.part.json"
        self.checked = bool(source.md5 or source.sha256)

    def begin(self, origin: Origin) -> None:
        """Start over with bytes of this origin; the note comes first, as bytes without one are never continued."""
        self.remove()
        write_json(self.note, asdict(origin))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    @property
    def origin(self) -> Origin:
        try:
            return Origin(**json.loads(self.note.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return Origin()

    @property
    def arrived(self) -> int:
        """How many bytes a later request can continue from; 0 if it would not notice that the file has changed."""
        origin = self.origin
        if origin.size is None or not (origin.etag or origin.modified or self.checked) or not self.path.is_file():
            return 0
        arrived = self.path.stat().st_size
        return arrived if arrived <= origin.size else 0


class Checksums:
    """Published checksums against those of the bytes that arrive."""

    def __init__(self, source: Source):
        self.published = {kind: sum.lower() for kind in ("md5", "sha256") if (sum := getattr(source, kind))}
        self.found = {kind: hashlib.new(kind, usedforsecurity=False) for kind in self.published}

    def update(self, data: bytes) -> None:
        for found in self.found.values():
            found.update(data)

    def read(self, path: Path) -> Checksums:
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                self.update(data)
        return self

    def wrong(self) -> str:
        """What differs; empty if nothing does."""
        return "; ".join(
            f"its {kind} is {found.hexdigest()} and not {self.published[kind]} as published"
            for kind, found in self.found.items()
            if found.hexdigest() != self.published[kind]
        )


def fetch(source: Source, part: Part, timeout: float, attempts: int, pause: float, report: Report) -> None:
    """Have the whole file in ``part``, checked, from the first address that gives it; raises Lost or Refused.

    Args:
        source: the file.
        part: what is here of it.
        timeout: seconds without a byte before a server counts as stalled.
        attempts: how often an address is asked.
        pause: seconds before the second attempt; doubled before each further one.
        report: is told how far it is.
    """
    faults = []
    for url in source.urls:
        fault = None
        for attempt in range(attempts):
            if attempt:
                time.sleep(pause * 2 ** (attempt - 1))
            try:
                return receive(source, url, part, timeout, report)
            except Lost as error:
                fault = error
            except Refused as error:
                fault = error
                if part.origin.url == url:
                    part.remove()
                break
        faults.append((url, fault))
    what = "; ".join(f"{url}: {fault}" for url, fault in faults)
    if part.arrived:
        raise Lost(f"{what}; run the same command again, it continues from the {megabytes(part.arrived)} that arrived.")
    if any(isinstance(fault, Lost) for _, fault in faults):
        raise Lost(f"{what}; the site is down or cannot be reached from here: run the same command again later.")
    raise Refused(
        f"{what}; nothing was kept: get {source.file} elsewhere and "
        f"{'unpack' if source.unpack else 'put'} it into {part.path.parent}."
    )


def receive(source: Source, url: str, part: Part, timeout: float, report: Report) -> None:
    """One request for what is missing of a file, then the check of the whole."""
    origin = part.origin
    start = part.arrived if origin.url == url else 0
    sums = Checksums(source)
    if start:
        sums.read(part.path)
    web_page = False
    if start == 0 or start != origin.size:
        with connect(url, start, origin, timeout) as response:
            if start == 0 or not origin.continued_by(response, start):
                origin, start, sums = begin(response, source, url, part), 0, Checksums(source)
            web_page = is_web_page(response)
            stream(response, part, sums, start, origin.size, timeout, report)
    if wrong := sums.wrong():
        part.remove()
        # What was joined from two transfers may be damaged here, not there: that is worth another attempt.
        raise (Lost if start else Refused)(wrong + (", and it is a web page" if web_page else ""))


def connect(url: str, start: int, origin: Origin, timeout: float) -> HTTPResponse:
    """The server's answer, whatever its status; after ``start`` bytes of ``origin`` it is asked for the rest only."""
    headers = {"User-Agent": "equipoise", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if same := origin.etag or origin.modified:
            headers["If-Range"] = same  # the whole file, not its rest, if it has changed
    opener = urllib.request.OpenerDirector()  # no default one, which would also follow a redirect to ftp
    for handler in HANDLERS:
        opener.add_handler(handler())
    try:
        return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as answer:
        return cast(HTTPResponse, answer)
    except (InvalidURL, ValueError) as error:
        raise Refused(f"this is no address ({error})") from error
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, str | SSLCertVerificationError):  # a redirect to another protocol; an impostor
            raise Refused(f"it cannot be asked ({cause})") from error
        raise lost(cause, timeout) from error


HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
)


def begin(response: HTTPResponse, source: Source, url: str, part: Part) -> Origin:
    """Begin the part anew if the response is the whole file; else say why it is not."""
    status, answer = response.status, f"the server answered {response.status} {response.reason}"
    if status in (206, 416):
        part.remove()
        raise Lost("the file there has changed since a part of it arrived")
    if status in (408, 429) or status >= 500:
        raise Lost(answer)
    if 300 <= status < 400:
        raise Refused("it redirects in a circle or to what is not http")
    if status != 200:
        raise Refused(answer)
    if is_web_page(response) and not part.checked:
        raise Refused("the server sent a web page (text/html) instead of the file")
    if response.length is not None and source.size not in (None, response.length):
        raise Refused(f"the server has {response.length} bytes where {source.size} are published")
    origin = Origin.of(response, url, source.size if response.length is None else response.length)
    part.begin(origin)
    return origin


def stream(
    response: HTTPResponse, part: Part, sums: Checksums, start: int, size: int | None, timeout: float, report: Report
) -> None:
    """Append the body of the response to the part, no more than the ``size`` that the whole file has."""
    if size is not None and size - start > shutil.disk_usage(part.path.parent).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part.path))
    announced = response.length is not None
    arrived = start
    report(arrived, size)
    with part.path.open("ab") as file:
        while size is None or arrived < size:
            data = read(response, CHUNK if size is None else min(CHUNK, size - arrived), timeout)
            if not data:
                break
            file.write(data)
            file.flush()  # what has arrived outlives this process
            sums.update(data)
            arrived += len(data)
            report(arrived, size)
        os.fsync(file.fileno())  # on disk before it gets its name: a power cut must not leave an empty file
    if size is not None and arrived < size:
        raise Lost(f"the connection ended after {arrived} of {size} bytes")
    if size is not None and not announced and read(response, 1, timeout):
        raise Refused(f"the server sends more than the {size} bytes that are published")


def read(response: HTTPResponse, most: int, timeout: float) -> bytes:
    """What has arrived, without waiting for more: so nothing is lost to a timeout."""
    try:
        return response.read1(most)
    except (OSError, HTTPException) as error:
        raise lost(error, timeout) from error


def lost(error: BaseException, timeout: float) -> Lost:
    if isinstance(error, TimeoutError):
        return Lost(f"the server sent nothing for {timeout:g} s")
    return Lost(f"the connection failed ({getattr(error, 'strerror', None) or error})")


def is_web_page(response: HTTPResponse) -> bool:
    return response.headers.get_content_type() == "text/html"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size} bytes"
