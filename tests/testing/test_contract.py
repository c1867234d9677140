"""The contract finds what breaks it: stores with one planted bug each, and the test that must catch it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from holdfast.errors import Corrupt, Failure, LockConflict, OutcomeUnknown
from holdfast.store.files import FileStore
from holdfast.store.layout import Location, OpenDirectories
from holdfast.store.memory import MemoryStore, MemoryWatch
from holdfast.store.model import (
    Append,
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
from tests.store.test_file_store import FileBackend, WithoutLocks, WithoutLookingAtIntents
from tests.store.test_memory_store import MemoryBackend

# --- Stores that are almost right ------------------------------------------------------------------


class ByHalves(FileStore):
    """Makes the changes of a commit one after the other."""

    def _commit(
        self, commit_id: str, planned: list[Planned], opened: OpenDirectories, progress: object
    ) -> tuple[int, ...]:
        return tuple(each for step in planned for each in self._commit_one(step, opened))


class ChecksOnlyWhatItWrites(MemoryStore):
    """Decides on what was there a moment ago, and looks again only at what it changes."""

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
    """Reads documents one by one and calls that together."""

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        return View({key: self.read(key) for key in keys})


class TriesAgain(FileStore):
    """Makes a commit once more when it is not known whether it was made."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        try:
            return super().transact(keys, decide, commit_id=commit_id)
        except OutcomeUnknown:
            return super().transact(keys, decide)


class SaysYes(FileStore):
    """Reports a commit that failed as made."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        try:
            return super().transact(keys, decide, commit_id=commit_id)
        except Failure:
            return Commit("", 0.0, (), None)  # type: ignore[arg-type]


class StartsOverWhenDamaged(FileStore):
    """Takes a document that cannot be read for one that is not there."""

    def _document(self, key: Key[Record], location: Location, content: bytes | None) -> Document[Record] | None:
        try:
            return super()._document(key, location, content)
        except Corrupt:
            return None


class LosesOneOfTwo(MemoryStore):
    """Keeps one of several records that are appended together."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        def forgetful(view: View, now: float) -> Decision[Result]:
            changes, result = decide(view, now)
            appends = [each for each in changes if isinstance(each, Append)]
            return Decision([each for each in changes if each not in appends[1:]], result)

        return super().transact(keys, forgetful, commit_id=commit_id)


class CreatesOver(MemoryStore):
    """Replaces what is there when it is to create."""

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


class NamesForItself(MemoryStore):
    """Allows changes of what was not named."""

    def transact(self, keys: Any, decide: Decide[Result], *, commit_id: str | None = None) -> Commit[Result]:
        return super().transact([*keys, INDEX, EVENTS, *_ALL], decide, commit_id=commit_id)


_ALL: list[Any] = [Key("jit/gates", INDEX.codec), Stream("jvs/audit", EVENTS.codec)]


class OneVersion(MemoryStore):
    """Gives every state the same version."""

    def read(self, key: Key[Record]) -> Document[Record] | None:
        document = super().read(key)
        return None if document is None else document._replace(version="1")


class OutOfOrder(MemoryStore):
    """Scans in no particular order."""

    def scan(self, family: Family[Record]) -> Iterator[tuple[str, Document[Record]]]:
        return iter(list(super().scan(family))[::-1])


class FromTheBeginning(MemoryStore):
    """Reads a stream from its beginning whatever the position."""

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        return super().entries(stream)


class ListensLate(MemoryStore):
    """Begins to watch at the first wait."""

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


class TellsAll(MemoryStore):
    """Reports every change to every watch."""

    def watch(self, what: Watched) -> MemoryWatch:
        watch = super().watch(what)
        watch._matches = lambda name: True  # type: ignore[method-assign]
        return watch


# --- And what must catch them ----------------------------------------------------------------------


class Planted(NamedTuple):
    """A store with a bug, and a test of the contract that it must fail. Races may need several attempts."""

    store: Callable[..., Store]
    test: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    attempts: int = 1


C = StoreContract
RACES = 20

