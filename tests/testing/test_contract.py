"""The contract catches broken stores: each store here has one planted bug, and a test that must catch it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from holdfast.errors import Corrupt, Failure, LockConflict, OutcomeUnknown
from holdfast.store.files import FileStore, _Attempt
from holdfast.store.layout import Location
from holdfast.store.memory import MemoryStore, MemoryWatch
from holdfast.store.model import (
    Append,
    Changes,
    Commit,
    Create,
    Decide,
    Decision,
    Document,
    Entry,
    Family,
    Key,
    Record,
    Replace,
    Result,
    Store,
    Stream,
    View,
    Watched,
)
from holdfast.store.streams import Planned
from holdfast.testing import Backend, StoreContract, contract_streams
from holdfast.testing.backend import EVENTS, INDEX
from proof.model import StoreSubject, run_state_machine
from tests.store.test_file_store import FileBackend, IgnoresIntents, WithoutLocks
from tests.store.test_memory_store import MemoryBackend

# --- Stores with one bug each ----------------------------------------------------------------------


class CommitsOneByOne(FileStore):
    """Commits each change by itself."""

    def _commit(self, attempt: _Attempt, planned: list[Planned]) -> tuple[int, ...]:
        return tuple(each for step in planned for each in self._commit_one(step, attempt.opened))


class ValidatesOnlyWrites(MemoryStore):
    """Decides on an earlier read, and validates only the documents that it writes."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        seen = {key: self.read(key) for key in keys}
        decision = decide(View(seen), self.now())
        time.sleep(0.001)

        def commit(view: View, now: float) -> Decision[Result]:
            written = [each.key for each in decision.changes if not isinstance(each, Append)]
            if any(view.document(key) != seen[key] for key in written):
                raise LockConflict("changed meanwhile")
            return decision

        try:
            return super().transact(keys, commit, commit_id=commit_id)
        except LockConflict:
            return self.transact(keys, decide, commit_id=commit_id)


class ReadsOneByOne(FileStore):
    """Reads documents one by one instead of together."""

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        return View({key: self.read(key) for key in keys})


class RetriesUnknownOutcomes(FileStore):
    """Retries a commit whose outcome is unknown."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        try:
            return super().transact(keys, decide, commit_id=commit_id)
        except OutcomeUnknown:
            return super().transact(keys, decide)


class ReportsFailuresAsMade(FileStore):
    """Reports a failed commit as made."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        try:
            return super().transact(keys, decide, commit_id=commit_id)
        except Failure:
            return Commit("", 0.0, (), None)  # type: ignore[arg-type]


class TreatsDamageAsMissing(FileStore):
    """Treats a document that cannot be read as missing."""

    def _document(self, key: Key[Record], location: Location, content: bytes | None) -> Document[Record] | None:
        try:
            return super()._document(key, location, content)
        except Corrupt:
            return None


class LosesRecords(MemoryStore):
    """Keeps only the first of several records that are appended together."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        def forgetful(view: View, now: float) -> Decision[Result]:
            changes, result = decide(view, now)
            appends = [each for each in changes if isinstance(each, Append)]
            return Decision([each for each in changes if each not in appends[1:]], result)

        return super().transact(keys, forgetful, commit_id=commit_id)


class OverwritesOnCreate(MemoryStore):
    """Overwrites a document that already exists instead of refusing to create it."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        def lax(view: View, now: float) -> Decision[Result]:
            changes, result = decide(view, now)
            there = [isinstance(each, Create) and view.document(each.key) is not None for each in changes]
            return Decision(
                [
                    Replace(each.key, each.record) if over and isinstance(each, Create) else each
                    for each, over in zip(changes, there, strict=True)
                ],
                result,
            )

        return super().transact(keys, lax, commit_id=commit_id)


