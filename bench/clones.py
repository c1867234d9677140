"""Snapshots on filesystems that share blocks (xfs, btrfs), compared with `cp -a --reflink=always`.

A clone has no hashes, so the floor is that copy and then hashing every file. The filesystems are created in a
file and mounted through a loop device, which requires root.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple

from bench.archivers import OURS, Holdfast, call
from bench.measure import interleave, ratio
from bench.report import Column, Report, Table, at_most
from bench.report import number as written
from bench.timing import say, timed

MIB = 1 << 20
LIMIT = 1.3
KINDS = ("xfs", "btrfs")
FLOOR = "cp -a --reflink=always, then hash"
_SETTLED = 0.1
_SPACE = 4  # times the measured amount, for all copies


class Amount(NamedTuple):
    """How much to measure: one big file of `big` bytes, and `files` small ones."""

    big: int = 512 * MIB
    files: int = 10_000


def measure_clones(amount: Amount, rounds: int, report: Report) -> None:
    """First snapshots of one big file and of many small ones, on each kind of filesystem."""
    for kind in KINDS:
        try:
            with _mounted(kind, (amount.big + amount.files * 4096) * _SPACE * rounds + 400 * MIB) as top:
                _measure(top, f"{kind}, one file of {amount.big // MIB} MiB", _big(amount.big), rounds, report)
                _measure(top, f"{kind}, {amount.files} small files", _small(amount.files), rounds, report)
        except (OSError, subprocess.SubprocessError) as error:
            report.notes.append(f"{kind} was NOT MEASURED: {error}")
            report.targets.append(at_most(LIMIT, f"{kind}: at most {LIMIT} times {FLOOR}", None))


def _measure(top: Path, where: str, make: Callable[[Path], None], rounds: int, report: Report) -> None:
    say(where)
    place = Path(tempfile.mkdtemp(dir=top))
    source = place / "source"
    source.mkdir()
    make(source)
    sleep(_SETTLED)
    count = iter(range(1 << 30))

    def floor() -> None:
        call("cp", "-a", "--reflink=always", source, place / f"copy{next(count)}")
        _hash(source)

    def ours() -> None:
        Holdfast(source, place / f"ours{next(count)}").take()

    actions = {name: lambda act=act: timed(act, place).wall for name, act in ((FLOOR, floor), (OURS, ours))}
    results = interleave(actions, rounds)
    report.note_failures(where, results.failures)
    series = results.series
    if len(series) < len(actions):
        return
    table = Table(f"{where}; medians, one sync included", [Column("seconds", written(".3f")), Column("/ floor")])
    for name, seconds in series.items():
        table.rows[name] = [median(seconds), ratio(seconds, series[FLOOR])]
    report.tables.append(table)
    found = ratio(series[OURS], series[FLOOR]).median
    report.targets.append(at_most(LIMIT, f"{where}: at most {LIMIT} times {FLOOR}", found))


def _big(size: int) -> Callable[[Path], None]:
    def make(source: Path) -> None:
        with (source / "big").open("wb") as file:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))

    return make


def _small(files: int) -> Callable[[Path], None]:
    def make(source: Path) -> None:
        for number in range(files):
            directory = source / f"d{number // 20:05d}"
            directory.mkdir(exist_ok=True)
            (directory / f"file{number % 20:03d}").write_bytes(os.urandom(1024))

    return make


def _hash(source: Path) -> None:
    """Read and hash every file, in the simplest way."""
    buffer = memoryview(bytearray(1 << 18))
    for here, _, names in os.walk(source):
        for name in names:
            digest = hashlib.sha256()
            with open(os.path.join(here, name), "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
            digest.digest()


@contextmanager
def _mounted(kind: str, size: int) -> Iterator[Path]:
    """A new filesystem of this kind; unmounted and removed at the end."""
    if sys.platform == "win32" or os.getuid() != 0:
        raise PermissionError("mounting a filesystem requires root")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        image, path = Path(directory, "image"), Path(directory, "mounted")
        path.mkdir()
        with image.open("wb") as file:
            file.truncate(size)
        _run(f"mkfs.{kind}", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(path))
        try:
            yield path
        finally:
            _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command[:2])}`: {done.stderr.strip()}")
