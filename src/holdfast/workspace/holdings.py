"""What is known about something that somebody holds, in one form for all kinds of locks."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.locks.identity import Liveness


class Reclaim(NamedTuple):
    """Whether what is held can be had without harm, and how: a command, or what to wait for."""

    safe: bool
    how: str


class Waiting(NamedTuple):
    """One who waits, and in which place, from 1; None if there is no order in which they are served."""

    who: str
    place: int | None
    since: str | None
    purpose: str = ""
    liveness: Liveness = Liveness.UNKNOWN

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {**self._asdict(), "liveness": self.liveness.value}


class Holding(NamedTuple):
    """Something that somebody holds. What is not known is None.

    `who` is the name that its holder gave itself, else its process; `process` is that in any case.
    """

    kind: str
    what: str
    who: str
    since: str | None
    until: str | None
    time_left: float | None
    liveness: Liveness
    purpose: str
    waiting: tuple[Waiting, ...]
    reclaim: Reclaim
    process: str | None = None

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {
            **self._asdict(),
            "liveness": self.liveness.value,
            "waiting": [each.as_record() for each in self.waiting],
            "reclaim": self.reclaim._asdict(),
        }
