"""The door, uploads, hostile requests, bounds, turns: what may reach the models, and for how long."""

import asyncio
import http.client
import io
import json
import logging
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import equipoise.page.available
import equipoise.page.server
from equipoise.cli import main
from equipoise.page.guard import Door
from equipoise.page.jobs import Queue
from equipoise.page.limits import LIMITS
from equipoise.page.pictures import decoded
from equipoise.page.refused import Refused
from equipoise.page.sent import Sent
from page_server import RUNS, Server, Visitor, picture, wait, workers

STATIC = Path(equipoise.page.server.__file__).parent / "static"


def drawing(server, **changes):
    fields = {"solver": "picard", "step": 1, "second": "none", "second_step": 0, "tolerance": 1e-3, "steps": 20}
    image = picture(torch.zeros(1, 28, 28, dtype=torch.uint8))
    return {"model": server.model("draw").name, "image": image, **fields, **changes}


# The door


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"Cookie": ""}, "contains a token"),
        ({"Cookie": "equipoise-PORT=wrong.visitor"}, "contains a token"),
        ({"Cookie": "equipoise-PORT=TOKEN"}, "contains a token"),  # without a visitor
        ({"Origin": "http://example.org"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Origin": "http://127.0.0.1:1"}, "Origin"),
        ({"Origin": "http://localhost:PORT"}, "Origin"),  # not the host that was asked
        ({"Origin": ""}, "Origin"),
        ({"Host": "example.org"}, "Host"),
        ({"Host": "example.org:PORT"}, "Host"),
        ({"Host": "127.0.0.1"}, "Host"),
        ({"Host": "127.0.0.1.example.org:PORT"}, "Host"),
        ({"Host": "user@127.0.0.1:PORT"}, "Host"),
        ({"Host": "192.0.2.1:PORT"}, "Host"),
        ({"Host": ""}, "Host"),
    ],
)
@pytest.mark.parametrize("path", ["/draw/solve", "/upload/restore"])
def test_requests_of_others_are_refused(server, visitor, headers, path, sentence):
    given = {k: v.replace("PORT", str(server.port)).replace("TOKEN", server.token) for k, v in headers.items()}
    answer = visitor.request("POST", path, json.dumps(drawing(server)), given)
    assert answer.status == 403
    assert sentence in answer.text
    assert "set-cookie" not in answer.headers


