"""Tells a process that hangs from one that a busy machine keeps waiting.

The time of the wall proves nothing: with twenty processes on two cores, a command of a second takes ten. What counts
is the time that is the command's own: the processor time that it used, and the time in which all of its processes and
threads were asleep. While one of them is ready to run, waits for a disk or is stopped, only processor time counts.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from typing import NamedTuple

SLICE = 0.1
"""Seconds between two looks. One that came late counts as on time: then the machine was busy."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_AWAKE = frozenset("RDT")  # ready to run, waiting for a disk, stopped
_WALL = 60
"""A process that never was asleep, nor used its processor time, ends after this many times its limit."""


class _Thread(NamedTuple):
    state: str
    session: int
    ticks: int
    where: str


def ends_in_time(child: int, limit: float) -> bool:
    """Wait until a child ends, which leads a session of its own; False if that takes longer than `limit` seconds of its
    own time."""
    handle = os.pidfd_open(child)
    try:
        if select.select([handle], [], [], min(limit, 1.0))[0]:
            return True
        asleep = 0.0
        used: dict[str, int] = {}
        end = time.monotonic() + _WALL * limit
        while time.monotonic() < end:
            if select.select([handle], [], [], SLICE)[0]:
                return True
            threads = list(_threads(child))
            used |= {each.where: each.ticks for each in threads}
            if not any(each.state in _AWAKE for each in threads):
                asleep += SLICE
            if asleep + sum(used.values()) / _TICKS > limit:
                return False
        return False
    finally:
        os.close(handle)


def _threads(session: int) -> Iterator[_Thread]:
    """The threads of all processes of a session."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        leader = _thread(f"/proc/{process}")
        if leader is None or leader.session != session:
            continue
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                if (thread := _thread(f"/proc/{process}/task/{task}")) is not None:
                    yield thread


def _thread(where: str) -> _Thread | None:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"{where}/stat", "rb") as file:
        fields = file.read().decode(errors="replace").rpartition(")")[2].split()
        return _Thread(fields[0], int(fields[3]), int(fields[11]) + int(fields[12]), where)
    return None
