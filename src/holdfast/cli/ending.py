"""Being asked to end: what we hold is given back first, and the terminal left as it was."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Terminated(BaseException):
    """A signal has asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def ending_raises() -> Iterator[None]:
    """Let a signal that asks us to end raise `Terminated` in the block.

    While a command runs under us these signals are kept back, and go on to it.
    """

    def end(number: int, frame: object) -> None:
        raise Terminated(number)

    asking = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    wanted: list[int] = []
    try:
        for each in asking:
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, end)
                wanted.append(each)
    except ValueError:  # not in the main thread: whoever runs us there sees to signals
        pass
    try:
        yield
    finally:
        for each in wanted:
            signal.signal(each, signal.SIG_DFL)


def end_by(number: int) -> int:
    """End this process by the signal that it was asked with."""
    from holdfast.cli import child

    return child.end_like(child.Ended(None, number))
