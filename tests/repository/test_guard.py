"""The guard before a write: its quick check agrees with the full check on every kind of lease."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from holdfast.clock import SKEW, SYSTEM_CLOCK, format_instant
from holdfast.errors import LockConflict
from holdfast.fs import calls
from holdfast.issues.creating import NewIssue
from holdfast.locks.identity import Holder, boot_clock_id, current_holder, holder_with_pid
from holdfast.repository.agent import own_leases
from holdfast.repository.guard import (
    WorktreePath,
    check,
    full_check,
    holds_nothing,
    quick_check,
    worktrees_at,
    worktrees_of,
)
from holdfast.repository.init import initialise
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from tests.support.homes import make_repository

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="the guard finds ancestor processes through /proc"),
]

MINUTE = 60.0
LOCK_ID, ANOTHER_LOCK_ID = "3c1e6f3e-0000-4000-8000-000000000001", "3c1e6f3e-0000-4000-8000-000000000002"

Answer = Mapping[str, object] | bool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "root").worktrees.create("theirs")
    return tmp_path / "root"


def records(root: Path) -> str:
    """The directory that has the records of a repository."""
    return str(Repository(root).root)


@pytest.fixture
def place(root: Path) -> WorktreePath:
    return WorktreePath(records(root), "theirs")


@pytest.fixture
def stranger() -> Iterator[Holder]:
    """A live process that is unrelated to us, except that we started it."""
    with subprocess.Popen(["sleep", "99"]) as process:
        holder = holder_with_pid(process.pid)
        assert holder is not None
        yield holder
        process.kill()


def quick_answer(place: WorktreePath, lock_id: str | None = None, actor: str | None = None) -> Answer:
    seen = quick_check(place, lock_id, actor)
    assert seen is not None, "the quick check was undecided"
    return seen if seen is True else stable_record(seen)


def full_answer(place: WorktreePath, lock_id: str | None = None, actor: str | None = None) -> Answer:
    try:
        full_check(place, lock_id, actor)
    except LockConflict as conflict:
        return stable_record(conflict)
    return True


def stable_record(conflict: LockConflict) -> Mapping[str, object]:
    """The record of a conflict without the time left, which changes between two checks."""
    record = conflict.as_record()
    left = record.pop("time_left")
    assert isinstance(left, float)
    assert left > 0
    record["message"] = re.sub(r"; leased [^(]*\(", "; leased (", str(record["message"]))
    return record


def both(place: WorktreePath, lock_id: str | None = None, actor: str | None = None) -> Answer:
    """The answer of both checks, which must agree."""
    quick, long = quick_answer(place, lock_id, actor), full_answer(place, lock_id, actor)
    assert quick == long
    return quick


# --- Every kind of lease ------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of lease, and the caller that checks it."""

    holder: str
    behalf: str
    detached: bool
    named: str
    clock: str
    ends: str
    actor: str | None
    lock_id: str | None

    def may_write(self) -> bool | None:
        over = self.ends == "long ago" or (self.clock == "this" and self.ends == "just now")
        ours = "us" in (self.holder, self.behalf) or "parent" in (self.holder, self.behalf)
        another = bool(self.named and self.actor and self.named != self.actor)
        return over or self.lock_id == LOCK_ID or (ours and not another)


KINDS = [
    Kind(*each)
    for each in itertools.product(
        ("us", "parent", "stranger", "dead", "elsewhere", "garbage"),
        ("", "us", "stranger"),
        (False, True),
        ("", "agent:a"),
        ("this", "another", "none"),
        ("later", "just now", "long ago"),
        (None, "agent:a", "agent:b"),
        (None, LOCK_ID, ANOTHER_LOCK_ID),
    )
    if not (each[0] in ("elsewhere", "garbage") and each[1])  # they share one identity
]
_ENDS = {"later": MINUTE, "just now": -SKEW / 2, "long ago": -MINUTE}


