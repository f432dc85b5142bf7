"""Downloads against a real server that fails in every way: the sentence, and what is left in the folder afterwards."""

import errno
import functools
import gzip
import hashlib
import io
import os
import random
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
import warnings
import zipfile
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.lab.data.catalogue import RemoteFile
from equipoise.lab.data.get import download
from equipoise.lab.data.get.download import CHUNK, DownloadError, get
from equipoise.lab.data.get.unpack import ArchiveError, Limits, unpack

DATA = random.Random(0).randbytes(300_000)
OLD = b"the copy that was there before"
PART = "set/file.bin.part"
CUT = 6 * CHUNK  # bytes that arrive before a connection breaks; they are written in whole chunks

STALLED = 0.3  # seconds: enough for a busy machine to answer, short enough to wait for

quick = functools.partial(get, "set", progress=False)


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 10)
    monkeypatch.setattr(download, "PAUSES", (0, 0.001))


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


DATA_MD5 = md5(DATA)


def left(folder):
    """Every file below, by its path; locks stay in place."""
    return sorted(tree(folder))


# A server


class Site(ThreadingHTTPServer):
    """Answers each path with its list of answers, one per request, the last one again and again."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Visit)
        self.answers = {}
        self.seen = []  # (path, Range) of each request
        self.sent = 0  # bytes of bodies
        self.closing = threading.Event()

    def url(self, path, *answers):
        self.answers[path] = list(answers)
        return f"http://127.0.0.1:{self.server_port}{path}"

    def handle_error(self, request, client_address):
        assert isinstance(sys.exc_info()[1], ConnectionError)  # the client has had enough


class Visit(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, self.headers["Range"]))
        answers = self.server.answers[self.path]
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)
        self.close_connection = True

    def start(self, status, **headers):
        self.send_response(status)
        self.send_header("Connection", "close")
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def body(self, data):
        for start in range(0, len(data), 1 << 14):
            self.server.sent += len(data[start : start + (1 << 14)])  # before the client can have it
            self.wfile.write(data[start : start + (1 << 14)])

    def log_message(self, *args):
        pass


def serve(
    data=DATA,
    *,
    ranges=True,
    length=0,
    cut=None,
    then=lambda visit: None,
    kind="x/y",
    shift=0,
):
    """Answer with a file: ``length`` is added to its announced length, ``then`` happens after ``cut`` bytes."""

    def answer(visit):
        asked = visit.headers["Range"]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and ranges else 0
        if start >= max(1, len(data)):
            return visit.start(416, Content_Length=0)
        announced = None if length is None else len(data) - start + length
        span = f"bytes {start + shift}-{len(data) - 1}/{len(data)}" if start else None
        visit.start(206 if start else 200, Content_Length=announced, Content_Type=kind, Content_Range=span)
        visit.body(data[start:] if cut is None else data[start : start + cut])
        return then(visit)

    return answer


def status(code, **headers):
    return lambda visit: visit.start(code, Content_Length=0, **headers)


def stall(visit):
    visit.wfile.flush()
    visit.server.closing.wait(60)


def reset(visit):
    visit.wfile.flush()
    visit.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visit.connection.close()


def close(visit):
    visit.close_connection = True


def chunked(data, end=b"0\r\n\r\n"):
    def answer(visit):
        visit.start(200, Transfer_Encoding="chunked")
        visit.body(b"%x\r\n%s\r\n" % (len(data), data) + end)

    return answer


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def file_at(*urls, md5=DATA_MD5, **options):
    return RemoteFile("file.bin", urls, md5=md5, **options)


# Success


def test_the_file_is_had_and_nothing_else(site, tmp_path):
    files = quick([file_at(site.url("/f", serve()), size=len(DATA))], tmp_path)
    assert files == [tmp_path / "set" / "file.bin"]
    assert files[0].read_bytes() == DATA
    assert left(tmp_path) == ["set/file.bin"]


@pytest.mark.parametrize("options", [{}, {"sha256": hashlib.sha256(DATA).hexdigest().upper()}])
@pytest.mark.parametrize("answer", [serve(), serve(length=None), chunked(DATA)])
def test_every_way_to_send_and_to_publish_a_file(site, tmp_path, options, answer):
    [file] = quick([RemoteFile("file.bin", (site.url("/f", answer),), **options)], tmp_path)
    assert file.read_bytes() == DATA
    assert left(tmp_path) == ["set/file.bin"]


def test_an_empty_file_is_a_file(site, tmp_path):
    [file] = quick([file_at(site.url("/f", serve(b"")), md5=md5(b""), size=0)], tmp_path)
    assert file.read_bytes() == b""


def test_redirects_are_followed_and_keep_the_range(site, tmp_path):
    site.url("/there", serve(cut=CUT), serve())
    quick([file_at(site.url("/f", status(302, Location="/there")))], tmp_path)
    assert site.seen[-1] == ("/there", f"bytes={CUT}-")
    assert left(tmp_path) == ["set/file.bin"]


def test_what_is_there_is_not_asked_for_again(site, tmp_path):
    sources = [file_at(site.url("/f", serve())), RemoteFile("b", (site.url("/b", serve(b"b")),))]
    first = quick(sources, tmp_path)
    assert quick(sources, tmp_path) == first
    assert site.seen == [("/f", None), ("/b", None)]


@pytest.mark.parametrize("there", [DATA[:-1], DATA[:-1] + b"x"])
def test_a_wrong_file_is_replaced(site, tmp_path, there):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin").write_bytes(there)
    [file] = quick([file_at(site.url("/f", serve()))], tmp_path)
    assert file.read_bytes() == DATA


def test_mirrors_are_asked_in_order_until_one_has_the_file(site, tmp_path):
    urls = [
        site.url("/gone", status(404)),
        site.url("/down", status(503)),
        site.url("/other", serve(b"another file")),
        site.url("/good", serve()),
        site.url("/never", serve()),
    ]
    quick([file_at(*urls)], tmp_path)
    asked = Counter(path for path, _ in site.seen)
    assert asked == {"/gone": 1, "/down": 2, "/other": 1, "/good": 1}
    assert left(tmp_path) == ["set/file.bin"]


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(503),
        status(429),
        serve(cut=CUT),
        serve(cut=CUT, then=reset),
        serve(cut=CUT, then=stall),
        chunked(DATA, end=b""),
        reset,
        stall,
        close,
    ],
    ids=["500", "503", "429", "truncated", "reset", "stalled", "chunked", "reset at once", "stalled at once", "closed"],
)
def test_a_passing_fault_is_survived(site, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", STALLED)
    [file] = quick([file_at(site.url("/f", fault, serve()))], tmp_path)
    assert file.read_bytes() == DATA
    assert len(site.seen) <= 2  # only the end of a chunked transfer may be missing
    assert left(tmp_path) == ["set/file.bin"]


# Faults: each names its address, says what happened and what to do, and leaves what the rule allows

CONTINUES = r"run the same command again, it continues from the 0.3 MB that arrived\.$"
DOWN = r"the server is down or cannot be reached from here: run the same command again later\.$"
ELSEWHERE = r"; get file.bin elsewhere and put it into .*set\.$"
DAMAGED = DATA[:-1] + bytes([DATA[-1] ^ 1])
MOST = len(DATA) - 1000

FAULTS = {
    "not found": (status(404), {}, "answered 404 Not Found", ELSEWHERE, 1),
    "forbidden": (status(403), {}, "answered 403 Forbidden", ELSEWHERE, 1),
    "error": (status(500), {}, "answered 500 Internal Server Error", DOWN, 2),
    "truncated": (serve(cut=MOST, ranges=False), {}, "connection failed .*299000 bytes read, 1000 more", CONTINUES, 2),
    "truncated, unchecked": (serve(cut=MOST), {"md5": None}, "connection failed .*299000 bytes read", DOWN, 2),
    "stalled": (serve(cut=MOST, then=stall, ranges=False), {}, "server sent nothing for 0.3 s", CONTINUES, 2),
    "stalled at once": (stall, {}, "server sent nothing for 0.3 s", DOWN, 2),
    "reset": (serve(cut=MOST, then=reset, ranges=False), {}, "the connection failed", "continues from|is down", 2),
    "reset at once": (reset, {}, "the connection failed", DOWN, 2),
    "closed at once": (close, {}, "the connection failed .*closed connection", DOWN, 2),
    "damaged": (serve(DAMAGED), {}, f"md5 is {md5(DAMAGED)}, but {md5(DATA)} is published", ELSEWHERE, 1),
    "wrong sha256": (serve(), {"sha256": "0" * 64}, "sha256 is [0-9a-f]{64}, but 0{64} is published", ELSEWHERE, 1),
    "another size": (
        serve(DATA + b"x"),
        {"size": 300000},
        "announces 300001 bytes, but 300000 bytes are published",
        ELSEWHERE,
        1,
    ),
    "announces too much": (serve(length=9, ranges=False), {}, "300000 bytes read, 9 more expected", CONTINUES, 2),
    "announces too little": (serve(length=-9), {}, "md5 is [0-9a-f]{32}, but", ELSEWHERE, 1),
    "unannounced": (chunked(DATA), {"size": 300000}, "announces no size, but 300000 bytes", ELSEWHERE, 1),
    "redirects in a circle": (status(302, Location="/f"), {}, "Exceeded 30 redirects", ELSEWHERE, 1),
    "redirects to a file": (
        status(302, Location="file:///etc/hosts"),
        {},
        "the connection failed .*file:///etc/hosts",
        ELSEWHERE,
        1,
    ),
    "redirects to ftp": (
        status(302, Location="ftp://127.0.0.1/f"),
        {},
        "the connection failed .*ftp://127.0.0.1/f",
        ELSEWHERE,
        1,
    ),
    "web page": (serve(b"<html>", kind="text/html"), {}, "its md5 is .* is published", ELSEWHERE, 1),
    "web page, unchecked": (
        serve(b"<html>", kind="text/html; charset=utf-8"),
        {"md5": None},
        r"a web page \(text/html\) instead of the file",
        ELSEWHERE,
        1,
    ),
}


@pytest.mark.parametrize("before", [None, OLD], ids=["new", "over an old copy"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(site, tmp_path, fault, before, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", STALLED if "stalled" in fault else 10)
    answer, published, what, then, asked = FAULTS[fault]
    if before:
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "file.bin").write_bytes(before)
        if "md5" in published:
            published = {**published, "size": len(DATA)}  # else the old copy is as good as any
    url = site.url("/f", answer)
    with pytest.raises(DownloadError, match=f"^{re.escape(url)}: .*({what})") as caught:
        quick([file_at(url, **published)], tmp_path)
    assert re.search(then, str(caught.value))
    kept = [PART] if "continues from" in str(caught.value) else []
    assert left(tmp_path) == (["set/file.bin"] if before else []) + kept
    if before:
        assert (tmp_path / "set" / "file.bin").read_bytes() == before
    if "redirects in" not in fault:
        assert len(site.seen) == asked


def test_every_address_that_failed_is_named(site, tmp_path):
    urls = [site.url("/gone", status(404)), site.url("/down", status(500))]
    with pytest.raises(DownloadError, match="/gone: the server answered 404.*; .*/down: the server answered 500"):
        quick([file_at(*urls)], tmp_path)
    assert left(tmp_path) == []


def test_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DownloadError, match=r"the connection failed \(Connection refused\); the server is down"):
        quick([file_at(f"http://127.0.0.1:{port}/f")], tmp_path / "new" / "folder")
    assert left(tmp_path) == []


def test_files_before_the_one_that_failed_stay(site, tmp_path):
    good, bad = file_at(site.url("/f", serve())), RemoteFile("b", (site.url("/b", status(404)),))
    with pytest.raises(DownloadError, match="404"):
        quick([good, bad], tmp_path)
    assert left(tmp_path) == ["set/file.bin"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"urls": ("file:///etc/hosts",)}, "RemoteFile.urls is .*; addresses must begin with http:// or https://"),
        ({"urls": ("http://a/b", "ftp://a/b")}, "must begin with http"),
        ({"file": "../file.bin"}, "RemoteFile.file is '../file.bin'; it must be a name without a folder"),
        ({"file": "/etc/hosts"}, "a name without a folder"),
        ({"file": ""}, "a name without a folder"),
    ],
)
def test_a_file_that_cannot_be_is_rejected_at_once(change, words):
    with pytest.raises(ValueError, match=words):
        RemoteFile(**{"file": "file.bin", "urls": ("http://127.0.0.1/f",), **change})


def test_an_address_that_is_none(tmp_path):
    with pytest.raises(DownloadError, match="the connection failed .*127.0.0.1:port"):
        quick([file_at("http://127.0.0.1:port/f")], tmp_path)
    assert left(tmp_path) == []


# Continuing


@contextmanager
def once():
    """Ask each address only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "PAUSES", (0,))
        yield