def test_a_post_without_origin_and_a_second_host_are_refused(server, visitor):
    own = f"127.0.0.1:{server.port}"
    lines = f"POST /draw/solve HTTP/1.1\r\nCookie: {visitor.cookie}\r\nContent-Length: 0\r\nHost: {own}\r\n"
    for more in ("", f"Origin: http://{own}\r\nHost: {own}\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as wire:
            wire.sendall(f"{lines}{more}\r\n".encode())
            assert wire.recv(100).split()[1] in (b"403", b"400")


def test_the_token_opens_the_page_alone_and_becomes_a_cookie(server, visitor):
    assert re.fullmatch(rf"equipoise-{server.port}={server.token}\.[\w-]{{8,}}", visitor.cookie)
    assert visitor.cookie != Visitor(server).cookie  # each browser is a visitor of its own
    visitor.cookie = ""
    for path in (f"/facts?token={server.token}", "/", f"/?token={server.token[:-1]}", "/static/main.js"):
        assert visitor.request("GET", path).status == 403
    cookie = visitor.request("GET", f"/?token={server.token}").headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_localhost_is_known_too(server, visitor):
    own = {"Host": f"localhost:{server.port}", "Origin": f"http://localhost:{server.port}"}
    assert visitor.request("POST", "/draw/solve", json.dumps(drawing(server)), own).status == 200


@pytest.mark.parametrize(
    ("host", "asked", "known"),
    [
        ("127.0.0.1", "[::1]:80", True),
        ("127.0.0.1", "192.0.2.7:80", False),
        ("0.0.0.0", "192.0.2.7:80", True),
        ("0.0.0.0", "[2001:db8::1]:80", True),
        ("0.0.0.0", "evil.example:80", False),  # a name that others define may lead here
        ("lab.example", "lab.example:80", True),
        ("lab.example", "other.example:80", False),
        ("0.0.0.0", "192.0.2.7:81", False),
        ("0.0.0.0", "a:b:80", False),
        ("0.0.0.0", "[::1", False),
    ],
)
def test_hosts_on_a_network(host, asked, known):
    assert Door(host, 80, "token").knows(asked) is known


def test_every_answer_has_the_policy(server, visitor):
    for path in ("/", "/static/main.js", "/facts", "/nothing", "/static/../server.py", "/static/%2e%2e/server.py"):
        answer = visitor.request("GET", path)
        assert answer.status in (200, 404)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
    assert visitor.request("GET", "/static/../server.py").status == 404


def test_the_page_is_small_and_loads_nothing_from_elsewhere(visitor):
    files = list(STATIC.iterdir())
    assert sum(file.stat().st_size for file in files) < 150_000
    for file in files:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # the name of SVG, not an address
        assert not re.search(r"https?:|//\w+\.\w|\beval\b|innerHTML| style=| on\w+=\"", text), file
        assert visitor.request("GET", f"/static/{file.name}").text == file.read_text()


def test_every_view_has_a_model_that_ships_with_the_package():
    with Server([]).running() as served:
        views = json.loads(Visitor(served).request("GET", "/facts").text)["views"]
        assert {name: bool(view["models"]) for name, view in views.items()} == dict.fromkeys(
            equipoise.page.server.VIEWS, True
        )


def test_views_without_a_model_name_a_command(runs, monkeypatch):
    monkeypatch.setattr(equipoise.page.available, "list_weights", list)
    with Server(runs[:1]).running() as served:
        visitor = Visitor(served)
        views = json.loads(visitor.request("GET", "/facts").text)["views"]
        assert [name for name, view in views.items() if view["models"]] == ["draw"]
        assert all("`equipoise page --run runs/" in view["missing"] for view in views.values())
        answer = visitor.post("/inside/examples", {"model": "x", "seed": 0})
        assert answer.status == 400
        assert "equipoise train opteq/" in json.loads(answer.text)["message"]


# Uploads


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def upload(server, visitor, data, view="restore", run="generator"):
    path = f"/upload/{view}?model={server.model(run).name}"
    (event,) = visitor.events(path, data)
    return event


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM"])
def test_uploads_are_decoded_to_the_models_size(server, visitor, kind):
    image = Image.linear_gradient("L").resize((80, 60))
    kind_of, data = upload(server, visitor, encoded(image, kind))
    assert kind_of == "picture"
    assert (data["picture"]["width"], data["picture"]["height"], data["picture"]["channels"]) == (28, 28, 1)
    assert data["note"] == "80 x 60 pixels, cropped in the middle and resized to 28 x 28."


def test_a_street_scene_keeps_its_proportions_and_is_turned(server, visitor):
    image = Image.new("RGB", (1200, 800), (10, 200, 30))
    exif = Image.Exif()
    exif[274] = 6  # a quarter turn
    _, data = upload(server, visitor, encoded(image, "JPEG", exif=exif), "segment", "segment")
    height, width = data["picture"]["height"], data["picture"]["width"]
    assert height * width <= LIMITS.pixels
    assert height / width == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (encoded(Image.new("L", (64, 64)))[:60], "cannot be read"),
        (encoded(Image.new("1", (5000, 5000))), "at most 16 million pixels"),
        (encoded(Image.new("1", (30000, 6000))), "89,000,000 are read"),
    ],
)
def test_a_wrong_upload_gets_a_sentence(server, visitor, data, words):
    kind, error = upload(server, visitor, data)
    assert kind == "refused"
    assert error["control"] == "upload"
    assert words in error["message"]


def test_too_many_bytes_are_refused_before_they_are_read(server, visitor):
    path = f"/upload/restore?model={server.model('generator').name}"
    for headers, body in (
        ({"Content-Length": str(LIMITS.upload + 1)}, b"x"),
        ({"Transfer-Encoding": "chunked"}, b"".join(b"10000\r\n" + bytes(0x10000) + b"\r\n" for _ in range(124))),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as wire:
            lines = {"Host": f"127.0.0.1:{server.port}", **visitor.headers(), **headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            wire.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode())
            try:
                wire.sendall(body)
            except OSError:
                continue  # the server has closed the connection already
            assert wire.recv(100).split()[1] == b"413"


def test_a_body_that_does_not_arrive_is_given_up(runs):
    with Server(runs[:1], replace(LIMITS, body_seconds=0.2)).running() as served:
        visitor = Visitor(served)
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as wire:
            lines = {"Host": f"127.0.0.1:{served.port}", **visitor.headers(), "Content-Length": "100"}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            wire.sendall(f"POST /draw/solve HTTP/1.1\r\n{head}\r\n{{".encode())
            assert wire.recv(100).split()[1] == b"408"


def test_uploads_are_not_written_to_disk(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args) or pytest.fail("a file was opened"))
    decoded(encoded(Image.new("L", (40, 40), 7)), (1, 28, 28))
    assert opened == []