def lease_of(kind: Kind, stranger: Holder) -> dict[str, Any]:
    me, parent = current_holder(), os.getppid()
    holders = {
        "us": me,
        "parent": (holder_with_pid(parent) if parent > 1 else None) or me,  # process 1 holds nothing for anybody
        "stranger": stranger,
        "dead": me._replace(pid=stranger.pid, start_time="1"),
        "elsewhere": me._replace(host="elsewhere", boot_id="another", machine_id="another"),
        "garbage": me._replace(host="a:b"),
    }
    holder = holders[kind.holder]
    record = holder.as_record()
    ends = _ENDS[kind.ends]
    clocks = {"this": boot_clock_id(), "another": "another", "none": None}
    mark = clocks[kind.clock] and [clocks[kind.clock], SYSTEM_CLOCK.boot() + ends]
    return {
        "lock_id": LOCK_ID,
        "worktree_id": "theirs",
        "holder_id": record.pop("holder_id"),
        "created_at": format_instant(time.time() - 2 * MINUTE),
        "last_renewed_at": format_instant(time.time() - 2 * MINUTE),
        "lease_expires_at": format_instant(time.time() + ends),
        "fencing_token": 1,
        "ttl": MINUTE,
        "purpose": "trying\x1b[31m things",
        "identity": record,
        "detached": kind.detached,
        "on_behalf_of": holders[kind.behalf].holder_id if kind.behalf else "",
        "boot_expires_at": mark,
        "actor": kind.named,
    }


