"""The crash sweeps find planted bugs in the commits of the file store."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.store import files, intents, lines, recovery, streams
from holdfast.store.files import FileStore
from holdfast.store.intents import Intent, Intents
from holdfast.store.layout import INTENTS, Location, OpenDirectories
from holdfast.store.streams import Batch, LastNumbers, Planned, in_order
from proof.crash import Fault, Report, error_points, kill_points
from proof.powercut import power_cuts
from tests.store.commit_cases import ALL
from tests.store.commit_operations import restoring, touching
from tests.store.commit_scenarios import after_deaths, after_faults, death_points

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, and directories that can be synced")

Plant = Callable[[pytest.MonkeyPatch], None]
Sweep = Callable[[], Report]


# --- The sweeps --------------------------------------------------------------------------------------


def cutting(name: str) -> Sweep:
    return lambda: power_cuts(ALL[name])


def dying(name: str) -> Sweep:
    return lambda: death_points(ALL[name])


def killing(name: str) -> Sweep:
    return lambda: kill_points(ALL[name])


def erring(name: str) -> Sweep:
    return lambda: error_points(ALL[name], (errno.EIO,), lasting=())


def following(name: str, *, warm: bool = False, everything: bool = False) -> Sweep:
    """A death, then a change of one thing or of everything, then a power cut."""
    case = ALL[name]
    second = touching(case.named if everything else case.operation.named[:1])
    return lambda: after_deaths(case, second, set(), warm=warm)


def undoing(name: str) -> Sweep:
    case = ALL[name]
    return lambda: after_deaths(case, restoring(case.old, case.named), set())


def failing(name: str) -> Sweep:
    case = ALL[name]
    return lambda: after_faults(case, touching(case.operation.named[:1]), Fault(errno.EIO), set())


# --- The bugs ----------------------------------------------------------------------------------------


def draft_without_fsync(plant: pytest.MonkeyPatch) -> None:
    write_draft = durable.write_draft

    def write(directory: Directory, name: str, content: bytes, **options: Any) -> str:
        return write_draft(directory, name, content, **{**options, "durable": False})

    plant.setattr(durable, "write_draft", write)


def no_directory_sync(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(durable, "sync_names", lambda directory, name="": None)


def rename_before_sync(plant: pytest.MonkeyPatch) -> None:
    def replace(directory: Directory, name: str, content: bytes, *, mode: int = 0o666) -> None:
        draft = durable.write_draft(directory, name, content, mode=mode, durable=False)
        durable.publish(directory, draft, name)
        durable.sync_in(directory, name)
        durable.sync_names(directory, name)

    plant.setattr(durable, "replace_in", replace)


def intent_dropped_before_it_is_applied(plant: pytest.MonkeyPatch) -> None:
    apply, drop = Intents.apply, Intents.drop

    def dropping_first(self: Intents, intent: Intent, opened: OpenDirectories, loose: Collection[str]) -> list[int]:
        drop(self, intent)
        return apply(self, intent, opened, loose)

    def drop_if_pending(self: Intents, intent: Intent, *, keep: bool = False) -> None:
        if intent in self.pending():
            drop(self, intent, keep=keep)

    plant.setattr(Intents, "drop", drop_if_pending)  # recovery still drops it
    plant.setattr(Intents, "apply", dropping_first)


def intent_not_dropped_durably(plant: pytest.MonkeyPatch) -> None:
    def drop(self: Intents, intent: Intent, *, keep: bool = False) -> None:
        with self._root.beneath(INTENTS) as directory:
            durable.remove_in(directory, f"{intent.id}.json", durable=False)

    plant.setattr(Intents, "drop", drop)


def intent_dropped_without_a_mark(plant: pytest.MonkeyPatch) -> None:
    """Durably, but before that, another process sees no intent and does not wait for the removal."""

    def drop(self: Intents, intent: Intent, *, keep: bool = False) -> None:
        with self._root.beneath(INTENTS) as directory:
            durable.remove_in(directory, f"{intent.id}.json")

    plant.setattr(Intents, "drop", drop)


def pointers_before_documents(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(streams, "in_order", lambda planned: in_order(planned)[::-1])


def names_synced_only_at_the_end(plant: pytest.MonkeyPatch) -> None:
    def publish(preparing: Iterable[intents.Prepared]) -> list[object]:
        prepared = list(preparing)
        results = [each.publish() for each in prepared]
        for directory in {id(each.directory): each.directory for each in prepared}.values():
            if directory is not None:
                durable.sync_names(directory)
        return results

    plant.setattr(intents, "publish_all", publish)
    plant.setattr(recovery, "publish_all", publish)


def readers_ignore_intents(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Intents, "pending_steps", lambda self, name: [])
    plant.setattr(Intents, "pending_members", lambda self, family: {})


def several_changes_without_an_intent(plant: pytest.MonkeyPatch) -> None:
    def commit(self: FileStore, attempt: files._Attempt, planned: list[Planned]) -> tuple[int, ...]:
        return tuple(each for step in in_order(planned) for each in self._commit_one(step, attempt.opened))

    plant.setattr(FileStore, "_commit", commit)


def append_after_a_torn_tail(plant: pytest.MonkeyPatch) -> None:
    def append(directory: Directory, name: str, record: bytes, **options: Any) -> None:
        fd = calls.open(directory.at(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666, dir_fd=directory.fd)
        calls.write(fd, record + b"\n")
        calls.fsync(fd)
        calls.close(fd)

    plant.setattr(durable, "append_in", append)


def unfinished_intents_ignored(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(FileStore, "_unfinished", lambda self, listed, named: [])
    plant.setattr(FileStore, "_finish_abandoned", lambda self, listed: None)


def intent_finished_before_it_is_durable(plant: pytest.MonkeyPatch) -> None:
    def needs_applying(self: Intents, intent: Intent) -> bool:
        with self._root.beneath(INTENTS) as directory:
            pending = directory.status(f"{intent.id}.json") is not None
            durable.remove_in(directory, f"{intent.id}.done", durable=False)
        return pending

    plant.setattr(Intents, "needs_applying", needs_applying)


def settled_only_once(plant: pytest.MonkeyPatch) -> None:
    def settle(self: FileStore, places: Collection[Location], changed: list[Location]) -> None:
        written = {each.directory for each in changed} | ({INTENTS} if len(changed) > 1 else set())
        for directory in written - self._settled:
            self._sync_path_to(directory)
            self._settled.add(directory)

    plant.setattr(FileStore, "_settle", settle)


def numbers_of_other_processes_not_settled(plant: pytest.MonkeyPatch) -> None:
    find = LastNumbers.find_exactly
    plant.setattr(FileStore, "_last_number", lambda self, place, directory: find(self._numbers, directory, place, None))


def record_acknowledged_before_its_name_is_durable(plant: pytest.MonkeyPatch) -> None:
    sync = durable.sync_names
    plant.setattr(
        durable, "sync_names", lambda directory, name="": None if name.startswith("event-") else sync(directory, name)
    )


def lines_not_settled(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(durable, "sync_in", lambda directory, name: None)


def lines_of_dead_processes_not_synced(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(lines, "_overwrite", lambda directory, place, at, content: None)


def late_lines_not_synced(plant: pytest.MonkeyPatch) -> None:
    append = durable.append_in

    def append_unsynced(directory: Directory, name: str, *records: bytes, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "fsync", lambda fd: None)
            append(directory, name, *records, **options)

    plant.setattr(durable, "append_in", append_unsynced)


def readers_do_not_wait_for_lines(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(FileStore, "_await_lines", lambda self, stream, location: [])


def truncation_of_a_line_not_durable(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(durable, "_cut_back", lambda fd, end, where: calls.ftruncate(fd, end))


def error_after_the_commit_point_reported_as_failure(plant: pytest.MonkeyPatch) -> None:
    class Unaware(files._Attempt):
        perhaps_made = property(lambda self: False, lambda self, value: None)

    plant.setattr(files, "_Attempt", Unaware)


def drafts_left_by_a_failed_commit(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Intents, "discard_drafts", lambda self, intent, opened: None)


def early_drafts_left(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(FileStore, "_discard_early", lambda self, locations, early: None)


def batch_published_before_its_intent_is_durable(plant: pytest.MonkeyPatch) -> None:
    """The name of the intent is not durable yet when the first records get their numbers."""

    def publish(self: Batch) -> None:
        durable.publish_new(self._intents, self._draft_of_intent, intents.intent_name(self.intent.id))

    plant.setattr(Batch, "publish_intent", publish)


def batch_decided_before_its_drafts_are_durable(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(intents, "MOST_SINGLE_SYNCS", 1)
    plant.setattr(streams, "_sync_file_system", lambda directory: None)


def batch_dropped_before_its_names_are_durable(plant: pytest.MonkeyPatch) -> None:
    apply = Batch.apply

    def dropping_first(self: Batch) -> list[int]:
        durable.remove_in(self._intents, intents.intent_name(self.intent.id))
        return apply(self)

    plant.setattr(Batch, "apply", dropping_first)


def batch_without_its_last_sync(plant: pytest.MonkeyPatch) -> None:
    sync_names = durable.sync_names
    plant.setattr(durable, "sync_names", lambda directory, name="": sync_names(directory, name) if name else None)


def batch_leaves_its_drafts(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Batch, "_discard", lambda self: None)


PLANTED: list[tuple[Plant, Sweep, str]] = [
    (draft_without_fsync, cutting("replace"), "Corrupt"),
    (draft_without_fsync, cutting("transfer"), "Corrupt"),
    (draft_without_fsync, cutting("append to the ledger"), "Corrupt"),
    (draft_without_fsync, cutting("append blindly"), "Corrupt"),
    (record_acknowledged_before_its_name_is_durable, cutting("append blindly"), "ledger/events"),
    (early_drafts_left, erring("append blindly"), "left ['.event-"),
    (no_directory_sync, cutting("create"), "jit/issues/b is None"),
    (no_directory_sync, cutting("create an issue"), "jit/issues/b is None"),
    (rename_before_sync, cutting("replace"), "Corrupt"),
    (intent_dropped_before_it_is_applied, dying("transfer"), "jvs/refs/alice"),
    (intent_dropped_before_it_is_applied, killing("transfer"), "jvs/refs/alice"),
    (intent_not_dropped_durably, undoing("replace and tell"), "jit/gates"),
    (intent_dropped_without_a_mark, undoing("replace and tell"), "jit/gates"),
    (pointers_before_documents, dying("create an issue"), "the index lists b, which is not there"),
    (pointers_before_documents, killing("delete an issue"), "the index lists a, which is not there"),
    (names_synced_only_at_the_end, cutting("create an issue"), "the index lists b, which is not there"),
    (readers_ignore_intents, dying("transfer"), "jvs/refs/alice"),
    (several_changes_without_an_intent, dying("transfer"), "jvs/refs/alice"),
    (several_changes_without_an_intent, cutting("create an issue"), "jit/"),
    (append_after_a_torn_tail, dying("append a line"), "jit/events"),
    (unfinished_intents_ignored, dying("transfer"), "still to be finished"),
    (intent_finished_before_it_is_durable, following("transfer"), "jvs/refs/alice"),
    (numbers_of_other_processes_not_settled, following("append blindly", warm=True), "ledger/events"),
    (settled_only_once, following("create", warm=True, everything=True), "jit/issues/a"),
    (numbers_of_other_processes_not_settled, following("append to the ledger", warm=True), "ledger/events"),
    (lines_not_settled, following("append a line", everything=True), "jit/events"),
    (lines_of_dead_processes_not_synced, following("create an issue"), "jit/events"),
    (late_lines_not_synced, cutting("update and tell"), "jit/events"),
    (readers_do_not_wait_for_lines, dying("update and tell"), "jit/events"),
    (truncation_of_a_line_not_durable, failing("append a line"), "jit/events"),
    (error_after_the_commit_point_reported_as_failure, erring("append to the ledger"), "ledger/events"),
    (drafts_left_by_a_failed_commit, erring("transfer"), "left ['.alice.json-"),
    (batch_published_before_its_intent_is_durable, cutting("append two to the ledger"), "ledger/events"),
    (batch_decided_before_its_drafts_are_durable, cutting("append two to the ledger"), "Corrupt"),
    (batch_dropped_before_its_names_are_durable, dying("append two to the ledger"), "ledger/events"),
    (batch_without_its_last_sync, cutting("append two to the ledger"), "ledger/events"),
    (batch_leaves_its_drafts, erring("append two to the ledger"), "left ['.event-"),
]


@pytest.mark.parametrize("plant", list(dict.fromkeys(plant for plant, _, _ in PLANTED)))
def test_every_bug_can_be_planted(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)


@pytest.mark.parametrize(
    ("plant", "sweep", "symptom"),
    PLANTED,
    ids=[f"{plant.__name__}-{sweep.__qualname__.partition('.')[0]}" for plant, sweep, _ in PLANTED],
)
@pytest.mark.sampled(1)
def test_a_planted_bug_is_found(plant: Plant, sweep: Sweep, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    problems = [violation.problem for violation in sweep().violations]
    assert any(symptom in problem for problem in problems), f"not among {len(problems)} problems: {problems[:3]}"
