"""The process tree of a command, to be ended as a whole. Apart from `child`: psutil takes time to load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from holdfast.cli.child import Mark

_PAUSE = 0.05
_LAST_ROUNDS = 20


class ProcessTree:
    """A command and its descendants, as far as they can be found."""

    def __init__(self, child: subprocess.Popen[bytes], mark: Mark | None = None) -> None:
        self._child = child
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}

    def end(self, grace: float) -> None:
        """Terminate all of them; kill those that are left after `grace` seconds."""
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
        self._child.kill()
        for _ in range(_LAST_ROUNDS):  # a process may have started another one meanwhile
            self._find()
            left = self._alive()
            for each in left:
                _signal(each, psutil.Process.kill)
            if not left:
                break
            time.sleep(_PAUSE)
        self._child.wait()

    def _find(self) -> None:
        """Add the descendants of the processes that are known, and the processes that carry the mark."""
        found = list(self._marked())
        with contextlib.suppress(psutil.Error):
            found += psutil.Process(self._child.pid).children(recursive=True)
        for each in self._known.values():
            with contextlib.suppress(psutil.Error):
                found += each.children(recursive=True)
        for each in found:
            if each.pid not in (os.getpid(), self._child.pid):
                self._known[each.pid] = each

    def _marked(self) -> Iterator[psutil.Process]:
        if self._mark is None:
            return
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = each.environ().get(self._mark.name) == self._mark.value
                if marked and _works_in(each, self._mark.directory):
                    yield each

    def _alive(self) -> set[psutil.Process]:
        return {each for each in self._known.values() if _is_alive(each)}


def _works_in(process: psutil.Process, directory: Path) -> bool:
    """Whether a process has its current directory, or an open file, in a directory."""
    paths = [Path(process.cwd()), *(Path(each.path) for each in process.open_files())]
    return any(path.is_relative_to(directory) for path in paths)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(process: psutil.Process, send: Callable[[psutil.Process], None]) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended, or has privileges that we lack
        send(process)
