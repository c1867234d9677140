"""The processes of the demo: started, caught in the act of holding a lock, killed, replaced, stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from holdfast.demo.scene import Protection, Scene, holds, read_notes
from holdfast.errors import NotFound
from holdfast.fs import calls, durable

Command = Callable[[str], list[str]]
"""The command line that starts the worker with a given name."""

FINISH = 20.0
"""How long workers may take to end once their time is up."""


class Life(NamedTuple):
    """One worker that there was. `killed_at` is None if it ended by itself, with `exit_status`."""

    name: str
    killed_at: float | None
    exit_status: int | None
    complaint: str


class Crew:
    """As many workers as there are slots. Leaving its block ends all of them."""

    def __init__(self, scene: Scene, slots: int, command: Command, chance: random.Random) -> None:
        self._scene = scene
        self._command = command
        self._chance = chance
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self._started = 0
        self.lives: list[Life] = []
        self._slots = slots

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in self._running.values():
            process.kill()  # also one that is stopped
            process.wait()

    def start(self) -> None:
        """Start a worker in every slot."""
        for slot in range(1, self._slots + 1):
            self._start(slot)

    def catch_holder(self) -> tuple[int, Protection] | None:
        """Stop a worker that holds a lock and leave it stopped: its slot, and what it holds."""
        slots = list(self._running)
        self._chance.shuffle(slots)
        for slot in slots:
            name, process = self._running[slot]
            if not _stop(process):
                continue
            held = holds(read_notes(self._scene, name))
            if held is not None:
                return slot, held
            self.resume(slot)
        return None

    def kill(self, slot: int) -> str:
        """Kill the worker in this slot and start a new one in its place; return the name of the dead."""
        name, process = self._running.pop(slot)
        killed_at = time.monotonic()
        process.kill()
        process.wait()
        self.lives.append(Life(name, killed_at, None, ""))
        self._start(slot)
        return name

    def resume(self, slot: int) -> None:
        """Let a worker go on that was stopped."""
        if sys.platform != "win32":
            self._running[slot][1].send_signal(signal.SIGCONT)

    def name_in(self, slot: int) -> str:
        """The name of the worker in this slot."""
        return self._running[slot][0]

    def wait(self) -> None:
        """Wait for all workers to end by themselves; one that does not is killed, and has no exit status."""
        deadline = time.monotonic() + FINISH
        for slot in list(self._running):
            name, process = self._running[slot]
            status: int | None = None
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            del self._running[slot]
            self.lives.append(Life(name, None, status, self._complaint(name)))

    def _start(self, slot: int) -> None:
        self._started += 1
        name = f"{slot}-{self._started}"
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        complaints = calls.open(self._scene.directory / f"complaints-{name}", flags, 0o666)
        try:
            process = subprocess.Popen(
                self._command(name),
                stdin=subprocess.DEVNULL,
                stdout=complaints,
                stderr=complaints,
                start_new_session=True,  # a Ctrl-C is for us, and we end them
            )
        finally:
            calls.close(complaints)
        self._running[slot] = name, process

    def _complaint(self, name: str) -> str:
        try:
            text = durable.read(self._scene.directory / f"complaints-{name}", limit=1 << 16)
        except NotFound:
            return ""
        lines = text.decode("utf-8", "replace").strip().splitlines()
        return lines[0] if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> bool:
    """Stop a process and wait until it has; False if it has ended. Without effect on Windows."""
    if sys.platform == "win32":
        return process.poll() is None
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        process.returncode = os.waitstatus_to_exitcode(status)
        return False
    return True