PLANTED: dict[str, Planted] = {
    "a commit by halves is seen": Planted(ByHalves, C.test_what_was_seen_in_one_document_is_seen_in_all, (), RACES),
    "a commit by halves is left": Planted(
        ByHalves,
        C.test_what_is_said_agrees_with_what_is_seen_and_nothing_happens_twice,
        ("after", "two documents"),
    ),
    "updates are lost without locks": Planted(WithoutLocks, C.test_threads_that_count_lose_nothing, (), RACES),
    "records are lost without locks": Planted(WithoutLocks, C.test_threads_that_append_lose_nothing, (EVENTS,), RACES),
    "several win without locks": Planted(WithoutLocks, C.test_one_thread_wins_each_swap, (), RACES),
    "readers do not look at intents": Planted(
        WithoutLookingAtIntents, C.test_what_was_seen_in_one_document_is_seen_in_all, (), RACES
    ),
    "write skew": Planted(
        ChecksOnlyWhatItWrites,
        C.test_a_constraint_on_two_documents_holds_although_each_transaction_changes_one,
        (),
        RACES,
    ),
    "what is read together is not": Planted(ReadsOneByOne, C.test_what_is_read_together_is_of_one_moment, (5,), RACES),
    "a lost answer makes it happen twice": Planted(
        TriesAgain,
        C.test_what_is_said_agrees_with_what_is_seen_and_nothing_happens_twice,
        ("after", "two documents"),
    ),
    "a lost answer is taken for a yes": Planted(
        SaysYes,
        C.test_what_is_said_agrees_with_what_is_seen_and_nothing_happens_twice,
        ("before", "one document"),
    ),
    "damage is taken for absence": Planted(
        StartsOverWhenDamaged,
        C.test_a_damaged_document_is_reported_with_its_place_and_not_overwritten,
        ("not JSON",),
    ),
    "one of two records is lost": Planted(LosesOneOfTwo, C.test_several_records_are_appended_together_in_order),
    "create replaces": Planted(
        CreatesOver,
        C.test_a_change_that_does_not_fit_is_refused_and_nothing_is_changed,
        ("create what is there",),
    ),
    "what was not named is changed": Planted(
        NamesForItself,
        C.test_a_change_that_does_not_fit_is_refused_and_nothing_is_changed,
        ("a document that was not named",),
    ),
    "all versions are one": Planted(OneVersion, C.test_another_record_has_another_version),
    "scans have no order": Planted(OutOfOrder, C.test_a_scan_gives_the_members_of_its_family_in_order),
    "positions are ignored": Planted(FromTheBeginning, C.test_reading_goes_on_behind_any_position, (EVENTS,)),
    "changes before the wait are missed": Planted(
        ListensLate, C.test_a_change_by_another_client_is_reported, ("a family",)
    ),
    "all changes are reported": Planted(TellsAll, C.test_what_is_not_watched_is_not_reported),
}


class MemoryContract(MemoryBackend, StoreContract):
    """Not for pytest to find."""


class FileContract(FileBackend, StoreContract):
    """Not for pytest to find."""


def is_in_memory(open_store: object) -> bool:
    return isinstance(open_store, type) and issubclass(open_store, MemoryStore)


def backend_for(open_store: Callable[..., Store], path: Path) -> Backend:
    """The backend of the store that was broken, with the broken one in its place."""
    if is_in_memory(open_store):
        memory = MemoryContract()
        memory.open_store = open_store  # type: ignore[method-assign, assignment]
        return memory
    files = FileContract()
    files.path = path
    files.open_path = open_store
    return files


def run(planted: Planted, path: Path) -> None:
    """Run the test of the contract on the store once."""
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
    raise AssertionError(f"the test passes, {planted.attempts} times")


@pytest.mark.parametrize("bug", PLANTED)
def test_a_store_without_the_bug_passes(scratch: Path, bug: str) -> None:
    planted = PLANTED[bug]
    run(planted._replace(store=MemoryStore if is_in_memory(planted.store) else FileStore), scratch / "store")


@pytest.mark.parametrize("broken", [LosesOneOfTwo, CreatesOver, FromTheBeginning, OutOfOrder])
def test_the_comparison_with_the_model_finds_it_too(broken: type[MemoryStore]) -> None:
    def fresh() -> StoreSubject:
        store = broken()
        return StoreSubject(store, lambda: store)

    with pytest.raises((AssertionError, Failure)):
        run_state_machine(fresh, examples=300, shrink=False)


def test_a_member_of_the_contract_for_each_promise_is_there() -> None:
    """A part that is left out of the contract, or a test that another one hides, would not be missed."""
    parts = [
        part
        for part in StoreContract.__mro__
        if part.__module__.startswith("holdfast.testing.") and part is not StoreContract
    ]
    names = [name for part in parts for name in vars(part) if name.startswith("test_")]

    assert len(parts) == 7  # with the backend
    assert len(names) == len(set(names)) > 50