def interrupted(site, tmp_path, *answers, **published):
    """A file of which an earlier run left the first bytes; the next requests get these answers."""
    url = site.url("/f", serve(cut=CUT), *answers)
    remote = file_at(url, **published)
    with once(), pytest.raises(DownloadError, match="continues from the 0.1 MB that arrived"):
        quick([remote], tmp_path)
    site.sent, site.seen = 0, []
    return remote


def test_only_what_is_missing_is_sent_again(site, tmp_path):
    remote = interrupted(site, tmp_path, serve())
    assert left(tmp_path) == [PART]
    [file] = quick([remote], tmp_path)
    assert file.read_bytes() == DATA
    assert site.seen == [("/f", f"bytes={CUT}-")]
    assert site.sent == len(DATA) - CUT
    assert left(tmp_path) == ["set/file.bin"]


@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        (serve(ranges=False), 1),
        (serve(shift=7), 2),  # sends another range than it was asked for
        (status(416), 2),
    ],
    ids=["without ranges", "another range", "beyond its end"],
)
def test_what_does_not_continue_the_part_replaces_it(site, tmp_path, answer, requests):
    remote = interrupted(site, tmp_path, answer, serve())
    [file] = quick([remote], tmp_path)
    assert file.read_bytes() == DATA
    assert [asked for _, asked in site.seen] == [f"bytes={CUT}-", None][:requests]
    assert left(tmp_path) == ["set/file.bin"]


