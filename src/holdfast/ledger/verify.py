"""Looking a ledger over: gaps, torn and foreign files, wrong names, events that contradict each other.

Changes nothing. Each finding says where, what is wrong and what to do about it. An *error* is something
that readers stumble over or that makes claims doubtful; a *note* is litter, or worth knowing.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import parse_instant
from holdfast.errors import Failure, NotFound
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import CODEC, MOST_BYTES, Event, Ledger, Recorded
from holdfast.ledger.projection import (
    ACQUIRED,
    KINDS,
    NAME,
    REAPED,
    RELEASED,
    VERSION,
    ClaimState,
    ends,
    form_problem,
)

DIRECTORY = "ledger"
_EVENT = re.compile(r"event-([0-9]+)\.json", re.ASCII)
_OWN = frozenset(("ledger.lock", ".meta.lock"))
MOST_GAPS = 20
"""How many gaps are listed one by one."""


class LedgerFinding(NamedTuple):
    """Something that is not as it should be. `kind` is stable, for programs."""

    severity: str
    kind: str
    where: str
    problem: str
    remedy: str

    def as_record(self) -> dict[str, object]:
        return dict(self._asdict())


class LedgerReport(NamedTuple):
    """What looking a ledger over has found."""

    events: int
    findings: list[LedgerFinding]

    @property
    def sound(self) -> bool:
        return not any(each.severity == "error" for each in self.findings)


def verify(ledger: Ledger, root: Path | None = None, files: ClaimFiles | None = None) -> LedgerReport:
    """Look over a ledger: its events, its checkpoint, and, if it is on files, those below `root`."""
    findings = [] if root is None else list(_file_findings(root / DIRECTORY))
    examined = _Examined()
    try:
        for each in ledger.events():
            findings += examined.take(each)
    except Failure as failure:  # on files, the file has been found already
        if root is None:
            findings.append(_error("unreadable", str(failure.facts.get("source")), failure.message, _LOST))
    findings += _checkpoint_findings(ledger, examined.book)
    if files is not None:
        findings += _claim_file_findings(files, examined.book)
    return LedgerReport(examined.book.sequence, findings)


# --- The files ------------------------------------------------------------------------------------------

_LOST = (
    "Keep a copy of it. Restore it from a backup; if there is none, put an event in its place that says so: "
    '{"type":"event_lost","timestamp":"<when>"}.'
)


def _file_findings(path: Path) -> Iterator[LedgerFinding]:
    try:
        directory = Directory.open(path)
    except NotFound:
        return
    with directory:
        numbers: list[int] = []
        for name in sorted(directory.names()):
            found = _EVENT.fullmatch(name)
            if found is None:
                yield from _other_file(directory, name)
            elif name != _name(int(found[1])) or int(found[1]) == 0:
                yield _error(
                    "wrong-name",
                    directory.where(name),
                    "it is not named as events are: six digits beginning with 000001, more from 1000000 on",
                    "No reader looks at it. If it is an event that was meant to count, append its content "
                    "again ('holdfast ledger append'); then move the file away.",
                )
            else:
                numbers.append(int(found[1]))
                yield from _event_file(directory, name)
        yield from _gaps(directory, sorted(numbers))


def _other_file(directory: Directory, name: str) -> Iterator[LedgerFinding]:
    where = directory.where(name)
    if name in _OWN or name.startswith(".ledger.lock"):  # with its guard, turnstile and drafts
        return
    if name.startswith(".") and name.endswith(".tmp"):
        yield _note(
            "draft",
            where,
            "a draft that was never published: its writer was interrupted, or is writing now",
            "Remove it if it is older than a minute; it is not part of the ledger.",
        )
    else:
        yield _note(
            "foreign-file",
            where,
            "it is not a file of a ledger",
            "Move it elsewhere; programs that count the files of this directory may count it.",
        )


def _event_file(directory: Directory, name: str) -> Iterator[LedgerFinding]:
    where = directory.where(name)
    status = directory.status(name)
    if status is None:
        return
    if not stat.S_ISREG(status.st_mode):
        yield _error("not-a-file", where, "it is not a regular file", _LOST)
        return
    if status.st_size == 0:
        yield _error("torn", where, "it is empty: its writer did not sync it before a power cut", _LOST)
        return
    if status.st_size > MOST_BYTES:
        yield _error("too-large", where, f"it has {status.st_size} bytes, more than {MOST_BYTES}", _LOST)
        return
    try:
        CODEC.decode(durable.read_in(directory, name), where)
    except Failure as failure:
        yield _error("torn", where, failure.message, _LOST)


def _gaps(directory: Directory, numbers: list[int]) -> Iterator[LedgerFinding]:
    there = set(numbers)
    missing = [number for number in range(1, (numbers or [0])[-1]) if number not in there]
    missing = [number for number in missing if directory.status(_name(number)) is None]  # appended meanwhile
    for number in missing[:MOST_GAPS]:
        yield _error(
            "gap",
            directory.where(_name(number)),
            f"event {number} is missing, though there are later ones: readers stop before it",
            "Restore it from a backup; if there is none, put an event in its place that says so: "
            '{"type":"event_lost","timestamp":"<when>"}.',
        )
    if len(missing) > MOST_GAPS:
        yield _error(
            "gap",
            directory.shown,
            f"{len(missing) - MOST_GAPS} more events are missing",
            "As for the others.",
        )


def _name(number: int) -> str:
    return f"event-{number:06d}.json"


# --- The events -----------------------------------------------------------------------------------------


class _Examined:
    """Events, one after the other, with what came before each."""

    def __init__(self) -> None:
        self.book = ClaimState()
        self._ids: dict[str, int] = {}

    def take(self, recorded: Recorded) -> list[LedgerFinding]:
        event, where = recorded.event, f"event {recorded.sequence}"
        findings = [*self._form(event, where), *self._twice(recorded, where), *self._rules(event, where)]
        self.book.apply(recorded)
        return findings

    def _form(self, event: Event, where: str) -> Iterator[LedgerFinding]:
        if not isinstance(event.get("type"), str):
            yield _error("form", where, "it has no type", _FORM)
        if _instant(event) is None:
            yield _error("form", where, "it has no timestamp that is an instant with a time zone", _FORM)
        if event.get("type") in KINDS and (problem := form_problem(event)) is not None:
            yield _error("form", where, f"a {event['type']} that is none: {problem}", _FORM)

    def _twice(self, recorded: Recorded, where: str) -> Iterator[LedgerFinding]:
        identity = recorded.event.get("id")
        if not isinstance(identity, str):
            return
        first = self._ids.setdefault(identity, recorded.sequence)
        if first != recorded.sequence:
            yield _error(
                "twice",
                where,
                f"it has the id of event {first}: one of them was appended again without need",
                "Nothing can be taken out of a ledger: append an event that says which one counts.",
            )

    def _rules(self, event: Event, where: str) -> Iterator[LedgerFinding]:
        if event.get("type") not in KINDS or form_problem(event) is not None:
            return
        held, moment = self.book.claims.get(event["node_id"]), _instant(event)
        if event["type"] == ACQUIRED:
            other = held is not None and held.owner != event["owner"]
            if held is not None and other and moment is not None and not held.is_expired(moment):
                yield _error(
                    "overlap",
                    where,
                    f"{event['owner']} took {held.node_id} while {held.owner} had it (event {held.sequence})",
                    "Whoever wrote this did not look at the ledger under its lock. Ask both what they did.",
                )
        elif event["type"] in (RELEASED, REAPED) and (held is None or not ends(event, held)):
            yield _note(
                "without-claim",
                where,
                f"a {event['type']} of a claim that {event['owner']} does not have; it has no effect",
                "Whoever wrote it was late: its claim had ended already.",
            )


_FORM = "It has no effect on claims. Find out which program wrote it: it does not keep to the form."


def _instant(event: Event) -> float | None:
    try:
        return parse_instant(event["timestamp"])
    except (KeyError, TypeError, ValueError):
        return None


# --- What is derived from the events --------------------------------------------------------------------


def _checkpoint_findings(ledger: Ledger, book: ClaimState) -> Iterator[LedgerFinding]:
    kept = ledger.checkpoint(NAME, VERSION, until=book.sequence)
    if kept is None:
        return
    replayed = ClaimState()
    for each in ledger.events(until=kept.sequence):
        replayed.apply(each)
    if ClaimState.from_record(kept.state, kept.sequence) != replayed:
        yield _error(
            "checkpoint",
            f"the checkpoint {NAME}",
            f"it says something else than the events up to {kept.sequence}",
            "Remove the directory .holdfast/checkpoints: it is only a cache.",
        )


def _claim_file_findings(files: ClaimFiles, book: ClaimState) -> Iterator[LedgerFinding]:
    for node in sorted({*files.nodes(), *book.claims}):
        said, held = files.read(node), book.claims.get(node)
        same = held is not None and said is not None and said.owner == held.owner
        if same and said is not None and held is not None and said.expiry() == held.expiry():
            continue
        yield _note(
            "claim-file",
            str(files.path / f"{node}.lock"),
            "it does not say what the ledger says" if said else "there is no such file, or nothing in it",
            "'holdfast ledger reap' brings the files of claims back into step; the ledger decides.",
        )


def _error(kind: str, where: str, problem: str, remedy: str) -> LedgerFinding:
    return LedgerFinding("error", kind, where, problem, remedy)


def _note(kind: str, where: str, problem: str, remedy: str) -> LedgerFinding:
    return LedgerFinding("note", kind, where, problem, remedy)
