"""Process trees: ends a command and its descendants, even those that have left its tree. psutil is slow to load, so it
is imported on first use."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess

    import psutil


class Mark(NamedTuple):
    """An environment variable that only the command and its descendants have, and the directory that they must stop
    writing to."""

    name: str
    value: str
    directory: Path


class ProcessTree:
    """A command and its descendants, as far as they can be found; without a command, the processes with the mark."""

    _PAUSE = 0.05
    _GRACE_AFTER_KILL = 1.0
    _CLEAN_SCANS = 2  # a scan is not a snapshot: it can miss a process that is just starting

    def __init__(self, child: subprocess.Popen[bytes] | None, mark: Mark | None = None) -> None:
        self._child = child
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}

    def end(self, grace: float) -> None:
        """Terminate all processes; kill those that are left after `grace` seconds."""
        self._find()
        with contextlib.suppress(OSError):
            if self._child is not None:
                self._child.terminate()
        if not self._signal_until_gone(lambda process: process.terminate(), grace):
            self._kill()

    def kill(self) -> None:
        """Kill all processes at once."""
        self._find()
        if self._is_running() or self._alive():
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._signal_until_gone(lambda process: process.kill(), self._GRACE_AFTER_KILL)
        if self._child is not None:
            self._child.wait()

    def _is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _signal_until_gone(self, signal_it: Callable[[psutil.Process], None], grace: float) -> bool:
        """Signal each process once. True when several scans in a row find none alive, False after `grace` seconds."""
        import psutil

        deadline = time.monotonic() + grace
        signalled: set[psutil.Process] = set()
        clean = 0
        while clean < self._CLEAN_SCANS:
            for each in self._alive() - signalled:
                with contextlib.suppress(psutil.Error):  # the process has ended, or has privileges that we lack
                    signal_it(each)
                signalled.add(each)
            if time.monotonic() >= deadline:
                return False
            time.sleep(self._PAUSE)
            self._find()
            clean = 0 if self._is_running() or self._alive() else clean + 1
        return True

    def _find(self) -> None:
        """Add the descendants of known processes, and the processes that carry the mark."""
        import psutil

        found = [each for each in psutil.process_iter() if self._is_marked(each)] if self._mark else []
        with contextlib.suppress(psutil.Error):
            if self._child is not None and self._child.returncode is None:  # otherwise its pid may have been reused
                found += psutil.Process(self._child.pid).children(recursive=True)
        for each in self._known.values():
            with contextlib.suppress(psutil.Error):
                found += each.children(recursive=True)
        own = (os.getpid(), self._child.pid if self._child is not None else None)
        self._known |= {each.pid: each for each in found if each.pid not in own}

    def _is_marked(self, process: psutil.Process) -> bool:
        """Whether a process carries the mark, and has its current directory or an open file in the directory."""
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            if self._mark and process.environ().get(self._mark.name) == self._mark.value:
                paths = [process.cwd(), *(each.path for each in process.open_files())]
                return any(Path(path).is_relative_to(self._mark.directory) for path in paths)
        return False

    def _alive(self) -> set[psutil.Process]:
        import psutil

        def is_alive(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return False

        return set(filter(is_alive, self._known.values()))