def test_without_a_checksum_a_broken_transfer_is_started_over(site, tmp_path):
    remote = file_at(site.url("/f", serve(cut=CUT), serve(DATA[::-1])), md5=None)
    with once(), pytest.raises(DownloadError, match="run the same command again later"):
        quick([remote], tmp_path)
    assert left(tmp_path) == []
    [file] = quick([remote], tmp_path)
    assert file.read_bytes() == DATA[::-1]
    assert site.seen == [("/f", None), ("/f", None)]


def test_a_file_that_changed_meanwhile_is_found_out_by_its_checksum(site, tmp_path):
    now = DATA[::-1]
    remote = interrupted(site, tmp_path, serve(now), md5=md5(now))
    [file] = quick([remote], tmp_path)
    assert file.read_bytes() == now
    assert site.seen == [("/f", f"bytes={CUT}-"), ("/f", None)]


def test_a_mirror_continues_what_another_began(site, tmp_path):
    urls = [site.url("/f", serve(cut=CUT), status(503)), site.url("/mirror", serve())]
    [file] = quick([file_at(*urls)], tmp_path)
    assert file.read_bytes() == DATA
    assert site.seen[-1] == ("/mirror", f"bytes={CUT}-")


def test_a_part_that_is_longer_than_the_file_is_started_over(site, tmp_path):
    source = interrupted(site, tmp_path, serve())
    with (tmp_path / PART).open("ab") as part:
        part.write(DATA)
    [file] = quick([source], tmp_path)
    assert file.read_bytes() == DATA
    assert [asked for _, asked in site.seen] == [f"bytes={CUT + len(DATA)}-", None]