# Hostile requests

JUNK = [
    None, True, -1, 0, 1e308, "", "x" * 3000, "../../etc/passwd", [], {}, [[[]]], {"a": 1}, "\x1b[2J", "1",
    {"width": 28, "height": 28, "channels": 1, "data": "AA=="},
    {"width": -1, "height": 28, "channels": 1, "data": ""},
    {"width": 10**9, "height": 10**9, "channels": 1, "data": ""},
    {"width": 10**4000, "height": 10**4000, "channels": 3, "data": ""},
    {"width": 28, "height": 28, "channels": 1, "data": "!" * 1046},
    {"width": 28.0, "height": "28", "channels": None, "data": 5},
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 3000, b'{"model": NaN}', b'{"a": 1e999}', b"9" * 5000, b'"\\ud800"',
    b'{"model": "\\u0000"}', b'{"model": {"model": {}}}',
]  # fmt: skip


def mutated(rng, fields):
    """A request in which some fields are junk, missing or unknown."""
    fields = dict(fields)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(fields))
        action = rng.randrange(3)
        if action == 0:
            fields[name] = rng.choice(JUNK)
        elif action == 1 and len(fields) > 1:
            del fields[name]
        else:
            fields[rng.choice(["extra", "__class__", "steps ", ""])] = rng.choice(JUNK)
    return json.dumps(fields).encode()


def damaged_files(rng):
    """Image files with bytes changed, cut off or repeated."""
    image = Image.frombytes("RGB", (30, 30), rng.randbytes(2700))
    data = bytearray(encoded(image, rng.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])))
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(1, len(data) + 1)]) if rng.random() < 0.5 else bytes(data)


