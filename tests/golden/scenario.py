"""A recorder for golden files: runs commands and renders their output and their files as reproducible text.

It imports only the command-line entry point of Holdfast, so that everything behind it can be renamed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from holdfast.cli.entry import run
from tests.cli.commands import wait_until_idle

INSTANT = 1_700_000_000
"""The modification time of every file in the scenario, in seconds."""

_PATTERNS = {
    "time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z",
    "id": r"\b(?:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{16})\b",
    "hash": r"\b(?!0{64})[0-9a-f]{64}\b",
    "holder": r"\b[\w.-]+:[\w.-]+:\d+:\d+\b",
    "short": r"\b[0-9a-f]{8}\b",
}
_NUMBERED = ("id", "hash", "holder", "short")
_TOKEN = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()))

_STRING = r'"(?:[^"\\]|\\.)*"'
_BY_KEY = [
    (r"time_left|waited|held", r"[\d.e-]+", "seconds"),
    (r"uid|gid|hidden_processes|pid|duration_ms", r"\d+", "number"),
    (r"at|position", r"[1-9]\d*", "number"),  # an offset that depends on the length of process ids
    (r"pid_namespace|inode|filesystem|host", _STRING, "machine"),
    (r"network", r"true|false|null", "machine"),
    (
        r"message|hint|how|text|why|worktree_kept|problem|meaning|remedy|detail",
        _STRING,
        "text",
    ),  # prose may change
    (r"problems", r'\[\s*"[^\]]*\]', "text"),
    (r"above", rf"\[[^\]]*\]|{_STRING}", "holders"),  # depends on the ancestors of the test process
    (r"bytes", r"\d{4,}", "size"),  # depends on the file system
]
_FRACTION = re.compile(r"(?<=[\s,\[])\d+\.\d{3,}(?=[\s,\]])")

_ORDERED_BY_ID = ("protected", "verified")
"""Lists sorted by random ids. Each id has its number before such a list is recorded."""


class Normaliser:
    """Replaces values that differ between runs with placeholders, numbered in order of first appearance."""

    def __init__(self, root: Path, *known: str) -> None:
        self._root = str(root)
        self._seen: dict[str, str] = {each: each for each in known}
        self._counts = dict.fromkeys(_NUMBERED, 0)

    def __call__(self, text: str) -> str:
        text = text.replace(self._root, "<root>")
        for key, value, placeholder in _BY_KEY:
            text = re.sub(rf'("(?:{key})": ?)(?:{value})(?=[,\s}}]|$)', rf'\1"<{placeholder}>"', text)
        return _TOKEN.sub(self._placeholder, _FRACTION.sub('"<seconds>"', text))

    def _placeholder(self, match: re.Match[str]) -> str:
        kind, found = match.lastgroup or "", match.group()
        if kind not in _NUMBERED:
            return f"<{kind}>"
        if found not in self._seen:
            self._counts[kind] += 1
            self._seen[found] = f"<{kind}-{self._counts[kind]}>"
            if kind == "id":
                self._seen.setdefault(found[:8], f"<{kind}-{self._counts[kind]}:8>")
        return self._seen[found]


class Scenario:
    """Commands run in one directory, recorded as one list of lines per chapter."""

    def __init__(self, root: Path, *known: str) -> None:
        self.root = root
        self.chapters: dict[str, list[str]] = {}
        self.normal = Normaliser(root, *known)
        self._lines: list[str] = []

    def chapter(self, name: str) -> None:
        self._lines = self.chapters.setdefault(name, [])

    def __call__(self, *lines: str, stdin: str = "") -> Any:
        """Run commands with `--json`, record them, and return the data of the last one."""
        return [self._record_command(line, stdin) for line in lines][-1]

    def _record_command(self, line: str, stdin: str) -> Any:
        status, out, err = _run(line, stdin)
        self._lines.append(self.normal(f"$ holdfast {line}") + f"  # exit status {status}")
        for stream, printed in (("", out), ("stderr: ", err)):
            for each in map(json.loads, printed.splitlines()):
                self._lines.append(stream + self.normal(json.dumps(self._ordered(each), indent=1)))
        return json.loads(out or err).get("data")

    @contextmanager
    def waiter(self, line: str, *, shown_by: str) -> Iterator[None]:
        """Keep a process waiting with this command until the end of the block."""
        command = [sys.executable, "-m", "holdfast", *shlex.split(line)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                deadline = time.monotonic() + 30
                while not json.loads(_run(shown_by)[1])["data"]["waiting"]:
                    assert time.monotonic() < deadline, f"{line} does not wait"
                    time.sleep(0.02)
                wait_until_idle(process.pid)  # it shows that it waits before it has finished doing so
                yield
            finally:
                process.terminate()

    def _ordered(self, value: Any, key: str = "") -> Any:
        """The same value, with its lists in an order that does not depend on random ids."""
        if isinstance(value, dict):
            return {name: self._ordered(each, name) for name, each in value.items()}
        if not isinstance(value, list):
            return value
        items = [self._ordered(each) for each in value]
        return sorted(items, key=lambda item: self.normal(json.dumps(item))) if key in _ORDERED_BY_ID else items

    def record_intermediate(self, *lines: str) -> None:
        """Run commands in a separate process and record the short-lived documents that they remove."""
        command = [sys.executable, "-c", _WATCHED, json.dumps([shlex.split(line) for line in lines])]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        for each in result.stdout.splitlines():
            path, content = json.loads(each)
            self._lines += [f"== {self.normal(path)}", *self._record(content)]

    def _record(self, content: str) -> list[str]:
        """The lines of a document. Documents inside an intent are indented."""
        record = json.loads(content)
        if "steps" not in record:
            return self.normal(content).splitlines()
        assert content == json.dumps(record, separators=(",", ":"), ensure_ascii=False), "not in compact form"
        lines = []
        for step in record["steps"]:
            shown = {name: "..." if name in ("content", "old") else value for name, value in step.items()}
            lines += [json.dumps(shown), *(f"| {line}" for line in step.get("content", "").splitlines())]
        shown = {name: value if name == "id" else "..." for name, value in record.items()}
        return self.normal("\n".join([json.dumps(shown), *lines])).splitlines()

    def record_files(self, *directories: Path) -> None:
        """Record the kind, mode and path of everything below, then the contents of all files except payloads."""
        found = sorted(path for each in directories for path in (each, *each.rglob("*")))
        paths = [path for path in found if path.suffix != ".tmp"]  # temporary files of a terminated waiter
        listed = {}
        for path in paths:
            name = re.sub(r"(?<=/reserve/|napshots-)\d+", "<number>", str(path.relative_to(self.root)))
            listed[self.normal(name)] = path
        for name, path in sorted(listed.items()):
            status = path.lstat()
            self._lines.append(f"{stat.filemode(status.st_mode)} {name}")
        for name, path in sorted(listed.items()):
            if path.is_file() and not path.is_symlink() and "/payload/" not in name:
                self._lines += self._content(name, path.read_bytes())

    def _content(self, name: str, content: bytes) -> list[str]:
        if not content.strip(b"\0"):
            return []
        header, _, rest = content.partition(b"\n")
        if name.endswith("/manifest"):
            if sys.platform == "win32":
                raise NotImplementedError
            ours = struct.pack("<IIq", os.getuid(), os.getgid(), INSTANT * 10**9)
            shown = [header.decode(), *_hex(rest.replace(ours, bytes(8) + ours[8:]))]
        elif name.endswith("/homes"):  # ends with a checksum that covers the id in it
            shown = [header.decode(), *_hex(re.sub(rb"[0-9a-f]{16}", b"<id-of-snapshot>", rest)[:-4])]
        elif name.endswith((".stat", "/checkpoints/issues")):  # caches, full of inode numbers
            shown = [header.decode()]
        elif "/checkpoints/issues." in name or "/checkpoints/statistics-" in name:  # the same, or counts
            shown = []
        elif name.endswith(".lock.end"):  # a number, and a state made of inode numbers and times
            shown = [header.decode().partition(" ")[0]]
        else:
            shown = self.normal(content.decode()).splitlines()
        return [f"== {name}", *shown]


def _run(line: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command in this process; return its exit status, standard output and standard error."""
    own, dashes, rest = line.partition(" -- ")
    arguments = [*shlex.split(own), "--json", *shlex.split(dashes + rest)]
    out, err = io.StringIO(), io.StringIO()
    given, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = run(arguments)
    finally:
        sys.stdin = given
    return status, out.getvalue(), err.getvalue()


def _hex(content: bytes) -> list[str]:
    rows = [content[start : start + 32] for start in range(0, len(content), 32)]
    return [f"{row.hex(' ', -4)}  {re.sub(rb'[^ -~]', b'.', row).decode()}" for row in rows]


_WATCHED = """
import contextlib, io, json, os, sys
from pathlib import Path
from holdfast.cli.entry import run

def keep(event, arguments):
    if event not in ("os.rename", "os.remove"):
        return
    name, fd = arguments[0], arguments[-1] if event == "os.remove" else arguments[2]
    directory = Path(os.readlink(f"/proc/self/fd/{fd}")) if isinstance(fd, int) and fd >= 0 else Path()
    path = directory / os.fsdecode(name)
    kinds = {("intents", ".json"), ("operations", ".json"), ("ledger", ".lock")}
    if (path.parent.name, path.suffix) in kinds and path.exists():
        kept.append((f"{path.parent.parent.name}/{path.parent.name}/{path.name}", path.read_text()))

kept = []
sys.addaudithook(keep)
with contextlib.redirect_stdout(io.StringIO()):
    statuses = [run(arguments) for arguments in json.loads(sys.argv[1])]
for each in kept:
    print(json.dumps(each))
sys.exit(max(statuses))
"""
