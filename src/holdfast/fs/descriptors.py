"""What is done with open files everywhere: write all of something, close; and what has something open.

Processes that live for some hundredths of a second load this, too: it needs no other module than `calls`.
"""

from __future__ import annotations

from holdfast.fs import calls

TYPE_CHECKING = False  # what checkers take for true

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of it, however little the system takes at a time."""
    written = calls.write(fd, content)
    while written < len(content):
        written += calls.write(fd, memoryview(content)[written:])


def close_quietly(fd: int) -> None:
    """Close a descriptor behind which nothing waits to be written: an error loses nothing then."""
    try:  # noqa: SIM105 - once or twice per file of a tree: a context manager would take longer than the call
        calls.close(fd)
    except OSError:
        pass


class Closing:
    """Something that is closed at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        """Let go of what it has open."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