class AllowsUnnamedKeys(MemoryStore):
    """Allows changes to keys that were not named."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        return super().transact([*keys, INDEX, EVENTS, *_ALL], decide, commit_id=commit_id)


_ALL: list[Any] = [Key("jit/gates", INDEX.codec), Stream("jvs/audit", EVENTS.codec)]


class OneVersion(MemoryStore):
    """Gives every state the same version."""

    def read(self, key: Key[Record]) -> Document[Record] | None:
        document = super().read(key)
        return None if document is None else document._replace(version="1")


class ScansInReverse(MemoryStore):
    """Scans in reverse order."""

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        return iter(list(super().scan(family, after=after))[::-1])


class IgnoresPositions(MemoryStore):
    """Reads a stream from its start, at any position."""

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        return super().entries(stream)


class WatchesLate(MemoryStore):
    """Starts to watch at the first wait."""

    def watch(self, what: Watched) -> MemoryWatch:
        changed, log = self._changed, self._log

        class Late(MemoryWatch):
            begun = False

            def wait(self, timeout: float | None = None) -> frozenset[str]:
                self._seen = self._seen if self.begun else len(log)
                self.begun = True
                return super().wait(timeout)

            def __enter__(self) -> Self:
                return self

        return Late(changed, log, what)


class ReportsEverything(MemoryStore):
    """Reports every change to every watch."""

    def watch(self, what: Watched) -> MemoryWatch:
        watch = super().watch(what)
        watch._matches = lambda name: True  # type: ignore[method-assign]
        return watch


class ForgetsDeletions(MemoryStore):
    """Does not report members that are gone."""

    def changes(self, family: Family[Record], cursor: bytes = b"") -> Changes[Record]:
        return super().changes(family, cursor)._replace(removed=frozenset())


class MovesCursorsTooFar(MemoryStore):
    """Returns the cursor of after the answer, not of before: a commit in between is never reported."""

    def changes(self, family: Family[Record], cursor: bytes = b"") -> Changes[Record]:
        found = super().changes(family, cursor)
        time.sleep(0.002)  # lets writers come in between, the last ones too
        return found._replace(cursor=super().changes(family).cursor)


class TrustsEveryCursor(MemoryStore):
    """Takes a cursor of another store for its own."""

    def changes(self, family: Family[Record], cursor: bytes = b"") -> Changes[Record]:
        return super().changes(family, f"{self._id} {len(self._log)}".encode() if cursor else b"")


# --- The tests that must catch them ----------------------------------------------------------------


class Planted(NamedTuple):
    """A store with a bug, and the contract test that must fail on it. Races may need several attempts."""

    store: Callable[..., Store]
    test: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    attempts: int = 1


C = StoreContract
RACES = 20

PLANTED: dict[str, Planted] = {
    "a commit by halves is seen": Planted(
        CommitsOneByOne, C.test_a_commit_seen_in_one_document_is_seen_in_all, (), RACES
    ),
    "a commit by halves is left": Planted(
        CommitsOneByOne,
        C.test_the_reported_outcome_matches_the_state_and_no_commit_is_made_twice,
        ("after", "two documents"),
    ),
    "updates are lost without locks": Planted(WithoutLocks, C.test_threads_that_increment_lose_no_update, (), RACES),
    "records are lost without locks": Planted(
        WithoutLocks, C.test_threads_that_append_lose_no_record, (EVENTS,), RACES
    ),
    "several win without locks": Planted(WithoutLocks, C.test_exactly_one_thread_wins_each_swap, (), RACES),
    "readers do not look at intents": Planted(
        IgnoresIntents, C.test_a_commit_seen_in_one_document_is_seen_in_all, (), RACES
    ),
    "write skew": Planted(
        ValidatesOnlyWrites,
        C.test_write_skew_cannot_break_a_constraint_on_two_documents,
        (),
        RACES,
    ),
    "what is read together is not": Planted(ReadsOneByOne, C.test_documents_read_together_are_consistent, (5,), RACES),
    "a lost answer makes it happen twice": Planted(
        RetriesUnknownOutcomes,
        C.test_the_reported_outcome_matches_the_state_and_no_commit_is_made_twice,
        ("after", "two documents"),
    ),
    "a lost answer is taken for a yes": Planted(
        ReportsFailuresAsMade,
        C.test_the_reported_outcome_matches_the_state_and_no_commit_is_made_twice,
        ("before", "one document"),
    ),
    "damage is taken for absence": Planted(
        TreatsDamageAsMissing,
        C.test_a_damaged_document_is_reported_by_name_and_not_overwritten,
        ("not JSON",),
    ),
    "one of two records is lost": Planted(LosesRecords, C.test_several_records_are_appended_together_in_order),
    "create replaces": Planted(
        OverwritesOnCreate,
        C.test_an_invalid_change_is_refused_and_nothing_is_committed,
        ("create an existing document",),
    ),
    "what was not named is changed": Planted(
        AllowsUnnamedKeys,
        C.test_an_invalid_change_is_refused_and_nothing_is_committed,
        ("a document that was not named",),
    ),
    "all versions are one": Planted(OneVersion, C.test_different_records_have_different_versions),
    "scans have no order": Planted(ScansInReverse, C.test_a_scan_returns_the_members_of_a_family_in_order),
    "positions are ignored": Planted(IgnoresPositions, C.test_reading_resumes_after_any_position, (EVENTS,)),
    "changes before the wait are missed": Planted(
        WatchesLate, C.test_a_change_by_another_client_is_reported, ("a family",)
    ),
    "deletions are not reported": Planted(ForgetsDeletions, C.test_a_random_history_is_followed_exactly),
    "a commit is skipped": Planted(MovesCursorsTooFar, C.test_no_change_of_concurrent_writers_is_missed, (), RACES),
    "any cursor will do": Planted(TrustsEveryCursor, C.test_an_unknown_cursor_counts_as_none, (b"x",)),
    "all changes are reported": Planted(ReportsEverything, C.test_changes_to_unwatched_keys_are_not_reported),
}


class MemoryContract(MemoryBackend, StoreContract):
    """Named so that pytest does not collect it."""


class FileContract(FileBackend, StoreContract):
    """Named so that pytest does not collect it."""


def is_in_memory(open_store: object) -> bool:
    return isinstance(open_store, type) and issubclass(open_store, MemoryStore)


def backend_for(open_store: Callable[..., Store], path: Path) -> Backend:
    """The backend of the sound store, but it opens the broken one."""
    if is_in_memory(open_store):
        memory = MemoryContract()
        memory.open_store = open_store  # type: ignore[method-assign, assignment]
        return memory
    files = FileContract()
    files.path = path
    files.open_path = open_store
    return files


def run(planted: Planted, path: Path) -> None:
    """Run the contract test once on a new store."""
    backend = backend_for(planted.store, path)
    store = backend.open_store()
    try:
        planted.test(backend, store, *planted.arguments)
    finally:
        store.close()


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(scratch: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    monkeypatch.setattr(contract_streams, "PATIENCE", 0.2)
    planted = PLANTED[bug]
    for attempt in range(planted.attempts):
        try:
            run(planted, scratch / str(attempt))
        except (Exception, pytest.fail.Exception):
            return
    raise AssertionError(f"the contract test passed, attempts: {planted.attempts}")


@pytest.mark.parametrize("bug", PLANTED)
def test_a_store_without_the_bug_passes(scratch: Path, bug: str) -> None:
    planted = PLANTED[bug]
    run(planted._replace(store=MemoryStore if is_in_memory(planted.store) else FileStore), scratch / "store")


@pytest.mark.parametrize("broken", [LosesRecords, OverwritesOnCreate, IgnoresPositions, ScansInReverse])
def test_the_comparison_with_the_model_finds_the_bug_too(broken: type[MemoryStore]) -> None:
    def fresh() -> StoreSubject:
        store = broken()
        return StoreSubject(store, lambda: store)

    with pytest.raises((AssertionError, Failure)):
        run_state_machine(fresh, examples=300, shrink=False)


def test_the_contract_has_every_part_and_hides_no_test() -> None:
    """Nothing else would notice a part that is left out, or a test that another of the same name hides."""
    parts = [
        part
        for part in StoreContract.__mro__
        if part.__module__.startswith("holdfast.testing.") and part is not StoreContract
    ]
    names = [name for part in parts for name in vars(part) if name.startswith("test_")]

    assert len(parts) == 8  # with the backend
    assert len(names) == len(set(names)) > 50
