"""Verifying a ledger: gaps, torn and foreign files, wrong names, events that contradict each other.

Changes nothing. An *error* stops readers or makes claims doubtful; a *note* is litter, or
worth knowing. `code` is stable, for programs; `subject` is the file or the event.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import parse_instant
from holdfast.errors import Failure, NotFound
from holdfast.findings import Check, Finding, Severity, examine
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.fs.names import counted
from holdfast.ledger.claim_files import ClaimFiles
from holdfast.ledger.log import CODEC, MOST_BYTES, Event, Ledger, Recorded
from holdfast.ledger.projection import ACQUIRED, KINDS, NAME, REAPED, RELEASED, VERSION, ClaimState, ends, form_problem

DIRECTORY = "ledger"
MOST_GAPS = 20  # how many gaps are listed one by one

_EVENT = re.compile(r"event-([0-9]+)\.json", re.ASCII)
_OWN = frozenset(("ledger.lock", ".meta.lock"))
_RESTORE = (
    "Restore it from a backup; without one, put an event in its place that says so: "
    '{"type":"event_lost","timestamp":"<when>"}.'
)
_LOST = f"Keep a copy of it. {_RESTORE}"
_WRONG_NAME = (
    "No reader reads it. If it was meant to be an event, append its content again "
    "('holdfast ledger append'); then move the file away."
)
_FORM = "It has no effect on claims. Find out which program wrote this invalid event."


class LedgerReport(NamedTuple):
    """The number of readable events, and the findings."""

    events: int
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        return not any(each.severity is Severity.ERROR for each in self.findings)


class _Verification(NamedTuple):
    """One pass over a ledger. `state` has the claims of the events that have been read so far."""

    ledger: Ledger
    root: Path | None
    files: ClaimFiles | None
    state: ClaimState


def verify(ledger: Ledger, root: Path | None = None, files: ClaimFiles | None = None) -> LedgerReport:
    """Verify a ledger: its events, its checkpoint, and, if it is on files, those below `root`."""
    verification = _Verification(ledger, root, files, ClaimState())
    findings = examine(verification, _CHECKS, _stopped)
    return LedgerReport(verification.state.sequence, findings)


def finding_to_json(finding: Finding) -> dict[str, object]:
    record = {"severity": finding.severity.value, "kind": finding.code, "where": finding.subject}
    return {**record, "problem": finding.message, "remedy": finding.remedy}


def _stopped(verification: _Verification, check: Check[_Verification], failure: Failure) -> Iterator[Finding]:
    if check.name != "events":
        raise failure
    if verification.root is None:  # on files, the check of the files has found it
        yield _error("unreadable", str(failure.facts.get("source")), failure.message, _LOST)


def _check_files(verification: _Verification) -> Iterator[Finding]:
    if verification.root is None:
        return
    try:
        directory = Directory.open(verification.root / DIRECTORY)
    except NotFound:
        return
    with directory:
        numbers: list[int] = []
        for name in sorted(directory.names()):
            found = _EVENT.fullmatch(name)
            if found is None:
                yield from _other_file(directory, name)
            elif name != _name(int(found[1])) or int(found[1]) == 0:
                message = "its name is not that of an event: six digits from 000001, or more from 1000000"
                yield _error("wrong-name", directory.where(name), message, _WRONG_NAME)
            else:
                numbers.append(int(found[1]))
                yield from _event_file(directory, name)
        yield from _gaps(directory, sorted(numbers))


def _other_file(directory: Directory, name: str) -> Iterator[Finding]:
    if name in _OWN or name.startswith(".ledger.lock"):  # with its guard, turnstile and drafts
        return
    if name.startswith(".") and name.endswith(".tmp"):
        message = "a draft that was never published: its writer was interrupted, or is writing now"
        remedy = "Remove it if it is older than a minute; it is not part of the ledger."
        yield _note("draft", directory.where(name), message, remedy)
    else:
        remedy = "Move it elsewhere; programs that count the files of this directory may count it."
        yield _note("foreign-file", directory.where(name), "it is not a file of a ledger", remedy)


def _event_file(directory: Directory, name: str) -> Iterator[Finding]:
    where = directory.where(name)
    status = directory.status(name)
    if status is None:
        return
    if not stat.S_ISREG(status.st_mode):
        yield _error("not-a-file", where, "it is not a regular file", _LOST)
    elif status.st_size == 0:
        yield _error("torn", where, "it is empty: its writer did not sync it before a power cut", _LOST)
    elif status.st_size > MOST_BYTES:
        yield _error("too-large", where, f"it has {status.st_size} bytes, more than {MOST_BYTES}", _LOST)
    else:
        try:
            CODEC.decode(durable.read_in(directory, name), where)
        except Failure as failure:
            yield _error("torn", where, failure.message, _LOST)


def _gaps(directory: Directory, numbers: list[int]) -> Iterator[Finding]:
    present = set(numbers)
    missing = [number for number in range(1, (numbers or [0])[-1]) if number not in present]
    missing = [number for number in missing if directory.status(_name(number)) is None]  # appended meanwhile
    for number in missing[:MOST_GAPS]:
        message = f"event {number} is missing, although later ones exist: readers stop before it"
        yield _error("gap", directory.where(_name(number)), message, _RESTORE)
    if more := len(missing[MOST_GAPS:]):
        yield _error("gap", directory.shown, f"also missing: {counted(more, 'event')}", "Repair them in the same way.")


def _name(number: int) -> str:
    return f"event-{number:06d}.json"


def _check_events(verification: _Verification) -> Iterator[Finding]:
    state, ids = verification.state, dict[str, int]()
    for recorded in verification.ledger.events():
        where = f"event {recorded.sequence}"
        yield from _form(recorded.event, where)
        yield from _appended_twice(recorded, ids, where)
        yield from _contradictions(recorded.event, state, where)
        state.apply(recorded)


def _form(event: Event, where: str) -> Iterator[Finding]:
    if not isinstance(event.get("type"), str):
        yield _error("form", where, "it has no type", _FORM)
    if _instant(event) is None:
        yield _error("form", where, "it has no timestamp that is an instant with a time zone", _FORM)
    if event.get("type") in KINDS and (problem := form_problem(event)) is not None:
        yield _error("form", where, f"it is not a valid {event['type']}: {problem}", _FORM)


def _appended_twice(recorded: Recorded, ids: dict[str, int], where: str) -> Iterator[Finding]:
    identity = recorded.event.get("id")
    if not isinstance(identity, str):
        return
    first = ids.setdefault(identity, recorded.sequence)
    if first != recorded.sequence:
        message = f"it has the id of event {first}: one of them is a duplicate"
        remedy = "Events cannot be removed: append an event that says which one counts."
        yield _error("twice", where, message, remedy)


def _contradictions(event: Event, state: ClaimState, where: str) -> Iterator[Finding]:
    if event.get("type") not in KINDS or form_problem(event) is not None:
        return
    held, now = state.claims.get(event["node_id"]), _instant(event)
    if event["type"] == ACQUIRED:
        other = held is not None and held.owner != event["owner"]
        if held is not None and other and now is not None and not held.is_expired(now):
            message = f"{event['owner']} took {held.node_id} while {held.owner} had it (event {held.sequence})"
            remedy = "Its writer did not read the ledger under its lock. Ask both owners what they did."
            yield _error("overlap", where, message, remedy)
    elif event["type"] in (RELEASED, REAPED) and (held is None or not ends(event, held)):
        message = f"a {event['type']} of a claim that {event['owner']} does not have; it has no effect"
        yield _note("without-claim", where, message, "Its writer was late: the claim had already ended.")


def _instant(event: Event) -> float | None:
    try:
        return parse_instant(event["timestamp"])
    except (KeyError, TypeError, ValueError):
        return None


def _check_checkpoint(verification: _Verification) -> Iterator[Finding]:
    ledger = verification.ledger
    kept = ledger.checkpoint(NAME, VERSION, until=verification.state.sequence)
    if kept is None:
        return
    replayed = ClaimState()
    for each in ledger.events(until=kept.sequence):
        replayed.apply(each)
    if ClaimState.from_record(kept.state, kept.sequence) != replayed:
        message = f"it differs from the events up to {kept.sequence}"
        remedy = "Remove the directory .holdfast/checkpoints: it is only a cache."
        yield _error("checkpoint", f"the checkpoint {NAME}", message, remedy)


def _check_claim_files(verification: _Verification) -> Iterator[Finding]:
    files, claims = verification.files, verification.state.claims
    if files is None:
        return
    for node in sorted({*files.nodes(), *claims}):
        said, held = files.read(node), claims.get(node)
        if said and held and (said.owner, said.expiry()) == (held.owner, held.expiry()):
            continue
        message = "it differs from the ledger" if said else "there is no such file, or nothing in it"
        remedy = "'holdfast ledger reap' updates the claim files; the ledger is authoritative."
        yield _note("claim-file", str(files.path / f"{node}.lock"), message, remedy)


_CHECKS = (
    Check("files", _check_files),
    Check("events", _check_events),
    Check("checkpoint", _check_checkpoint),
    Check("claim files", _check_claim_files),
)


def _error(code: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(code, subject, message, remedy=remedy)


def _note(code: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(code, subject, message, remedy=remedy, severity=Severity.NOTE)
