"""A stale holder never publishes: it is stopped or delayed at any call while another process takes over its lease.

A stopped holder resumes as if nothing had happened: by its own clock, its lease is still valid.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.repository import context as proofs
from holdfast.repository import restore, snapshots
from holdfast.repository.context import MAIN, Proof, RepositoryContext, TokenCheck, settled_config
from holdfast.store.model import Decision, View
from proof.effort import SHARE, rounds, until
from proof.interpose import interposed
from tests.locks.workers import Line, Worker, Workers
from tests.repository.repositories import make_repository
from tests.repository.rivals import (
    STEPS,
    Answer,
    Rival,
    Steps,
    delayed_publisher,
    published,
    require_one_line,
    stale_commits,
    thief,
)

pytestmark = [pytest.mark.both_homes, pytest.mark.skipif(sys.platform == "win32", reason="the workers are forked")]

ROUNDS = 1000
STEP = 1 if SHARE == 1 else 12  # between the calls at which a publisher is stopped
REFUSED = ("E_FENCING_MISMATCH", "E_LOCK_EXPIRED")
SHORT = 0.02
"""How long a thief waits for a guard before the test concludes that the stopped process holds it."""


@pytest.fixture
def root(scratch: Path) -> Path:
    """A repository with one snapshot and an unsaved change."""
    repository = make_repository(scratch)
    payload = repository.context.paths.payload(MAIN)
    (payload / "work").write_text("saved")
    rival = Rival(scratch)
    rival.acquire(0)
    assert rival.snapshot().what == "published"
    (payload / "work").write_text("unsaved")
    return scratch


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


def stopping(root: Path, stop_at: int, publish: Callable[[Rival], Answer]) -> Callable[[Line], None]:
    """A worker that publishes once, and stops itself before call number `stop_at`."""

    def work(line: Line) -> None:
        rival = Rival(root)
        assert rival.acquire(1000 * stop_at).what == "acquired"
        with interposed(Steps(stop_at), STEPS):
            answer = publish(rival)
        line.say(answer)

    return work


def stopped_everywhere(root: Path, publish: Callable[[Rival], Answer], *, step: int = 1) -> Iterator[str]:
    """Stop a publisher before each of its calls, let a thief try, resume the publisher; yield each outcome."""
    for stop_at in itertools.count(1, step):
        worker = Worker(stopping(root, stop_at, publish))
        try:
            if not stops(worker):
                return
            taker = Rival(root, timeout=SHORT)
            stolen = taker.acquire(1000 * stop_at + 500).what == "acquired"
            last = taker.snapshot().snapshot_id if stolen else ""
            worker.resume()
            late: Answer = worker.hear()
            if stolen and late.what != "published":
                assert late.what in REFUSED
                assert published(taker.context)[-1] == last
            yield late.what if stolen else f"not stolen, {late.what}"
        finally:
            worker.kill()
            worker.wait()
            worker.line.close()


def stops(worker: Worker) -> bool:
    """Wait until the worker has stopped itself; False if it finished without reaching its stop."""
    if sys.platform == "win32":
        raise NotImplementedError("there is no fork on Windows")
    _, status = os.waitpid(worker.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return True
    worker._status = os.waitstatus_to_exitcode(status)
    assert worker._status == 0
    return False


@pytest.mark.req("LC-17", "LC-18", "LC-29", "LC-30")
def test_a_snapshot_stopped_before_any_call_publishes_nothing_if_its_lease_is_stolen(root: Path) -> None:
    context = Rival(root).context
    outcomes: Counter[str] = Counter()
    for outcome in stopped_everywhere(root, Rival.snapshot):
        outcomes[outcome] += 1
        require_one_line(context)
    assert stale_commits(context) == []
    assert outcomes["E_FENCING_MISMATCH"] >= (8 if SHARE == 1 else 1), outcomes
    if SHARE == 1:
        assert outcomes["published"] >= 1, outcomes  # stopped after the commit point
        assert outcomes["not stolen, published"] >= 1, outcomes  # stopped inside its transaction


@pytest.mark.req("LC-17", "LC-18")
def test_a_restore_in_place_stopped_before_any_call_changes_nothing_if_its_lease_is_stolen(root: Path) -> None:
    context = Rival(root).context
    first = published(context)[0]
    outcomes = Counter(stopped_everywhere(root, lambda rival: rival.restore(first), step=STEP))
    assert stale_commits(context) == []
    require_one_line(context)
    assert outcomes["E_FENCING_MISMATCH"] >= (8 if SHARE == 1 else 1), outcomes


class Duel:
    """Rounds of a randomly delayed publisher against a thief that strikes at a random time."""

    def __init__(self, root: Path, workers: Workers, publish: Callable[[Rival], Answer] = Rival.snapshot) -> None:
        self.context = Rival(root).context
        self.publisher = workers.start(delayed_publisher(root, publish))
        self.thief = workers.start(thief(root))
        self.number = 0

    def round(self) -> tuple[str, str]:
        """The publisher acquires and publishes; meanwhile the thief does the same, with its clock ahead."""
        self.number += 1
        assert self.publisher.ask(1000 * self.number).what == "acquired"
        self.publisher.say("publish")
        thief_answer: Answer = self.thief.ask(1000 * self.number + 500)
        publisher_answer: Answer = self.publisher.hear()
        return publisher_answer.what, thief_answer.what


@pytest.mark.req("LC-17", "LC-18", "LC-30")
def test_a_randomly_delayed_stale_holder_never_publishes(root: Path, workers: Workers) -> None:
    duel = Duel(root, workers)
    outcomes: Counter[tuple[str, str]] = Counter()
    for _ in until(lambda: outcomes["E_FENCING_MISMATCH", "published"], ROUNDS):
        outcomes[duel.round()] += 1
    assert stale_commits(duel.context) == []
    assert set(outcomes) <= {("published", "published"), *((code, "published") for code in REFUSED)}, outcomes
    assert len(published(duel.context)) == 1 + sum(
        count * words.count("published") for words, count in outcomes.items()
    )
    require_one_line(duel.context)


@pytest.mark.req("LC-17", "LC-18")
def test_a_randomly_delayed_stale_holder_never_restores_in_place(root: Path, workers: Workers) -> None:
    first = published(Rival(root).context)[0]
    duel = Duel(root, workers, lambda rival: rival.restore(first))
    outcomes = Counter(duel.round() for _ in range(rounds(50)))
    assert stale_commits(duel.context) == []
    assert {code for code, _ in outcomes} <= {"published", *REFUSED, "E_LOCK_CONFLICT"}, outcomes
    assert {code for _, code in outcomes} == {"published"}
    require_one_line(duel.context)


# --- The detectors ----------------------------------------------------------------------------------


def validate_then_publish(context: RepositoryContext, config: Any, descriptor: Any, proof: Any, tag: Any) -> Any:
    """The planted bug: one transaction checks the lease, and the next one moves the head."""

    check = proofs.token_check(context, MAIN, proof)

    def validate(view: View, now: float) -> Decision[None]:
        check(view, now)
        return Decision([], None)

    context.store.transact(proofs.publishing_keys(MAIN), validate)
    with pytest.MonkeyPatch.context() as patch:
        unchecked = lambda view, now: settled_config(view, MAIN)  # noqa: E731
        patch.setattr(snapshots, "token_check", lambda context, name, proof: unchecked)
        return REAL_PUBLISH(context, config, descriptor, proof, tag)


REAL_PUBLISH = snapshots._publish


def checked_too_early(context: RepositoryContext, worktree: str, proof: Proof | None) -> TokenCheck:
    """The same planted bug in a restore in place: the lease is checked before the transaction, not in it."""
    config = proofs.check_early(context, worktree, proof)
    return lambda view, now: config


@pytest.mark.long
def test_stopping_finds_a_restore_that_validates_before_its_transaction(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "token_check", checked_too_early)
    context = Rival(root).context
    first = published(context)[0]
    assert any(stale_commits(context) for _ in stopped_everywhere(root, lambda rival: rival.restore(first)))


@pytest.fixture
def planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_publish", validate_then_publish)


@pytest.mark.long
@pytest.mark.usefixtures("planted_bug")
def test_stopping_finds_a_publisher_that_validates_before_its_transaction(root: Path) -> None:
    context = Rival(root).context
    assert any(stale_commits(context) for _ in stopped_everywhere(root, Rival.snapshot))


@pytest.mark.usefixtures("planted_bug")
def test_delays_find_a_publisher_that_validates_before_its_transaction(root: Path, workers: Workers) -> None:
    duel = Duel(root, workers)
    for _ in range(ROUNDS):
        duel.round()
        if duel.number % 20 == 0 and stale_commits(duel.context):
            return
    raise AssertionError("the planted bug was not found")


# --- One holder, two processes ----------------------------------------------------------------------


def snapshots_under_one_lease(root: Path, rival: Rival) -> Callable[[Line], None]:
    def work(line: Line) -> None:
        mine = Rival(root)
        mine.proof = rival.proof
        while line.wait():
            line.say(mine.snapshot())

    return work


def test_two_concurrent_snapshots_under_one_lease_form_one_history_and_none_is_lost(
    root: Path, workers: Workers
) -> None:
    holder = Rival(root)
    holder.acquire(1000)
    pair = workers.start_many(2, snapshots_under_one_lease(root, holder))
    made = published(holder.context)
    for _ in range(rounds(200, least=10)):
        for worker in pair:
            worker.say("go")
        answers = [worker.hear() for worker in pair]
        assert [each.what for each in answers] == ["published", "published"]
        made += [each.snapshot_id for each in answers]
    assert sorted(published(holder.context)) == sorted(made)
    require_one_line(holder.context)