def write_lease(place: WorktreePath, content: str) -> None:
    file = Path(place.root, ".jvs/locks/theirs.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)


def test_the_quick_check_agrees_with_the_full_check_on_every_kind_of_lease(
    place: WorktreePath, stranger: Holder
) -> None:
    for kind in random.Random(8).sample(KINDS, 500):
        write_lease(place, json.dumps(lease_of(kind, stranger)))
        answer = both(place, kind.lock_id, kind.actor)
        assert (answer is True) is kind.may_write(), kind
        if answer is not True:
            assert isinstance(answer, Mapping)
            alive = {"stranger": "alive", "us": "alive", "parent": "alive", "dead": "dead"}
            expected = alive.get(kind.holder, "unknown")
            expected = "unknown" if kind.detached and expected == "dead" else expected
            assert answer["liveness"] == expected, kind


def test_a_caller_that_holds_nothing_has_no_lease_to_renew(place: WorktreePath, stranger: Holder) -> None:
    below = os.path.join(place.root, "main", "sub")
    answers = set()
    for kind in random.Random(8).sample(KINDS, 150):
        write_lease(place, json.dumps(lease_of(kind, stranger)))
        own = list(own_leases(Repository(place.root, actor=kind.actor), kind.lock_id))
        answers.add(nothing := holds_nothing(below, kind.lock_id, kind.actor))
        assert nothing is not bool(own), kind
    assert answers == {True, False}
    write_lease(place, "{")
    assert not holds_nothing(below, None), "an unreadable lease is left to the full check"
    assert holds_nothing("/", None)


def test_a_record_of_an_earlier_version_is_understood(place: WorktreePath, stranger: Holder) -> None:
    record = lease_of(Kind("stranger", "", False, "", "this", "later", None, None), stranger)
    for later in ("actor", "on_behalf_of", "detached", "purpose", "boot_expires_at"):
        del record[later]
    write_lease(place, json.dumps(record))

    answer = both(place, actor="agent:b")

    assert isinstance(answer, Mapping)
    assert (answer["holder_id"], answer["actor"]) == (stranger.holder_id, "")


def test_a_lease_that_cannot_be_understood_counts_as_held(place: WorktreePath) -> None:
    for content in ("", "{", "[]", "null", '{"lock_id": 1}', "\0", '{"lock_id": "x"}', "[" * 60_000):
        write_lease(place, content)
        assert isinstance(quick_check(place, None), LockConflict), content


def test_a_path_that_no_system_accepts_belongs_to_the_worktree_that_it_would_be_in(root: Path) -> None:
    theirs = [WorktreePath(records(root), "theirs")]

    for name in ("a\0b", "\ud800", "\udcff\udfff", "x" * 300, "x/" * 20_000):
        assert worktrees_of(str(root / "worktrees/theirs" / name)) == theirs, ascii(name)[:40]


def test_a_write_to_an_unknown_place_may_go_to_every_worktree_of_the_repository(root: Path, tmp_path: Path) -> None:
    real = records(root)
    main, theirs = WorktreePath(real, "main"), WorktreePath(real, "theirs")

    assert worktrees_at(str(root / "main")) == [main]
    assert worktrees_at(str(root / "worktrees/theirs/deep")) == [theirs]
    assert worktrees_at(str(root)) == worktrees_at(str(root / ".jvs")) == [main, theirs]
    assert worktrees_at(str(tmp_path)) == []


# --- Real leases --------------------------------------------------------------------------------------


def test_an_unleased_worktree_may_be_written_with_or_without_claims(root: Path, place: WorktreePath) -> None:
    assert both(place) is True
    tracker = open_tracker(root, actor="agent:a")
    tracker.initialise()
    [created] = tracker.create_all([NewIssue(title="something")])
    tracker.claims.claim(created.issue.id, tracker.claims.request("agent:a"))

    assert both(place) is True


def test_a_holder_may_write_under_its_own_lease(root: Path, place: WorktreePath) -> None:
    with Repository(root).lease("theirs"):
        assert both(place) is True


def test_agents_of_one_process_are_told_apart_by_their_names(root: Path, place: WorktreePath) -> None:
    with Repository(root, actor="agent:a").lease("theirs") as lease:
        assert both(place, actor="agent:a") is True
        assert both(place) is True, "a caller without a name is identified by its process"
        assert both(place, lease.lock_id, actor="agent:b") is True
        refused = both(place, actor="agent:b")
        assert isinstance(refused, Mapping)
        assert (refused["actor"], refused["liveness"]) == ("agent:a", "alive")
        assert "agent:a" in str(refused["message"])


def test_a_write_under_the_lease_of_another_process_is_refused(
    root: Path, place: WorktreePath, stranger: Holder
) -> None:
    Repository(root, holder=stranger).lease("theirs", ttl=MINUTE, purpose="refactoring")

    refused = both(place)
    assert isinstance(refused, Mapping)
    assert (refused["holder_id"], refused["host"]) == (stranger.holder_id, stranger.host)
    assert (refused["purpose"], refused["liveness"]) == ("refactoring", "alive")
    with pytest.raises(LockConflict):
        check(place, None)


def test_an_unfinished_commit_is_left_to_the_full_check(root: Path, place: WorktreePath, stranger: Holder) -> None:
    Repository(root, holder=stranger).lease("theirs", ttl=MINUTE)
    intents = Path(records(root)) / ".holdfast/intents"
    intents.mkdir(parents=True, exist_ok=True)
    (intents / "0.json.done").touch()
    assert both(place) is not True
    (intents / "unfinished.json").touch()

    assert quick_check(place, None) is None


def test_an_unreadable_directory_is_left_to_the_full_check(
    place: WorktreePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **options: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(calls, "scandir", refuse)

    assert quick_check(place, None) is None
    assert not holds_nothing(place.root, None)


# --- Paths and worktrees -------------------------------------------------------------------------------


def test_a_path_belongs_to_the_worktree_that_its_symlinks_lead_to(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "main/link").symlink_to(root / "worktrees/theirs")
    (root / "main/away").symlink_to(outside)
    (outside / "into").symlink_to(root / "worktrees/theirs/sub")
    theirs = WorktreePath(records(root), "theirs")
    main = WorktreePath(records(root), "main")

    assert worktrees_of(str(root / "main/link/new/file")) == [theirs]
    assert worktrees_of(str(outside / "into/file")) == [theirs]
    assert worktrees_of(str(root / "worktrees/theirs/../../main/x")) == [main]
    assert worktrees_of(str(root / "main/link/../../main/x")) == [main]
    for elsewhere in (root / "main/away/x", outside / "x", root, root / "worktrees", root / ".jvs/x"):
        assert worktrees_of(str(elsewhere)) == [], elsewhere


def test_a_write_into_a_nested_repository_needs_the_worktree_around_it_too(root: Path, stranger: Holder) -> None:
    inner = root / "worktrees/theirs/inner"
    initialise(inner, nested=True)
    Repository(root, holder=stranger).lease("theirs", ttl=MINUTE)

    nested, around = worktrees_of(str(inner / "main/x"))

    assert nested == WorktreePath(str(inner.resolve()), "main")
    assert both(nested) is True
    assert [around] == worktrees_of(str(inner.parent / "x"))
    assert both(around) is not True
