"""Verifying a ledger: gaps, torn and foreign files, wrong names, events that contradict each other.

Repairs nothing. An *error* stops readers or makes claims doubtful; a *note* is litter, or
worth knowing. `code` is stable, for programs; `subject` is the file or the event.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SKEW, parse_instant
from holdfast.errors import Archived, Failure, NotFound
from holdfast.findings import Check, Finding, Severity, examine
from holdfast.fs import durable
from holdfast.fs.directory import Directory
from holdfast.fs.names import counted
from holdfast.fs.strictjson import MAX_BYTES
from holdfast.ledger.claim_files import UNREADABLE, ClaimFiles
from holdfast.ledger.log import CODEC, EVENTS, MOST_BYTES, UNLOCKED, Event, Ledger, Recorded
from holdfast.ledger.projection import (
    ACQUIRED,
    ENDING,
    KINDS,
    NAME,
    REAPED,
    RELEASED,
    VERSION,
    Claim,
    ClaimState,
    archived_event,
    archived_state,
    form_problem,
    has_effect,
    state_at_cut,
)
from holdfast.ledger.rules import LONGEST_TTL
from holdfast.store.archive import Archive, archive_of, read_segments
from holdfast.store.model import not_understood
from holdfast.store.streams import DRAFTS, RECEIPTS, read_receipts

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
    "Readers ignore it. If it was meant to be an event, append its content again "
    "('holdfast ledger append'); then move the file away."
)
_FORM = "Other programs may understand it differently. Find out which program wrote this invalid event."
_FORGED = (
    "It counts nevertheless, as the specification requires. Find out which program wrote it; ask the owner what it did."
    " 'holdfast ledger release NODE --actor OWNER' ends a claim that nobody has."
)
_KEPT = (
    f"Its content is in the file {RECEIPTS} of the ledger, before its number. If its file is missing or damaged, put "
    "it back; if another event has its number, append it again with its id ('holdfast ledger append')."
)


class LedgerReport(NamedTuple):
    """The number of readable events, and the findings."""

    events: int
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        return not any(each.severity is Severity.ERROR for each in self.findings)


class _Verification(NamedTuple):
    """One pass over a ledger. `state` has the claims of the events that have been read so far; `ids` are those of all
    readable files."""

    ledger: Ledger
    root: Path | None
    files: ClaimFiles | None
    state: ClaimState
    ids: set[object]
    archive: Archive | None
    segments: Sequence[Path]


def verify(
    ledger: Ledger, root: Path | None = None, files: ClaimFiles | None = None, segments: Sequence[Path] = ()
) -> LedgerReport:
    """Verify a ledger: its events, its checkpoint, and, if it is on files, those below `root`. With the files of all
    `segments`, its archived events too."""
    archive = archive_of(ledger.store, EVENTS.name)
    state = ClaimState() if archive is None or segments else archived_state(archive)
    begin = state.sequence
    verification = _Verification(ledger, root, files, state, set(), archive, segments)
    findings = examine(verification, _CHECKS, _stopped)
    missing = sum(last - first + 1 for first, last in ledger.gaps)
    ledger.gaps.clear()  # they are among the findings
    return LedgerReport(state.sequence - begin - missing, findings)


def finding_to_json(finding: Finding) -> dict[str, object]:
    record = {"severity": finding.severity.value, "kind": finding.code, "where": finding.subject}
    return {**record, "problem": finding.message, "remedy": finding.remedy}


def _stopped(verification: _Verification, check: Check[_Verification], failure: Failure) -> Iterator[Finding]:
    if check.name != "events":
        raise failure
    if "segment" in failure.facts:
        yield _error("segment", str(failure.facts["segment"]), failure.message, failure.hint)
    elif verification.root is None:  # on files, the check of the files has found it
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
        acknowledged = list(_acknowledged(directory))  # before the files: all of their events are among those
        for name in sorted(directory.names()):
            found = _EVENT.fullmatch(name)
            if found is None:
                yield from _other_file(directory, name)
            elif name != _name(int(found[1])) or int(found[1]) == 0:
                message = "its name is not that of an event: six digits from 000001, or more from 1000000"
                yield _error("wrong-name", directory.where(name), message, _WRONG_NAME)
            else:
                numbers.append(int(found[1]))
                yield from _event_file(directory, name, verification.ids)
        yield from _gaps(directory, sorted(numbers))
        yield from _lost(directory, acknowledged, verification.ids)


def _other_file(directory: Directory, name: str) -> Iterator[Finding]:
    if name in _OWN or name.startswith((".ledger.lock", RECEIPTS)):  # with its guard, turnstile and drafts
        return
    if name == DRAFTS and directory.is_directory(name):
        with directory.enter(name) as drafts:
            for each in sorted(drafts.names()):
                yield from _other_file(drafts, each)
    elif name.startswith(".") and name.endswith(".tmp"):
        message = "a draft that was never published: its writer was interrupted, or is writing now"
        remedy = "Remove it if it is older than a minute; it is not part of the ledger."
        yield _note("draft", directory.where(name), message, remedy)
    else:
        remedy = "Move it elsewhere; programs that count the files of this directory may count it."
        yield _note("foreign-file", directory.where(name), "it is not a file of a ledger", remedy)


def _event_file(directory: Directory, name: str, ids: set[object]) -> Iterator[Finding]:
    where = directory.where(name)
    status = directory.status(name)
    if status is None:
        return
    if not stat.S_ISREG(status.st_mode):
        yield _error("not-a-file", where, "it is not a regular file", _LOST)
    elif status.st_size == 0:
        yield _error("torn", where, "it is empty: its writer did not sync it before a power cut", _LOST)
    else:
        try:
            ids.add(str(CODEC.decode(durable.read_in(directory, name, limit=MAX_BYTES), where).get("id")))
        except Failure as failure:
            yield _error("torn", where, failure.message, _LOST)
        else:
            if status.st_size > MOST_BYTES:
                message = f"it has {status.st_size} bytes, more than {MOST_BYTES}, but can be read"
                yield _warning("too-large", where, message, "Other programs may refuse it. Find out who wrote it.")


def _gaps(directory: Directory, numbers: list[int]) -> Iterator[Finding]:
    spans = [range(before + 1, after) for before, after in pairwise([0, *numbers])]  # long if somebody planted a name
    missing = chain.from_iterable(spans)
    absent = (number for number in missing if directory.status(_name(number)) is None)  # not appended meanwhile
    for number in islice(absent, MOST_GAPS):
        message = f"event {number} is missing, although later ones exist: a program that counts events overwrites one"
        yield _error("gap", directory.where(_name(number)), message, _RESTORE)
    more = sum(each.stop - each.start for each in spans if each) - MOST_GAPS
    if more > 0 and next(absent, None) is not None:
        yield _error(
            "gap",
            directory.shown,
            f"{counted(more, 'more event')} {'is' if more == 1 else 'are'} missing",
            "Repair them in the same way.",
        )


def _acknowledged(directory: Directory) -> Iterator[tuple[int, Event]]:
    """The events of which this machine has kept copies when they were appended, with their numbers."""
    with contextlib.suppress(Failure):
        for number, content in read_receipts(directory):
            with contextlib.suppress(Failure):  # torn by a power cut
                yield number, CODEC.decode(content, RECEIPTS)


def _lost(directory: Directory, acknowledged: Iterable[tuple[int, Event]], ids: set[object]) -> Iterator[Finding]:
    for number, event in acknowledged:
        where, identity = directory.where(_name(number)), event.get("id")
        if identity is None or identity in ids:
            continue
        if event.get("type") == UNLOCKED:
            message = "an event of the former lock holder replaced the record of the break; no other event is lost"
            yield _note("replaced", where, message, "Ask its owner whether it continued after that.")
        else:
            message = f"the event {identity}, which was appended here, is gone: it was replaced, damaged or removed"
            yield _error("lost", where, message, _KEPT)


def _name(number: int) -> str:
    return f"event-{number:06d}.json"


def _check_events(verification: _Verification) -> Iterator[Finding]:
    state, ids = verification.state, dict[str, int]()
    for recorded in _events(verification):
        where = f"event {recorded.sequence}"
        yield from _form(recorded.event, where)
        yield from _appended_twice(recorded, ids, where)
        yield from _contradictions(recorded.event, state, where)
        state.apply(recorded)


def _events(verification: _Verification) -> Iterator[Recorded]:
    """The events of the segments, if there are any, and those in the store. If some are archived meanwhile, goes on
    after them."""
    archive, state = verification.archive, verification.state
    if verification.segments:
        for line in read_segments(archive, verification.segments):
            yield archived_event(line)
        if archive is not None and archived_state(archive) != state:
            raise not_understood("the archive of the ledger", "its claims differ from the archived events")
    after = archive.last if archive else 0
    while True:
        try:
            yield from verification.ledger.events(after=after)
            return
        except Archived as archived:
            vars(state).update(vars(state_at_cut(archived, None)))
            after = state.sequence


def _form(event: Event, where: str) -> Iterator[Finding]:
    if not isinstance(event.get("type"), str):
        yield _error("form", where, "it has no type", _FORM)
    if _instant(event) is None:
        yield _error("form", where, "it has no timestamp that is an instant with a time zone", _FORM)
    if str(event.get("type")) in KINDS and (problem := form_problem(event)) is not None:
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
    if str(event.get("type")) not in KINDS or not has_effect(event):
        return
    held, now = state.claims.get(event["node_id"]), _instant(event)
    if (forgery := _forgery(event, held, now)) is not None:
        yield _error("forged", where, forgery, _FORGED)
    elif event["type"] == ACQUIRED:
        other = held is not None and held.owner != event["owner"]
        if held is not None and other and now is not None and not held.is_expired(now):
            message = f"{event['owner']} took {held.node_id} while {held.owner} had it (event {held.sequence})"
            remedy = "Its writer did not read the ledger under its lock. Ask both owners what they did."
            yield _error("overlap", where, message, remedy)
    elif event["type"] in ENDING and held is None:
        message = f"{event.get('owner')} has no claim that this {event['type']} could end; it has no effect"
        yield _note("without-claim", where, message, "Its writer was late: the claim had already ended.")
    elif event["type"] in ENDING and held is not None:
        if event.get("owner") == held.owner and event.get("claim_id", "") in ("", held.claim_id):
            return
        message = f"a {event['type']} in the name of {event.get('owner')} ended the claim of {held.owner}"
        remedy = "By the specification it ends the claim, whoever holds it. Find out which program wrote it."
        yield _warning("ended-by-another", where, message, remedy)


def _forgery(event: Event, held: Claim | None, now: float | None) -> str | None:
    """Why no program that follows the rules of claims can have written an event; None if one can."""
    if event["type"] == ACQUIRED:
        if now is not None and parse_instant(event["expires_at"]) - now > LONGEST_TTL + SKEW:
            return f"{event['owner']} claimed {event['node_id']} until {event['expires_at']}: no claim lasts that long"
    elif event["type"] in ENDING and held is not None and event.get("owner") == held.owner:
        if event["type"] == REAPED and now is not None and not held.is_expired(now + SKEW):
            return f"the claim of {held.owner} on {held.node_id} was reaped before it expired"
        if event["type"] == RELEASED and held.claim_id and not event.get("claim_id"):
            return f"the claim of {held.owner} on {held.node_id} was released without its id, which its holder knows"
    return None


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
    replayed = archived_state(verification.archive) if verification.archive else ClaimState()
    try:
        for each in ledger.events(after=replayed.sequence, until=kept.sequence):
            replayed.apply(each)
    except Archived:  # meanwhile
        return
    if ClaimState.from_record(kept.state, kept.sequence) != replayed:
        message = f"it differs from the events up to {kept.sequence}"
        remedy = "Remove the directory .holdfast/checkpoints: it is only a cache."
        yield _error("checkpoint", f"the checkpoint {NAME}", message, remedy)


def _check_claim_files(verification: _Verification) -> Iterator[Finding]:
    files, claims = verification.files, verification.state.claims
    if files is None:
        return
    for node in sorted({*files.nodes(), *claims}):
        held, where = claims.get(node), str(files.path / f"{node}.lock")
        try:
            said = files.read(node)
        except UNREADABLE as failure:
            yield _warning("claim-file", where, failure.message, "Move it away: until then, nobody can claim the node.")
            continue
        if said and held and (said.owner, said.expiry()) == (held.owner, held.expiry()):
            continue
        message = "it differs from the ledger" if said else "there is no such file, or nothing in it"
        remedy = "'holdfast ledger reap' updates the claim files; the ledger is authoritative."
        yield _note("claim-file", where, message, remedy)


_CHECKS = (
    Check("files", _check_files),
    Check("events", _check_events),
    Check("checkpoint", _check_checkpoint),
    Check("claim files", _check_claim_files),
)


def _error(code: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(code, subject, message, remedy=remedy)


def _warning(code: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(code, subject, message, remedy=remedy, severity=Severity.WARNING)


def _note(code: str, subject: str, message: str, remedy: str) -> Finding:
    return Finding(code, subject, message, remedy=remedy, severity=Severity.NOTE)