def test_a_part_that_is_complete_needs_no_server(site, tmp_path):
    source = interrupted(site, tmp_path, status(500))
    (tmp_path / PART).write_bytes(DATA)
    [file] = quick([source], tmp_path)
    assert file.read_bytes() == DATA
    assert site.seen == []


def test_a_part_stays_while_its_server_is_down_and_goes_when_the_file_is_gone(site, tmp_path):
    source = interrupted(site, tmp_path, status(503), status(503), status(404))
    with pytest.raises(DownloadError, match="answered 503 .*continues from the 0.1 MB that arrived"):
        quick([source], tmp_path)
    assert left(tmp_path) == [PART]
    with pytest.raises(DownloadError, match="answered 404"):
        quick([source], tmp_path)
    assert left(tmp_path) == []


def test_a_mirror_without_the_file_does_not_cost_what_has_arrived(site, tmp_path):
    urls = [site.url("/f", serve(cut=CUT, ranges=False)), site.url("/gone", status(404))]
    with pytest.raises(DownloadError, match="/gone: .*404.*continues from the 0.1 MB that arrived"):
        quick([file_at(*urls)], tmp_path)
    assert left(tmp_path) == [PART]


def wait_for(part, size):
    """Wait until ``size`` bytes are on disk."""
    for _ in range(2000):
        if part.exists() and part.stat().st_size >= size:
            return
        time.sleep(0.01)
    raise AssertionError(f"{part} does not grow to {size} bytes")


