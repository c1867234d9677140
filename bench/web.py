"""The pages of `holdfast web` at 10,000 issues, beside `holdfast issue list`; how soon a change is told; and memory.

The server is a process of its own. The first byte is that of a page whose records were read before, as it is for
everybody but the first reader; the board is read to its end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import IO, Any, NamedTuple

import psutil

from bench.report import Column, Report, Table, at_most, below, number
from bench.timing import say
from holdfast.clock import format_instant
from holdfast.issues.model import Issue, State
from holdfast.repository.init import initialise
from holdfast.repository.opening import open_tracker

PROGRAM = [sys.executable, "-m", "holdfast"]
TOGETHER = 250
MILLI, MEGA = 1e3, 1 << 20


class Size(NamedTuple):
    """How much to measure."""

    issues: int = 10_000
    rounds: int = 5
    tabs: int = 50


FULL = Size()
QUICK = Size(issues=200, rounds=2, tabs=5)


class Server(NamedTuple):
    """A started server, and the cookie of a browser that it let in."""

    process: psutil.Process
    port: int
    cookie: str

    def get(self, path: str) -> tuple[float, float, int]:
        """Seconds to the first byte and to the last, and the size."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            began = perf_counter()
            connection.request("GET", path, headers={"cookie": self.cookie})
            answer = connection.getresponse()
            first = answer.read(1)
            to_first = perf_counter() - began
            size = len(first + answer.read())
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status}")
            return to_first, perf_counter() - began, size

    def listener(self) -> socket.socket:
        """A connection that hears of changes, as a tab has it."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nCookie: {self.cookie}\r\n\r\n"
        made.sendall(head.encode())
        found = b""
        while b"event: hello" not in found:
            found += made.recv(4096)
        return made


@contextlib.contextmanager
def started(root: Path) -> Iterator[Server]:
    environment = {**os.environ, "XDG_DATA_HOME": str(root.parent / "data")}
    command = [*PROGRAM, "web", "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            record: dict[str, Any] = json.loads(process.stdout.readline())["data"]
            connection = http.client.HTTPConnection("127.0.0.1", record["port"], timeout=60)
            with contextlib.closing(connection):
                connection.request("GET", "/open/" + record["url"].rpartition("/")[2])
                cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
            yield Server(psutil.Process(process.pid), record["port"], cookie)
        finally:
            process.terminate()


def fill(root: Path, count: int) -> None:
    """A repository with issues, two thirds of them done."""
    initialise(root)
    tracker = open_tracker(root, actor="human:bench")
    tracker.initialise()
    issues = [
        Issue(
            id=str(uuid.UUID(int=number)),
            title=f"Piece of work {number}",
            description="What is to be done, in some words. " * 8,
            state=State.DONE if number % 3 else State.READY,
            labels=(f"area:{number % 20}",),
            created_at=format_instant(1.7e9 + number),
            updated_at=format_instant(1.7e9 + number),
        )
        for number in range(count)
    ]
    for start in range(0, count, TOGETHER):
        tracker.adopt(issues[start : start + TOGETHER])


CLAIMS = """
import sys
from holdfast.repository.opening import open_tracker

tracker = open_tracker(sys.argv[1], actor="agent:bench")
ready = [each.id for each in tracker.summaries() if each.state.value == "ready"]
print("ready", flush=True)
for line in sys.stdin:
    tracker.claims.claim(ready.pop(), tracker.claims.request(ttl=600.0))
"""
"""Another process: it claims an issue for each line that it reads."""


@contextlib.contextmanager
def claiming(root: Path) -> Iterator[IO[bytes]]:
    """The input of a process that claims issues."""
    command = [sys.executable, "-c", CLAIMS, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process.stdin
        process.stdin.close()


def told_after(server: Server, claims: IO[bytes]) -> float:
    """Seconds from the beginning of a claim by another process to the event in a tab."""
    with server.listener() as listener:
        began, found = perf_counter(), b""
        claims.write(b"\n")
        claims.flush()
        while b"event: change" not in found:
            found += listener.recv(4096)
        return perf_counter() - began


def memory_of_tabs(server: Server, tabs: int) -> float:
    """How many megabytes the server grows while as many tabs are open."""
    before = server.process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(tabs):
            stack.enter_context(server.listener())
            server.get("/r/fleet/board")
        sleep(0.5)
        return (server.process.memory_info().rss - before) / MEGA


def listed(root: Path) -> float:
    began = perf_counter()
    subprocess.run([*PROGRAM, "issue", "list", "--json"], cwd=root, stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - began


def run(*, quick: bool = False) -> Report:
    size, report = QUICK if quick else FULL, Report()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        root = Path(place) / "fleet"
        say("web: making issues")
        fill(root, size.issues)
        with started(root) as server:
            server.get("/r/fleet/overview")
            server.get("/r/fleet/board")
            found: dict[str, list[float]] = {}
            for each in range(size.rounds):
                say(f"web: round {each + 1} of {size.rounds}")
                found.setdefault("overview, first byte", []).append(server.get("/r/fleet/overview")[0])
                found.setdefault("board", []).append(server.get("/r/fleet/board")[1])
                found.setdefault("board, all that is done", []).append(server.get("/r/fleet/board?all=done")[1])
                found.setdefault("issue list --json", []).append(listed(root))
            with claiming(root) as claims:
                for _ in range(size.rounds):
                    found.setdefault("a claim is told", []).append(told_after(server, claims))
                    found.setdefault("overview after that, first byte", []).append(server.get("/r/fleet/overview")[0])
                    found.setdefault("board after that", []).append(server.get("/r/fleet/board")[1])
            grown = memory_of_tabs(server, size.tabs)
    judge(report, {name: median(values) for name, values in found.items()}, grown, size)
    return report


def judge(report: Report, found: dict[str, float], grown: float, size: Size) -> None:
    floor = found["issue list --json"]
    columns = [Column("ms", number(".1f")), Column("of issue list", number(".2f"))]
    table = Table(f"{size.issues} issues; medians", columns)
    table.rows.update({name: [MILLI * value, value / floor] for name, value in found.items()})
    report.tables.append(table)
    report.targets += [
        at_most(100.0, "first byte of the overview: at most 100 ms", MILLI * found["overview, first byte"], "ms"),
        at_most(
            100.0,
            "first byte of the overview when a claim was told: at most 100 ms",
            MILLI * found["overview after that, first byte"],
            "ms",
        ),
        at_most(1.0, "board: at most 1 s", found["board"], "s"),
        at_most(1.0, "board: at most the time of issue list", found["board"] / floor),
        at_most(1.0, "board with all that is done: at most 1 s", found["board, all that is done"], "s"),
        at_most(1.0, "a claim by another process is told within 1 s", found["a claim is told"], "s"),
        below(100.0, f"memory of {size.tabs} tabs: below 100 MB", grown, "MB"),
    ]
