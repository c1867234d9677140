"""Appending, claiming and reaping, killed at every call: no event is torn, and the next writer continues.

The state after a kill is judged by the files, as any program sees them. Then another writer appends, which
finishes a decided commit; after that, the id of the event tells whether it was written.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Failure, OutcomeUnknown
from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory
from holdfast.ledger.log import EVENTS, Ledger
from holdfast.ledger.projection import ACQUIRED, REAPED
from holdfast.locks import lock_file
from holdfast.store import intents
from holdfast.store.files import FileStore
from proof.crash import Attempt, Outcome, error_points, interposed, kill_points, mark
from proof.effort import SHARE
from proof.powercut import power_cuts
from tests.ledger.ledgers import acquired, append_raw, close_all, event_files, open_claims, open_ledger
from tests.store.commit_operations import determined
from tests.store.commit_scenarios import break_torn_lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork, and directories to sync")

CLOCK = ManualClock()
WARM = 2
"""The number of events before the operation."""


class Appending:
    """Append one event, or several at once."""

    def __init__(self, count: int) -> None:
        self.count = count

    def prepare(self, directory: Path) -> None:
        with FileStore(directory, clock=CLOCK) as store:
            for number in range(WARM):
                Ledger(store).append({"type": "old", "id": f"old-{number}"})

    def operate(self, directory: Path) -> None:
        with determined("writer"), FileStore(directory, clock=CLOCK, timeout=1.0) as store:
            self._append(Ledger(store))

    def _append(self, ledger: Ledger) -> None:
        made = [{"type": "new", "id": f"new-{number}"} for number in range(self.count)]
        if self.count == 1:
            ledger.append(made[0])
        else:
            ledger.append_many(made)

    def check(self, directory: Path, outcome: Outcome) -> None:
        no_torn_events(directory)
        with FileStore(directory, clock=CLOCK, timeout=1.0) as store:
            self._check(Ledger(store), directory, outcome)

    def _check(self, ledger: Ledger, directory: Path, outcome: Outcome) -> None:
        seen = [each.event["id"] for each in ledger.events()]
        new = [each for each in seen if each.startswith("new")]
        assert len(new) in (0, self.count), f"readers see {len(new)} of {self.count}"
        break_torn_lock(directory)
        ledger.append({"type": "next", "id": "next"})
        whole = [f"old-{number}" for number in range(WARM)]
        made = [f"new-{number}" for number in range(self.count)]
        found = [each.event["id"] for each in ledger.events()]
        assert found in ([*whole, "next"], [*whole, *made, "next"]), found
        was_made = ledger.find("new-0") is not None
        assert was_made or not outcome.acknowledged, "an acknowledged event is lost"
        assert was_made == bool(new) or not new, "an event that readers saw is lost"
        assert not (was_made and _is_refusal(outcome.error)), "a refused event was written"
        names = [path.name for path in event_files(directory)]
        assert names == [f"event-{number:06d}.json" for number in range(1, len(found) + 1)]


class AppendingOften(Appending):
    """Append as a process that has appended before: it keeps a private lock file, and publishes by renaming."""

    def __init__(self) -> None:
        super().__init__(1)

    def _append(self, ledger: Ledger) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lock_file, "KEPT_FROM", 0)
            assert isinstance(ledger.store, FileStore)
            ledger.store._numbers.remember(ledger.store._locate(EVENTS), WARM)
            super()._append(ledger)


class AppendingAtOnce(Appending):
    """Append several events that are synced all at once, as large batches are."""

    def __init__(self) -> None:
        super().__init__(3)

    def _append(self, ledger: Ledger) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(intents, "MOST_SINGLE_SYNCS", 1)
            super()._append(ledger)


class AppendingInTurns(Appending):
    """Append an event, and another one by a writer that gets the lock before the name of the first event is synced."""

    def __init__(self) -> None:
        super().__init__(1)

    def _append(self, ledger: Ledger) -> None:
        acknowledge = FileStore._acknowledge

        def overtaken(store: FileStore, *rest: Any) -> None:
            if store is ledger.store:
                with FileStore(store.path, clock=CLOCK, timeout=1.0) as other:
                    other._settled.add("ledger")  # it has been at work for a while
                    Ledger(other).append({"type": "new", "id": "new-1"})
                mark("the second event is acknowledged")
            acknowledge(store, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileStore, "_may_sync_later", lambda self, location: True)
            patch.setattr(FileStore, "_acknowledge", overtaken)
            super()._append(ledger)

    def _check(self, ledger: Ledger, directory: Path, outcome: Outcome) -> None:
        break_torn_lock(directory)
        ledger.append({"type": "next", "id": "next"})
        found = [each.event["id"] for each in ledger.events()]
        made = found[WARM:-1]
        assert made == ["new-0", "new-1"][: len(made)], found
        assert not outcome.marks or len(made) == 2, "an acknowledged event is lost"
        names = [path.name for path in event_files(directory)]
        assert names == [f"event-{number:06d}.json" for number in range(1, len(found) + 1)]


class Claiming(Appending):
    """Claim a node whose old claim has expired: two events, one after the other."""

    def __init__(self) -> None:
        super().__init__(1)

    def prepare(self, directory: Path) -> None:
        ledger = open_ledger(directory, clock=CLOCK)
        append_raw(ledger, {**acquired("1", "gone", expires_in=-5, at=CLOCK.wall()), "id": "old"})

    def operate(self, directory: Path) -> None:
        open_claims(directory, clock=CLOCK, files=True).claim("1", "new", ttl=60)

    def check(self, directory: Path, outcome: Outcome) -> None:
        no_torn_events(directory)
        break_torn_lock(directory)
        claims = open_claims(directory, clock=CLOCK, files=True)
        if outcome.acknowledged:
            assert [each.owner for each in claims.active()] == ["new"]
        holder = [each.owner for each in claims.active()]
        assert holder in ([], ["new"])
        if holder:
            claims.release("1", "new")
        assert claims.claim("1", "next", ttl=60).owner == "next"
        kinds = [each.event["type"] for each in claims.ledger.events()]
        assert kinds.count(REAPED) == 1
        assert kinds[:3] == [ACQUIRED, REAPED, ACQUIRED]
        said = json.loads((directory / "locks/1.lock").read_bytes())
        assert said["owner"] == "next"
        close_all()


class Reaping(Claiming):
    """Reap the expired claim."""

    def operate(self, directory: Path) -> None:
        open_claims(directory, clock=CLOCK, files=True).reap()

    def check(self, directory: Path, outcome: Outcome) -> None:
        no_torn_events(directory)
        break_torn_lock(directory)
        claims = open_claims(directory, clock=CLOCK, files=True)
        claims.reap()
        kinds = [each.event["type"] for each in claims.ledger.events()]
        assert kinds == [ACQUIRED, REAPED]
        assert not (directory / "locks/1.lock").exists()
        close_all()


def no_torn_events(directory: Path) -> None:
    """Check the files alone, as a program unaware of Holdfast would."""
    for path in event_files(directory):
        assert isinstance(json.loads(path.read_bytes()), dict)


def _is_refusal(error: Exception | None) -> bool:
    return isinstance(error, Failure) and not isinstance(error, OutcomeUnknown)


@pytest.mark.req("LG-05", "LG-16")
@pytest.mark.parametrize(
    "scenario",
    [Appending(1), Appending(3), AppendingAtOnce(), AppendingOften()],
    ids=["one", "several", "at once", "often"],
)
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_of_appending_leaves_all_or_nothing(scenario: Appending) -> None:
    kill_points(scenario, share=SHARE).require_clean(at_least=60)


@pytest.mark.req("LG-16", "LG-17")
@pytest.mark.parametrize("scenario", [Claiming(), Reaping()], ids=["ledger", "reap"])
@pytest.mark.sampled(1)
def test_a_kill_at_any_call_of_claiming_or_reaping_leaves_a_claim_or_none(scenario: Claiming) -> None:
    kill_points(scenario, share=SHARE).require_clean(at_least=60)


@pytest.mark.req("LG-16")
def test_an_error_at_any_call_of_appending_is_reported_and_leaves_all_or_nothing() -> None:
    report = error_points(Appending(1), (errno.EIO,), lasting=(errno.ENOSPC,), descriptors=False, share=SHARE)
    report.require_clean(at_least=60)


@pytest.mark.req("LG-16")
@pytest.mark.parametrize(
    "scenario",
    [Appending(1), Appending(3), AppendingAtOnce(), AppendingOften()],
    ids=["one", "several", "at once", "often"],
)
def test_a_power_cut_at_any_call_of_appending_leaves_all_or_nothing(scenario: Appending) -> None:
    power_cuts(scenario, share=SHARE).require_clean(at_least=20)


@pytest.mark.req("LG-16")
def test_a_power_cut_between_writers_in_turns_loses_no_acknowledged_event_if_names_keep_their_order() -> None:
    scenario = AppendingInTurns()
    power_cuts(scenario, share=SHARE, in_order=True).require_clean(at_least=20)
    without = power_cuts(scenario, enough=1)
    assert without.violations, "the scenario does not show why the order is needed"


@pytest.mark.sampled(1)
def test_a_kill_of_a_writer_that_has_not_synced_its_name_leaves_all_or_nothing() -> None:
    kill_points(AppendingInTurns(), share=SHARE).require_clean(at_least=60)


class AcknowledgedUnsynced(AppendingInTurns):
    """Planted bug: writers acknowledge without their own sync, because the other will sync too."""

    def _append(self, ledger: Ledger) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileStore, "_acknowledge", lambda *rest: None)
            super()._append(ledger)


class DraftUnsynced(Appending):
    """Planted bug: the draft that is written before the lock is taken is not synced."""

    def __init__(self) -> None:
        super().__init__(1)

    def _append(self, ledger: Ledger) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "write_draft", partial(durable.write_draft, durable=False))
            super()._append(ledger)


@pytest.mark.parametrize("bug", [AcknowledgedUnsynced(), DraftUnsynced()], ids=["acknowledged", "draft"])
def test_a_sync_that_is_missing_is_found(bug: Appending) -> None:
    assert power_cuts(bug, in_order=True, enough=1).violations


class PublishedTorn(Appending):
    """Planted bug: the event is written directly under its final name."""

    def __init__(self) -> None:
        super().__init__(1)

    def operate(self, directory: Path) -> None:
        real = durable.publish_new

        def at_once(opened: Directory, draft: str, name: str, **options: Any) -> None:
            if not name.startswith("event-"):
                real(opened, draft, name, **options)
                return
            fd = calls.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=opened.fd)
            calls.write(fd, b'{"type":')
            calls.close(fd)
            calls.replace(draft, name, src_dir_fd=options["drafts"].fd, dst_dir_fd=opened.fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(durable, "publish_new", at_once)
            super().operate(directory)


def test_a_torn_event_is_found() -> None:
    assert kill_points(PublishedTorn(), names=("write",)).violations


# --- A lock that is broken although its holder is alive -----------------------------------------------------


class _Break:
    """Breaks `ledger.lock` and appends just before an event is published."""

    def __init__(self, root: Path, act: Any) -> None:
        self.root, self.act, self.done = root, act, False

    def __call__(self, attempt: Attempt) -> Any:
        if "event-" in str(attempt.arguments[1]) and not self.done:
            self.done = True
            (self.root / "ledger/ledger.lock").unlink()
            (self.root / "ledger/.ledger.lock.turnstile").unlink()
            self.act()
        return attempt.perform()


def _interloper(root: Path) -> Ledger:
    return open_ledger(root, timeout=5.0)


def break_before_publishing(root: Path, act: Any) -> Any:
    return interposed(_Break(root, act), ("link", "rename_noreplace"))


@pytest.mark.req("LG-05", "LG-11", "LG-17")
def test_a_wrongly_broken_lock_loses_no_event(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    ledger.append({"type": "old"})
    with break_before_publishing(scratch, lambda: _interloper(scratch).append({"type": "interloper"})):
        made = ledger.append({"type": "mine"})
    assert made.sequence == 3
    assert [each.event["type"] for each in ledger.events()] == ["old", "interloper", "mine"]
    assert not (scratch / "ledger/ledger.lock").exists()


@pytest.mark.req("LG-05", "LG-11")
def test_a_wrongly_broken_lock_does_not_break_compare_and_swap(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    ledger.append({"type": "old"})
    with (
        break_before_publishing(scratch, lambda: _interloper(scratch).append({"type": "interloper"})),
        pytest.raises(Failure, match="sequence mismatch"),
    ):
        ledger.append_if_sequence({"type": "mine"}, 1)
    assert [each.event["type"] for each in ledger.events()] == ["old", "interloper"]


@pytest.mark.req("LG-05", "LG-15", "LG-17")
def test_a_wrongly_broken_lock_does_not_give_a_node_to_two_owners(scratch: Path) -> None:
    claims = open_claims(scratch)
    with (
        break_before_publishing(scratch, lambda: open_claims(scratch).claim("1", "interloper")),
        pytest.raises(Failure, match="node already locked"),
    ):
        claims.claim("1", "mine")
    assert [each.owner for each in claims.active()] == ["interloper"]


@pytest.mark.req("LG-05")
def test_a_wrongly_broken_lock_loses_no_event_of_a_batch(scratch: Path) -> None:
    ledger = open_ledger(scratch)
    with break_before_publishing(scratch, lambda: _put_foreign_event(scratch, 2)):
        made = ledger.append_many([{"type": "part", "id": f"part-{number}"} for number in range(3)])
    assert len(made) == 3
    ids = [each.event.get("id") for each in ledger.events()]
    assert sorted(str(each) for each in ids) == ["None", "part-0", "part-1", "part-2"]
    assert ids[1] is None
    assert [ids[each.sequence - 1] for each in made] == ["part-0", "part-1", "part-2"]


def _put_foreign_event(root: Path, number: int) -> None:
    (root / f"ledger/event-{number:06d}.json").write_bytes(b'{"type":"stranger"}\n')


# --- A reader in progress while a batch is published ---------------------------------------------------


class _Meet:
    """Lets a reader continue just before the event with this number is published."""

    def __init__(self, number: int, act: Any) -> None:
        self.name, self.act = f"event-{number:06d}.json", act

    def __call__(self, attempt: Attempt) -> Any:
        if attempt.arguments[1] == self.name:
            self.act()
        return attempt.perform()


@pytest.mark.req("LG-13", "LG-17")
@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_reader_that_began_before_a_batch_sees_nothing_of_it_until_it_is_whole(scratch: Path, number: int) -> None:
    open_ledger(scratch).append({"type": "old"})
    ledger = open_ledger(scratch)
    reader = iter(ledger.events())
    next(reader)
    seen: list[str] = []
    meet = _Meet(number, lambda: seen.extend(each.event["type"] for each in reader))
    with interposed(meet, ("rename_noreplace",)):
        open_ledger(scratch).append_many([{"type": f"part {each}"} for each in range(3)])
    assert seen == []
    assert [each.event["type"] for each in ledger.events(after=1)] == ["part 0", "part 1", "part 2"]
