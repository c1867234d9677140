"""A pool of processes that run tasks at the same time.

They are started once per suite, so that no measurement includes their start.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

_HEAD_START = 0.02


class CrewFailure(Exception):
    """A task raised in a process of the crew, or the process is gone."""


class _Raised(NamedTuple):
    text: str


class _Finished(NamedTuple):
    late: float
    result: object


class Crew:
    """`size` processes. Tasks are functions that can be imported, with arguments that can be pickled."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self.size = size
        self._pipes = [ours for ours, _ in pipes]
        self._members = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for member, (_, theirs) in zip(self._members, pipes, strict=True):
            member.start()
            theirs.close()
        self.latest_start = 0.0
        """The longest delay of a member at the beginning of a span: if it is long, the machine was too busy."""

    def tell(self, member: int, task: Callable[..., object], *arguments: object) -> None:
        """Have one member begin a task; `hear` returns its result."""
        self._pipes[member].send((task, arguments))

    def hear(self, member: int) -> Any:
        """Wait for the result of the task of a member."""
        try:
            result = self._pipes[member].recv()
        except EOFError:
            raise CrewFailure("a process of the crew has ended") from None
        if isinstance(result, _Raised):
            raise CrewFailure(result.text)
        return result

    def hear_all(self, members: Sequence[int]) -> list[Any]:
        """The results of several members; all have finished before a failure of one is raised."""
        results: list[Any] = []
        failures: list[CrewFailure] = []
        for member in members:
            try:
                results.append(self.hear(member))
            except CrewFailure as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        return results

    def all_do(
        self, prepare: Callable[..., Callable[[float], object]], *arguments: object, seconds: float
    ) -> list[Any]:
        """Have all members work during the same span of time.

        `prepare(*arguments)` returns the work, which is called with the instant at which it must end. The
        span begins when all members have prepared, so that none is still loading modules while others work.
        """
        members = range(self.size)
        for member in members:
            self.tell(member, _prepare, prepare, arguments)
        self.hear_all(members)
        start_at = time.monotonic() + _HEAD_START
        for member in members:
            self.tell(member, _work, start_at, start_at + seconds)
        finished: list[_Finished] = self.hear_all(members)
        self.latest_start = max(self.latest_start, *(each.late for each in finished))
        return [each.result for each in finished]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for member in self._members:
            if kind is not None:
                member.terminate()
            member.join()
            member.close()


# --- In the processes -------------------------------------------------------------------------------

_prepared: Callable[[float], object] | None = None


def _prepare(prepare: Callable[..., Callable[[float], object]], arguments: tuple[object, ...]) -> None:
    global _prepared
    _prepared = prepare(*arguments)


def _work(start_at: float, end_at: float) -> _Finished:
    global _prepared
    work, _prepared = _prepared, None
    assert work is not None
    early = start_at - time.monotonic()  # all processes of a machine share this clock
    time.sleep(max(0.0, early))
    return _Finished(max(0.0, -early), work(end_at))


def _serve(pipe: Connection[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the crew
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = task(*arguments)
        except Exception as error:
            result = _Raised(f"{type(error).__name__}: {error}")
        pipe.send(result)