def resident():
    """The memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_two_hundred_malformed_requests(server, visitor, caplog):
    generator, blank = server.model("generator").name, picture(torch.zeros(1, 28, 28, dtype=torch.uint8))
    street = {"model": server.model("segment").name, "image": picture(torch.zeros(3, 20, 20, dtype=torch.uint8))}
    whole = {
        "/draw/solve": drawing(server),
        "/draw/attack": {"model": server.model("draw").name, "image": blank, "radius": 1},
        "/restore/solve": {
            "model": generator,
            "image": blank,
            "hole": blank,
            "noise": 0,
            "blur": 0,
            "steps": 1,
            "seed": 0,
        },
        "/generate/image": {
            "model": generator,
            "seed": 0,
            "first": 0,
            "second": 1,
            "share": 0,
            "entry": 1,
            "move": 0,
        },
        "/segment/solve": {**street, "steps": 1},
    }
    rng, seen = random.Random(0), []

    def attack(number):
        if number % 4 == 0:
            view = rng.choice(["restore", "segment", "nothing"])
            answer = visitor.post(f"/upload/{view}?model={generator}", damaged_files(rng))
        elif number % 10 == 1:
            answer = visitor.post(rng.choice(sorted(whole)), rng.choice(RAW))
        elif number % 10 == 3:
            method = rng.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "GET"])
            answer = visitor.request(
                method, rng.choice(["/draw/solve", "/facts/x", "/a/b/c", "/%00", "/draw/__init__"])
            )
        else:
            path = rng.choice(sorted(whole))
            answer = visitor.post(path, mutated(rng, whole[path]))
        seen.append(answer.status)
        assert answer.status in (200, 400, 403, 404, 405, 413), answer.text
        assert "Traceback" not in answer.text
        assert "server made a mistake" not in answer.text, answer.text
        if answer.status == 400:
            assert set(json.loads(answer.text)) == {"message", "control"}

    with caplog.at_level(logging.WARNING):
        for number in range(100):
            attack(number)
        before = resident()
        for number in range(100, 200):
            attack(number)
    assert len(set(seen)) >= 3
    assert resident() - before < 40e6  # each of the bombs alone would take more
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert server.idle()
    assert visitor.only("end", "/draw/solve", drawing(server))  # and the page works


@pytest.mark.parametrize("size", [pytest.param(10**4000, id="huge"), LIMITS.pixels + 1, 0, -1, 2.0, True, None])
def test_sizes_of_an_image_are_bounded_before_they_are_multiplied_or_shown(server, visitor, size):
    image = {"width": size, "height": size, "channels": 3, "data": ""}
    answer = visitor.post("/segment/solve", {"model": server.model("segment").name, "image": image, "steps": 1})
    assert answer.status == 400
    message = json.loads(answer.text)["message"]
    assert message == "image: width, height and channels must be whole numbers from 1 to 200,000."


@pytest.mark.parametrize(
    ("changes", "control", "words"),
    [
        ({"steps": LIMITS.steps + 1}, "steps", "a whole number from 1 to 300"),
        ({"steps": 2.5}, "steps", "whole number"),
        ({"tolerance": 0}, "tolerance", "from 1e-07 to 0.1"),
        ({"solver": "newton"}, "solver", "allowed: peaceman-rachford"),
        ({"solver": "none"}, "solver", "allowed"),
        ({"step": 0}, "step", "from 0.1 to 1"),  # of plain iteration
        ({"model": "other"}, "model", "models: "),
        ({"extra": 1}, "", "fields: "),
        ({"image": {}}, "image", "must be an image"),
        ({"image": picture(torch.zeros(1, 28, 27, dtype=torch.uint8))}, "image", "not 1 x 28 x 28"),
    ],
)
def test_a_field_out_of_bounds_is_named(server, visitor, changes, control, words):
    answer = visitor.post("/draw/solve", drawing(server, **changes))
    assert answer.status == 400
    error = json.loads(answer.text)
    assert error["control"] == control
    assert words in error["message"]


def test_what_is_shown_of_a_field_is_short_and_printable():
    with pytest.raises(Refused) as error:
        Sent({"steps": "\x1b[2J" + "x" * 500}).count("steps", 1, 2)
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 150


# Turns, bounds and leaving


def long_solve(server):
    return drawing(server, solver="peaceman-rachford", step=0.001, tolerance=1e-7, steps=300)


def begun(server, visitor, fields):
    """Start a job, and return its connection once the first events have arrived."""
    wire = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    wire.request("POST", "/draw/solve", json.dumps(fields), visitor.headers())
    answer = wire.getresponse()
    assert answer.status == 200
    assert b"event: frame" in answer.read1()
    return wire, answer


def test_a_visitor_who_leaves_leaves_nothing_behind(server, slow):
    threads = workers()
    for visitor in (Visitor(server), Visitor(server)):
        wire, answer = begun(server, visitor, long_solve(server))
        assert server.page.queue.running
        answer.close()
        wire.close()
        wait(server.idle, 5)
    assert workers() == threads == LIMITS.at_once
    assert not [thread.name for thread in threading.enumerate() if "AnyIO" in thread.name]


def test_two_visitors_are_served_at_once_and_a_third_waits(server, slow):
    visitors = [Visitor(server) for _ in range(3)]
    wires = [begun(server, visitor, long_solve(server)) for visitor in visitors[:2]]
    assert len(server.page.queue.running) == 2
    third = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    third.request("POST", "/draw/solve", json.dumps(drawing(server)), visitors[2].headers())
    answer = third.getresponse()
    assert b'event: waiting\ndata: {"ahead": 2}' in answer.read1()
    wires[0][1].close()
    wires[0][0].close()
    assert b"event: end" in answer.read()
    third.close()
    wires[1][1].close()
    wires[1][0].close()
    wait(server.idle, 5)


def test_a_solve_that_takes_too_long_is_stopped(runs, slow):
    with Server(runs[:1], replace(LIMITS, seconds=0.3)).running() as served:
        events = Visitor(served).events("/draw/solve", long_solve(served))
    assert events[-1][0] == "refused"
    assert "longer than 0.3 seconds" in events[-1][1]["message"]
    assert any(kind == "frame" for kind, _ in events)


def in_turn(work):
    return asyncio.run(asyncio.wait_for(work(), 30))


def test_twenty_visitors_take_turns():
    """One visitor asks for eight things at once; nineteen others, who come later, do not wait for all of them."""

    async def work():
        queue = Queue(replace(LIMITS, at_once=1))
        gate, order, jobs = threading.Event(), [], []
        queue.submit("first", lambda job: gate.wait(10))
        for _ in range(8):
            jobs.append(queue.submit("greedy", lambda job: order.append("greedy")))
        with pytest.raises(Refused, match="8 of your requests are waiting") as error:
            queue.submit("greedy", lambda job: None)
        assert error.value.status == 429
        for n in range(19):
            jobs.append(queue.submit(f"visitor {n}", lambda job: order.append(job.visitor)))
        ahead = [queue.ahead(job) for job in jobs]
        gate.set()
        for job in jobs:
            while await job.events.get() is not None:
                pass
        queue.close()
        return order, ahead, jobs

    order, ahead, jobs = in_turn(work)
    assert order[:20] == ["greedy", *(f"visitor {n}" for n in range(19))]
    assert order[20:] == ["greedy"] * 7
    place = sorted(range(len(jobs)), key=lambda k: ahead[k])
    assert [jobs[k].visitor for k in place] == order
    assert sorted(ahead) == list(range(27))  # everyone was told how many come before


def test_twenty_visitors_over_http_take_turns(server, slow):
    """Twenty clients of the real server, of whom the first asks for eight things at once."""
    visitors, order = [Visitor(server) for _ in range(20)], []

    def asked(visitor):
        events = visitor.events("/draw/solve", drawing(server))
        order.append(visitor)
        return [kind for kind, _ in events]

    server.page.queue.pool.submit(time.sleep, 0.5)  # both threads are busy until everyone has asked
    server.page.queue.pool.submit(time.sleep, 0.5)
    with ThreadPoolExecutor(27) as clients:
        asking = [clients.submit(asked, visitor) for visitor in [visitors[0]] * 8]
        wait(lambda: server.page.queue.running)
        asking += [clients.submit(asked, visitor) for visitor in visitors[1:]]
        for answer in asking:
            kinds = answer.result(60)
            assert "frame" in kinds
            assert "end" in kinds
    others = [place for place, visitor in enumerate(order) if visitor is not visitors[0]]
    assert max(others) < 26  # each of them was served before the last of the eight
    assert [visitor is visitors[0] for visitor in order[-4:]] == [True] * 4
    wait(server.idle, 5)
    assert workers() == LIMITS.at_once


def test_a_visitor_runs_one_job_at_a_time_and_can_take_back_one_that_waits():
    async def work():
        queue, most, now = Queue(replace(LIMITS, at_once=2)), [0], [0]

        def count(job):
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.01)
            now[0] -= 1

        jobs = [queue.submit("one", count) for _ in range(4)]
        queue.leave(jobs[2])
        assert queue.ahead(jobs[2]) is None
        for job in (jobs[0], jobs[1], jobs[3]):
            while await job.events.get() is not None:
                pass
        await asyncio.sleep(0.05)
        queue.close()
        return most[0], jobs[2].events.empty(), queue.running

    most, untouched, running = in_turn(work)
    assert most == 1
    assert untouched
    assert running == {}


def test_too_many_waiting_visitors_are_turned_away():
    async def work():
        queue, gate = Queue(replace(LIMITS, at_once=1, waiting=3)), threading.Event()
        for n in range(4):
            queue.submit(str(n), lambda job: gate.wait(10))
        with pytest.raises(Refused, match="Too many visitors"):
            queue.submit("late", lambda job: None)
        gate.set()
        queue.close()

    in_turn(work)


def test_a_connection_that_lags_behind_gets_no_pictures():
    async def work():
        queue, drawn = Queue(replace(LIMITS, backlog=5)), []

        def report(job):
            for step in range(30):
                job.emit("frame", {"step": step}, lambda: drawn.append(1) or {"picture": "x"})
                time.sleep(0.001)

        job = queue.submit("one", report)
        while queue.running:
            await asyncio.sleep(0.01)
        events = []
        while not job.events.empty():
            events.append(job.events.get_nowait())
        queue.close()
        return drawn, events

    drawn, events = in_turn(work)
    assert len(events) == 31  # every step, and the end
    assert 5 <= len(drawn) < 15


def test_a_mistake_in_a_job_is_told_without_its_details(caplog):
    async def work():
        queue = Queue()

        def fail(job):
            raise RuntimeError("secret details")

        job = queue.submit("one", fail)
        event = await job.events.get()
        assert await job.events.get() is None
        queue.close()
        return event

    with caplog.at_level(logging.ERROR):
        event = in_turn(work)
    assert b"secret" not in event
    assert b"The server made a mistake" in event
    assert "secret details" in caplog.text


# The command


def test_the_command_names_what_is_wrong(tmp_path, capsys, runs):
    assert main(["page", "--run", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["page", "--run", str(runs[0]), "--port", port]) == 2
    assert "--port 0 selects a free one" in capsys.readouterr().err
    assert main(["page", "--port", "99999"]) == 2
    assert "--port 99999" in capsys.readouterr().err
    assert main(["page", "--run", str(runs[0]), "--host", ""]) == 2
    assert "--host is empty; use 127.0.0.1" in capsys.readouterr().err
    assert list(RUNS) == ["draw", "generator", "inside", "segment"]
