"""Signals at every line: `KeyboardInterrupt` before one line of the given modules after the other."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType


class Interruption:
    """Within its block, the line with this number is interrupted, counted over the modules; the block ends then."""

    def __init__(self, modules: tuple[str, ...], line: int) -> None:
        self.left = line
        self._modules = modules
        self._traced = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        sys.settrace(self._traced)
        return kind is KeyboardInterrupt

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interruption:
        if event == "line" and frame.f_code.co_filename.endswith(self._modules):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interruptions(*modules: str) -> Iterator[Interruption]:
    """One for each line that the blocks run in these modules, until a block is not interrupted any more."""
    for line in itertools.count(1):
        interruption = Interruption(modules, line)
        yield interruption
        if interruption.left > 0:
            return
