"""The second process that makes links, seen from the first; what it does is in `linking`.

Of a file that did not change in a directory that did, a link is all the work there is, and the system does
it. A thread could not do it beside the one that looks at the next directories: both would wait for the
interpreter at every call. Whatever goes wrong, what is missing is made by who gave the orders: so nothing
depends on the process, and what the system refuses is met there. It ends with its parent.
"""

from __future__ import annotations

import select
import struct

from holdfast.fs.directory import write_all
from holdfast.fs.trees.linking import END, NUMBER, Order
from holdfast.fs.trees.second_process import program_of, start

TYPE_CHECKING = False

if TYPE_CHECKING:
    import subprocess

PROGRAM = program_of("holdfast.fs.trees.linking")
_AT_ONCE = 48


class LinkingProcess:
    """The second process, seen from the first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        self._process, self._pipe = process, process.stdin
        self._given = 0
        self._broken = False
        self._unsent: list[bytes] = []

    @classmethod
    def start(cls, payload: str) -> LinkingProcess | None:
        """Start it; None where that cannot be, or where there is no second processor for it."""
        process = start(PROGRAM, [payload], is_told=True)
        return None if process is None else cls(process)

    def try_give(self, order: Order) -> bool:
        """Hand over an order, unless it has enough to do. Orders are numbered as they are given.

        They are sent some at a time: it is woken for each that it gets.
        """
        if len(self._unsent) >= _AT_ONCE:
            if not self._has_room():
                return False
            self._send()
        self._unsent.append(order.encoded())
        self._given += 1
        return True

    def _has_room(self) -> bool:
        try:
            return bool(select.select((), (self._pipe,), (), 0)[1])
        except ValueError:  # there are more open files than this call knows
            return False

    def _send(self) -> None:
        content = b"".join(self._unsent)
        self._unsent.clear()
        try:
            if not self._broken:
                write_all(self._pipe.fileno(), content)
        except OSError:  # it is gone, or some orders are: nobody knows which
            self._broken = True

    def failed(self) -> list[int]:
        """Wait until it is done; the numbers of the orders that are not carried out, or perhaps not."""
        self._send()
        try:
            answer, _ = self._process.communicate()
            *numbers, (count,), (end,) = NUMBER.iter_unpack(answer)
        except (OSError, ValueError, struct.error):
            end = count = 0
        if self._broken or end != END or count != self._given:  # it did not come to its end
            return list(range(self._given))
        return [number for (number,) in numbers]

    def kill(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        try:
            self._process.communicate()
        except (OSError, ValueError):
            self._process.wait()
