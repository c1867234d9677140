"""From what was decided to what is to be done: each change encoded, at its place, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.errors import UsageFailure
from holdfast.store.intents import Step
from holdfast.store.layout import Kind, Place
from holdfast.store.records import Append, Change, Create, Delete, Key, Replace, Stream, View


class Planned(NamedTuple):
    """One change as it will be carried out. `before` is the version of what a document held, `at` is where
    an append goes."""

    place: Place
    operation: Literal["put", "remove", "append"]
    content: bytes = b""
    before: str = ""
    at: int = 0

    def as_step(self) -> Step:
        """The same, as an intent has it."""
        return Step(self.place.name, self.operation, self.content.decode(), self.before, self.at)

    def behind(self) -> int:
        """Where an append behind this one goes; for a line that is also its own position."""
        return self.at + (len(self.content) + 1 if self.place.kind is Kind.LINES else 1)


def plan(
    changes: Sequence[Change], view: View, places: Mapping[Key[Any] | Stream[Any], Place]
) -> list[Planned]:
    """The changes in the order in which they were decided."""
    planned: list[Planned] = []
    ends: dict[Stream[Any], int] = {}
    for change in changes:
        if isinstance(change, Append):
            stream = change.stream
            place, at = places[stream], ends.get(stream)
            if at is None:
                at = view.end(stream) + (place.kind is Kind.NUMBERED)
            step = Planned(place, "append", stream.codec.encode(change.record), "", at)
            if place.kind is Kind.LINES and b"\n" in step.content:
                raise UsageFailure(f"a record for {stream.name} is coded with a line break")
            ends[stream] = step.behind()
        else:
            step = _put_or_remove(change, places[change.key], view)
        planned.append(step)
    return planned


def _put_or_remove(change: Create | Replace | Delete, place: Place, view: View) -> Planned:
    document = view.document(change.key)
    before = "" if document is None else document.version
    if isinstance(change, Delete):
        return Planned(place, "remove", before=before)
    return Planned(place, "put", change.key.codec.encode(change.record) + b"\n", before)


def in_order(planned: list[Planned]) -> list[Planned]:
    """The order of applying: what is pointed to before what points to it, and removals the other way.

    Pointers (an index) come early in the order of locks and what they point to later: so documents
    are put in reverse order, appends follow as they came, and removals go in order at the end.
    """

    def rank(each: Planned) -> tuple[int, str]:
        return each.place.rank

    puts = sorted((each for each in planned if each.operation == "put"), key=rank, reverse=True)
    appends = [each for each in planned if each.operation == "append"]
    removals = sorted((each for each in planned if each.operation == "remove"), key=rank)
    return [*puts, *appends, *removals]
