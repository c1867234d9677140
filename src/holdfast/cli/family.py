"""A command with all that it has started: who loses the right to write ends all of them, not the first alone.

A shell that is asked to end does so, and what it was waiting for goes on writing. So the processes below the
command are ended with it, and so is whoever has left their midst (by a double fork), still carries the mark
that the command was given in its environment, and works in the directory that the right was about: it stands
there or has a file open. A server that serves others too, elsewhere, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from holdfast.cli.child import Mark

_PAUSE = 0.05
_LAST_ROUNDS = 20


class Family:
    """A command and what it has started, as far as it can be found."""

    def __init__(self, child: subprocess.Popen[bytes], mark: Mark | None = None) -> None:
        self._child = child
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}

    def end(self, grace: float) -> None:
        """Ask all of them to end; after `grace` seconds force them."""
        deadline = time.monotonic() + grace
        asked: set[psutil.Process] = set()
        self._find()
        with contextlib.suppress(OSError):
            self._child.terminate()
        while True:
            for each in self._alive() - asked:
                _signal(each, psutil.Process.terminate)
                asked.add(each)
            if self._child.poll() is not None and not self._alive():
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
            self._find()
        self._force()

    def _force(self) -> None:
        """Kill until nobody is left who could have started another one meanwhile."""
        self._child.kill()
        for _ in range(_LAST_ROUNDS):
            self._find()
            left = self._alive()
            for each in left:
                _signal(each, psutil.Process.kill)
            if not left:
                break
            time.sleep(_PAUSE)
        self._child.wait()

    def _find(self) -> None:
        """Add whoever is below those that are known, or carries the mark."""
        with contextlib.suppress(psutil.Error):
            self._add(psutil.Process(self._child.pid).children(recursive=True))
        for each in list(self._known.values()):
            with contextlib.suppress(psutil.Error):
                self._add(each.children(recursive=True))
        self._add(self._marked())

    def _add(self, found: Iterable[psutil.Process]) -> None:
        for each in found:
            if each.pid not in (os.getpid(), self._child.pid):
                self._known[each.pid] = each

    def _marked(self) -> Iterator[psutil.Process]:
        if self._mark is None:
            return
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = each.environ().get(self._mark.name) == self._mark.value
                if marked and _works_in(each, self._mark.place):
                    yield each

    def _alive(self) -> set[psutil.Process]:
        return {each for each in self._known.values() if _is_alive(each)}


def _works_in(process: psutil.Process, place: Path) -> bool:
    """Whether a process stands in a directory, or has a file open in it."""
    paths = [Path(process.cwd()), *(Path(each.path) for each in process.open_files())]
    return any(path.is_relative_to(place) for path in paths)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(process: psutil.Process, how: Callable[[psutil.Process], None]) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended, or runs with rights that we do not have
        how(process)