def test_an_interrupt_leaves_what_has_arrived(site, tmp_path):
    def interrupt(visit):
        visit.wfile.flush()
        wait_for(tmp_path / PART, CUT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        stall(visit)

    source = file_at(site.url("/f", serve(cut=CUT, then=interrupt), serve()))
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            quick([source], tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert left(tmp_path) == [PART]
    quick([source], tmp_path)
    assert site.seen[1] == ("/f", f"bytes={CUT}-")
    assert left(tmp_path) == ["set/file.bin"]


# Room


def test_a_disk_that_is_too_small_is_noticed_before_the_first_byte(site, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=250_000))
    with pytest.raises(DownloadError, match="set cannot be written into .*: No space left on device .*make room"):
        quick([file_at(site.url("/f", serve()))], tmp_path)
    assert left(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile(site, tmp_path, monkeypatch):
    def full(number):  # where file systems that allocate late say it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match="set cannot be written into .*set: No space left on device .*make room"):
        quick([file_at(site.url("/f", serve()))], tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize("where", ["", "set"])
def test_a_file_in_place_of_the_folder(site, tmp_path, where):
    (tmp_path / "folder").mkdir()
    place = tmp_path / "folder" / where if where else tmp_path / "folder" / "file"
    place.write_bytes(b"")
    with pytest.raises(
        DownloadError, match="set cannot be written into .*(File exists|Not a directory).*another folder"
    ):
        quick([file_at(site.url("/f", serve()))], tmp_path / "folder" if where else place)
    assert left(tmp_path) == [place.relative_to(tmp_path).as_posix()]
    assert site.seen == []


def test_a_folder_in_place_of_the_file(site, tmp_path):
    (tmp_path / "set" / "file.bin").mkdir(parents=True)
    with pytest.raises(DownloadError, match="cannot be written into .*Is a directory"):
        quick([file_at(site.url("/f", serve()))], tmp_path)
    assert left(tmp_path) == []


# Other processes


def child(script, *arguments):
    """A Python process of its own that runs a script after the imports it needs."""
    imports = "import sys, json, pathlib; from equipoise.lab.data.get.download import get, DownloadError\n"
    imports += "from equipoise.lab.data.catalogue import RemoteFile\n"
    command = [sys.executable, "-c", imports + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_that_is_killed_keeps_others_out_while_it_lives_and_is_continued_after(site, tmp_path):
    waiting = threading.Event()

    def wait(visit):
        visit.wfile.flush()
        waiting.set()
        stall(visit)

    source = file_at(site.url("/f", serve(cut=CUT, then=wait), serve()))
    script = "get('set', [RemoteFile('file.bin', (sys.argv[1],), md5=sys.argv[2])], pathlib.Path(sys.argv[3]))"
    process = child(script, source.urls[0], source.md5, tmp_path)
    try:
        assert waiting.wait(60)
        wait_for(tmp_path / PART, CUT)
        with pytest.raises(DownloadError, match="another process is downloading into .*set; try again"):
            quick([source], tmp_path)
        assert left(tmp_path) == [PART]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    site.sent = 0
    [file] = quick([source], tmp_path)
    assert file.read_bytes() == DATA
    assert site.seen[1:] == [("/f", f"bytes={CUT}-")]
    assert site.sent == len(DATA) - CUT
    assert left(tmp_path) == ["set/file.bin"]


def test_a_real_limit_on_the_size_of_files(site, tmp_path):
    """The system itself refuses a write, in the middle of a download and in the middle of unpacking."""
    packed = zipped({"a": b"a", "zeros": bytes(300_000)})
    assert len(packed) < 150_000
    urls = [site.url("/f", serve()), site.url("/z", serve(packed))]
    script = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
        for url, unpack in zip(sys.argv[2:], (False, True)):
            try:
                get("set", [RemoteFile("file.bin", (url,), unpack=unpack)], pathlib.Path(sys.argv[1]), progress=False)
            except DownloadError as error:
                print(error)
    """
    said, failed = child(script, tmp_path, *urls).communicate(timeout=60)
    assert not failed
    assert len(re.findall(r"set cannot be written into .*: File too large .*make room.*\n", said)) == 2
    assert left(tmp_path) == []


def test_two_at_once_do_not_disturb_each_other(site, tmp_path):
    source = file_at(site.url("/f", serve()))
    outcomes = []

    def run():
        try:
            outcomes.append(quick([source], tmp_path))
        except DownloadError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    had = [outcome for outcome in outcomes if outcome == [tmp_path / "set" / "file.bin"]]
    kept_out = [outcome for outcome in outcomes if "another process is downloading" in outcome]
    assert had
    assert len(had) + len(kept_out) == 8
    assert (tmp_path / "set" / "file.bin").read_bytes() == DATA
    assert left(tmp_path) == ["set/file.bin"]


# What is said meanwhile


def test_lines_where_there_is_no_terminal(site, tmp_path, capsys):
    source = file_at(site.url("/f", serve()))
    quick([source], tmp_path, progress=True)
    assert capsys.readouterr().err == f"file.bin: downloading from {source.urls[0]}\n"
    quick([source], tmp_path, progress=True)
    assert capsys.readouterr().err == f"set: already there, in {tmp_path / 'set'}\n"
    quick([source], tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(site, tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    quick([file_at(site.url("/f", serve(cut=CUT), serve()))], tmp_path, progress=True)
    assert re.search(r"100%.*202k/202k", terminal.getvalue())


# Archives


def zipped(files, **options):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


def tarred(files, mode="w:gz", **options):
    """``files``: name -> bytes, or a TarInfo's changes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode, **options) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            else:
                vars_of = {"type": tarfile.REGTYPE, **data}
                for key, value in vars_of.items():
                    setattr(info, key, value)
                archive.addfile(info)
    return packed.getvalue()


TREE = {"top/a.txt": b"a" * 1000, "top/deep/b.bin": DATA[:5000], "c": b""}
PACKED = {"zip": zipped(TREE), "tar": tarred(TREE, "w"), "tar.gz": tarred(TREE)}


def archive_at(url, **options):
    return RemoteFile("archive", (url,), unpack=True, **options)


def tree(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", PACKED)
def test_an_archive_is_unpacked_whatever_its_name(site, tmp_path, kind):
    packed = PACKED[kind]
    source = archive_at(site.url("/a", serve(packed)), md5=md5(packed), contents={"top/a.txt": md5(b"a" * 1000)})
    files = quick([source], tmp_path)
    note = ".archive.unpacked.json"
    assert sorted(files) == sorted(tmp_path / "set" / name for name in TREE)
    assert {name: data for name, data in tree(tmp_path / "set").items() if name != note} == TREE
    assert left(tmp_path) == sorted(f"set/{name}" for name in (note, *TREE))
    assert quick([source], tmp_path) == files
    assert len(site.seen) == 1


@pytest.mark.parametrize("harm", ["removed", "cut short", "changed", "another archive", "note removed"])
def test_an_unpacked_archive_is_had_again_when_it_is_not_whole(site, tmp_path, harm):
    source = archive_at(site.url("/a", serve(PACKED["zip"])), contents={"top/a.txt": md5(TREE["top/a.txt"])})
    quick([source], tmp_path)
    if harm == "removed":
        (tmp_path / "set" / "c").unlink()
    elif harm == "cut short":
        (tmp_path / "set" / "top/deep/b.bin").write_bytes(b"")
    elif harm == "changed":
        (tmp_path / "set" / "top/a.txt").write_bytes(b"b" * 1000)
    elif harm == "another archive":
        source = archive_at(source.urls[0], md5=md5(PACKED["zip"]))
    else:
        (tmp_path / "set" / ".archive.unpacked.json").unlink()
        assert quick([source], tmp_path) == [tmp_path / "set" / "top/a.txt"]  # what is published of it is there
        source = archive_at(source.urls[0])
    quick([source], tmp_path)
    assert len(site.seen) == 2
    assert {name: data for name, data in tree(tmp_path / "set").items() if name in TREE} == TREE


def test_two_archives_may_share_a_folder(site, tmp_path):
    sources = [
        RemoteFile("one", (site.url("/1", serve(zipped({"top/a": b"1"}))),), unpack=True),
        RemoteFile("two", (site.url("/2", serve(zipped({"top/b": b"2"}))),), unpack=True),
    ]
    files = quick(sources, tmp_path)
    assert [file.read_bytes() for file in files] == [b"1", b"2"]
    assert quick(sources, tmp_path) == files


def link(name):
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def zip_link(name="link", target="/etc"):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(link(name), target)
        archive.writestr(f"{name}/inside", b"x")
    return packed.getvalue()


def zip_twice(name="same"):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile notices
        archive.writestr(name, b"1")
        archive.writestr(name, b"2")
    return packed.getvalue()


def lying(size, data=b"x" * 1000):
    """A zip whose only entry has ``data`` and says, in both of its headers, that it has ``size`` bytes."""
    packed = bytearray(zipped({"liar": data}))
    local, central = packed.index(b"PK\x03\x04"), packed.index(b"PK\x01\x02")
    packed[local + 22 : local + 26] = packed[central + 24 : central + 28] = struct.pack("<I", size)
    return bytes(packed)


def flagged(flag):
    packed = bytearray(zipped({"secret": b"x"}))
    packed[packed.index(b"PK\x01\x02") + 8] |= flag
    return bytes(packed)


def flipped(packed, position):
    return packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :]


def gzip_bomb():
    """A small tar.gz that goes on with zeros after its end."""
    return gzip.compress(tarred({"a": b"a"}, "w") + bytes(70_000_000), 1)


def pax(**headers):
    return tarred({"a": {"pax_headers": headers}}, "w", format=tarfile.PAX_FORMAT)


def long_header(size):
    """A tar that begins with an extended header of ``size`` bytes, which readers take into memory."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, size
    return info.tobuf() + bytes(2048)


PLAIN_TAR = tarred({"a": b"a" * 600, "b": b"b" * 600, "c": b"c"}, "w")

ARCHIVES = {
    "not an archive": (DATA, "damaged, or not a zip, tar"),
    "empty": (b"", "damaged, or not a zip, tar"),
    "gzip of no tar": (gzip.compress(DATA), "damaged, or not"),
    "zip of nothing": (zipped({}), "holds 0 files"),
    "tar of nothing": (tarred({}), "damaged, or not|holds 0 files"),
    "zip escape": (zipped({"ok": b"", "../out": b"x"}), "'../out' does not have a plain relative path"),
    "zip inner escape": (zipped({"a/../../out": b"x"}), "'a/../../out' does not have a plain relative path"),
    "zip absolute": (zipped({"/etc/out": b"x"}), "'/etc/out' does not have a plain relative path"),
    "zip drive": (zipped({"C:/out": b"x"}), "'C:/out' does not have a plain relative path"),
    "zip backslash": (zipped({"..\\out": b"x"}), "does not have a plain relative path"),
    "zip link": (zip_link(), "'link' is a link or a special file"),
    "zip duplicate": (zip_twice(), "do not have the 2 bytes it states"),
    "zip file and folder": (zipped({"a": b"", "a/b": b""}), "damaged, or not"),
    "zip folder and file": (zipped({"a/b": b"", "a": b""}), "damaged, or not"),
    "zip nameless": (zipped({".": b"x"}), "damaged, or not"),
    "zip deep": (zipped({"a/" * 900 + "b": b""}), "does not have a plain relative path of at most 64"),
    "zip encrypted": (flagged(0x01), "'secret'.* is encrypted"),
    "zip bomb": (
        zipped({"bomb": bytes(65_000_000)}, compresslevel=1),
        "or 64000000 bytes with its entry 'bomb'",
    ),
    "zip says less": (lying(10), "damaged, or .*'liar'"),
    "zip says more": (lying(2000), "do not have the 2000 bytes it states"),
    "zip says terabytes": (lying(2**32 - 2), "or 64000000 bytes with its entry 'liar'"),
    "zip cut": (PACKED["zip"][:-30], "damaged, or not"),
    "zip checksum": (
        flipped(PACKED["zip"], PACKED["zip"].index(b"PK\x01\x02") + 16),
        "damaged.*CRC.*'top/a.txt'",
    ),
    "zip data": (flipped(zipped({"a": DATA}), 1000), "damaged, or not"),
    "zip method": (flipped(PACKED["zip"], PACKED["zip"].index(b"PK\x01\x02") + 10), "compression method"),
    "tar escape": (tarred({"../out": b"x"}), "'../out' does not have a plain relative path"),
    "tar absolute": (tarred({"/etc/out": b"x"}), "'/etc/out' does not have a plain relative path"),
    "tar link": (
        tarred({"l": {"type": tarfile.SYMTYPE, "linkname": "/etc"}, "l/x": b"x"}),
        "'l' is a link or a special file",
    ),
    "tar hard link": (
        tarred({"a": b"a", "b": {"type": tarfile.LNKTYPE, "linkname": "a"}}),
        "'b' is a link or a special file",
    ),
    "tar pipe": (tarred({"p": {"type": tarfile.FIFOTYPE}}), "'p' is a link or a special file"),
    "tar device": (tarred({"d": {"type": tarfile.CHRTYPE}}), "'d' is a link or a special file"),
    "tar sparse": (tarred({"s": {"type": tarfile.GNUTYPE_SPARSE}}, "w"), "is a link or a special file|damaged"),
    "tar zero byte": (pax(path="a\0b"), "does not have a plain relative path"),
    "tar bomb": (
        lambda: tarred({"bomb": bytes(65_000_000)}, compresslevel=1),
        "or 64000000 bytes with its entry 'bomb'",
    ),
    "tar bomb after its end": (gzip_bomb, "more than 64000000 bytes: a bomb"),
    "tar terabytes": (
        tarred({"t": {"size": 2**40}}, "w", format=tarfile.GNU_FORMAT),
        "or 64000000 bytes with its entry 't'",
    ),
    "tar negative": (pax(size="-1024"), "is a link or a special file"),
    "tar long header": (long_header(2**31), "has a header of 2147483648 bytes"),
    "tar.gz cut": (PACKED["tar.gz"][:-30], "damaged, or not"),
    "tar.gz checksum": (flipped(PACKED["tar.gz"], len(PACKED["tar.gz"]) - 6), "damaged, or not"),
    "tar cut in a file": (PLAIN_TAR[:800], "damaged, or not"),
    "tar cut in a header": (PLAIN_TAR[: 3 * 512 + 100], "the end of the archive is missing"),
    "tar cut between entries": (PLAIN_TAR[: 3 * 512], "the end of the archive is missing"),
    "tar damaged header": (flipped(PLAIN_TAR, 3 * 512), "the end of the archive is missing"),
}


@pytest.mark.parametrize("fault", ARCHIVES)
def test_an_archive_that_is_not_unpacked(site, tmp_path, fault):
    packed, words = ARCHIVES[fault]
    packed = packed() if callable(packed) else packed  # a bomb is large while it is made
    old = archive_at(site.url("/old", serve(PACKED["zip"])))
    files = quick([old], tmp_path)
    before = left(tmp_path), tree(tmp_path)
    new = archive_at(site.url("/new", serve(packed)), md5=md5(packed))
    with pytest.raises(DownloadError, match=f"/new: the archive.*({words}).*; get archive elsewhere"):
        quick([new], tmp_path)
    assert (left(tmp_path), tree(tmp_path)) == before
    assert quick([old], tmp_path) == files


def test_limits_are_those_given(tmp_path):
    archive, target = tmp_path / "archive", tmp_path / "target"
    archive.write_bytes(PACKED["tar.gz"])
    target.mkdir()
    with pytest.raises(ArchiveError, match="more than 2 entries or"):
        unpack(archive, target, limits=Limits(entries=2))
    with pytest.raises(ArchiveError, match="or 5000 bytes"):
        unpack(archive, target, limits=Limits(size=5000))
    with pytest.raises(ArchiveError, match=f"or {len(PACKED['tar.gz'])} bytes"):
        unpack(archive, target, limits=Limits(small=100, ratio=1))
    assert left(target) == []


def test_rights_in_an_archive_are_limited(tmp_path):
    archive, target = tmp_path / "archive", tmp_path / "target"
    archive.write_bytes(tarred({"run": {"mode": 0o6777}, "locked": {"mode": 0}}))
    target.mkdir()
    unpack(archive, target)
    assert {path.name: oct(path.stat().st_mode & 0o7777) for path in target.iterdir()} == {
        "run": "0o755",
        "locked": "0o600",
    }


def test_what_a_killed_run_had_unpacked_is_removed(site, tmp_path):
    half = tmp_path / "set" / ".archive.part.unpacking" / "top"
    half.mkdir(parents=True)
    (half / "a.txt").touch()
    quick([archive_at(site.url("/a", serve(PACKED["zip"])))], tmp_path)
    assert ".archive.part.unpacking" not in os.listdir(tmp_path / "set")


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\\\0:", exclude_categories=["Cs"]), min_size=1, max_size=8
)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(paths, st.binary(max_size=200), min_size=1, max_size=6).filter(
    lambda files: not any(f"{other}/".startswith(f"{path}/") for path in files for other in files if path != other)
)


@pytest.mark.parametrize("pack", [zipped, tarred, functools.partial(tarred, mode="w")], ids=["zip", "tar.gz", "tar"])
@given(files=trees)
def test_any_tree_comes_out_as_it_went_in(tmp_path_factory, pack, files):
    folder = tmp_path_factory.mktemp("tree")
    (folder / "archive").write_bytes(pack(files))
    (folder / "target").mkdir()
    assert unpack(folder / "archive", folder / "target") == {name: len(data) for name, data in files.items()}
    assert tree(folder / "target") == files


@pytest.mark.parametrize("kind", PACKED)
@given(data=st.data())
def test_damage_anywhere_is_an_error_or_harmless(tmp_path_factory, kind, data):
    packed = bytearray(PACKED[kind])
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "archive").write_bytes(packed[: data.draw(st.integers(len(packed) // 2, len(packed)))])
    (folder / "target").mkdir()
    try:
        sizes = unpack(folder / "archive", folder / "target")
    except ArchiveError:
        assert left(folder) == ["archive"]
    else:
        assert {name: len(data) for name, data in tree(folder / "target").items()} == sizes
