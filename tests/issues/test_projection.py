"""The projection of all issues never differs from a full read, whoever changes the issues, and whatever happens to its
checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
import warnings
from array import array
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest

from holdfast.errors import CheckpointDamaged, Failure, IoFailure
from holdfast.fs import calls
from holdfast.issues import projection
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, IssueSummary, Priority, State, searched_text
from holdfast.issues.projection import CHECKPOINT, IssueProjection, OpenIssues, SavedRows
from holdfast.issues.rules import IssueSet
from holdfast.issues.tracker import Query as IssueQuery
from holdfast.issues.tracker import Tracker, Update, find
from holdfast.locks.retry import RetryConfig
from holdfast.store import stat_cache
from holdfast.store.files import FileStore
from holdfast.store.intents import Intents
from holdfast.store.layout import CHECKPOINTS
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Store
from holdfast.store.open import open_address
from proof.effort import SHARE, rounds
from tests.issues.foreign import ForeignProgram

HISTORIES, STEPS = 20, 1_000  # with `HOLDFAST_ROUNDS=1`, and in each
WORDS = ("parser", "lexer", "Grüße", "docs")


def opened(store: Store, root: Path | None) -> Tracker:
    return Tracker(store, actor="agent:test", root=root, retry=RetryConfig(max_attempts=20, initial_delay=0.0))


def described(seen: IssueSet[IssueSummary]) -> dict[str, object]:
    """Everything that commands show of these issues."""
    return {
        "issues": list(seen),
        "states": [seen.state(each) for each in seen],
        "ready": [each.id for each in seen.ready()],
        "blocked": [(each.id, on) for each, on in seen.blocked()],
        "notable": sorted(each.id for each in seen.notable()),
        "broken": sorted(each.issue_id for each in seen.broken),
        "found": [[each.id for each in find(seen, IssueQuery(words=(word,)))] for word in WORDS],
    }


def read_in_full(tracker: Tracker) -> IssueSet[IssueSummary]:
    full = tracker.snapshot()
    rows = {each.id: IssueSummary.of(each) for each in full}
    texts = {each.id: searched_text(each) for each in full}
    claims = full._read_claims
    return IssueSet(rows, full.moment, full.broken_issues, claims=claims, text=texts.__getitem__)


def difference(tracker: Tracker, *, finished: bool) -> str:
    """How the summaries differ from a full read; empty if they do not."""
    summaries, full = tracker.summaries(finished=finished), read_in_full(tracker)
    full.moment = summaries.moment  # claims expire by and by
    seen = described(summaries)
    if not finished:
        kept = {each.id: each for each in full if each.state not in (State.DONE, State.REJECTED, State.ARCHIVED)}
        full = IssueSet(
            kept, full.moment, full.broken_issues, claims=full._read_claims, lookup=full.lookup, text=full._text
        )
    wanted = described(full)
    return "; ".join(f"{name}: {seen[name]} instead of {wanted[name]}" for name in wanted if seen[name] != wanted[name])


class History:
    """Random changes of a tracker by Holdfast."""

    def __init__(self, store: Store, root: Path | None, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tracker = opened(store, root)
        self.tracker.initialise()
        self.root = root
        self.actions: list[Callable[[], object]] = [
            self.create,
            self.create_batch,
            self.update,
            self.update,
            self.move,
            self.claim,
            self.claim,
            self.finish,
            self.depend,
            self.delete,
        ]

    def step(self) -> None:
        with contextlib.suppress(Failure, OSError, ValueError, LookupError):  # there may be nothing to change
            self.chance.choice(self.actions)()

    def some(self) -> str:
        ids = sorted(each.id for each in self.tracker.snapshot())
        return self.chance.choice(ids) if ids else "none"

    def create(self) -> object:
        word = self.chance.choice(WORDS)
        return self.tracker.create(NewIssue(title=f"{word} {self.chance.randrange(99)}", description=word * 3))

    def create_batch(self) -> object:
        return self.tracker.create_all([NewIssue(title=f"{each} of a batch") for each in range(3)])

    def update(self) -> object:
        priority = self.chance.choice(list(Priority))
        update = Update(title=f"{self.chance.choice(WORDS)} again", priority=priority, increments={"n": 1})
        return self.tracker.update(self.some(), update)

    def move(self) -> object:
        return self.tracker.update(self.some(), Update(state=self.chance.choice(list(State))))

    def claim(self) -> object:
        return self.tracker.claims.claim_next(self.tracker.claims.request(ttl=self.chance.choice((0.1, 600.0))))

    def finish(self) -> object:
        for each in self.tracker.snapshot():
            record = self.tracker.claims.state(each.id)
            if record is not None and record.claim is not None:
                done = Update(state=State.DONE)
                return self.tracker.update(each.id, done, claim=ClaimId.parse(record.claim.claim_id))
        return None

    def depend(self) -> object:
        return self.tracker.dependencies.add(self.some(), self.some())

    def delete(self) -> object:
        return self.tracker.delete(self.some()) if self.chance.random() < 0.5 else None


class FilesHistory(History):
    """The same in plain files, which other programs change too, and where processes crash."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(FileStore(root), root, seed)
        self.place = root
        self.checkpoints = root / CHECKPOINTS
        self._foreign = ForeignProgram(root)
        self._git("init", "-q")
        self._git("config", "user.email", "a@b")
        self._git("config", "user.name", "a")
        self.actions += [
            self.write_in_place,
            self.foreign_label,
            self.foreign_create,
            self.foreign_delete,
            self.remove_file,
            self.damage,
            self.commit,
            self.check_out,
            self.lose_checkpoint,
            self.tear_checkpoint,
            self.crash,
        ]

    def _git(self, *words: str) -> None:
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
        subprocess.run(["git", *words], cwd=self.place, check=False, capture_output=True, env=environment)

    def _file(self) -> Path:
        return self.place / f".jit/issues/{self.some()}.json"

    def write_in_place(self) -> None:
        path = self._file()
        content = path.read_text()
        with path.open("r+") as file:
            file.write(_with_other_title(content))  # of the same length

    def foreign_label(self) -> None:
        self._foreign.add_label(self.some(), f"l{self.chance.randrange(3)}")

    def foreign_create(self) -> None:
        self._foreign.create_issue(f"foreign-{self.chance.randrange(1000)}")

    def foreign_delete(self) -> None:
        self._foreign.delete_issue(self.some())

    def remove_file(self) -> None:
        self._file().unlink()

    def damage(self) -> None:
        if self.chance.random() < 0.2:
            self._file().write_text("{")

    def commit(self) -> None:
        self._git("add", "-A", ".jit")
        self._git("commit", "-q", "-m", "x")

    def check_out(self) -> None:
        self._git("checkout", "-q", self.chance.choice(("HEAD", "HEAD~1", "HEAD~2")), "--", ".jit")

    def lose_checkpoint(self) -> None:
        for each in self.checkpoints.iterdir():
            if self.chance.random() < 0.5:
                each.unlink()

    def tear_checkpoint(self) -> None:
        path = self.chance.choice(sorted(self.checkpoints.iterdir()))
        content = bytearray(path.read_bytes())
        if content and self.chance.random() < 0.5:
            content[self.chance.randrange(len(content))] ^= 0xFF
            path.write_bytes(content)
        else:
            path.write_bytes(content[: self.chance.randrange(len(content) + 1)])

    def crash(self) -> None:
        """A commit that is decided, and that its process has not applied."""
        original = Intents.apply
        try:
            Intents.apply = _fail  # type: ignore[method-assign, assignment]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.chance.choice((self.create, self.create_batch, self.update, self.delete))()
        finally:
            Intents.apply = original  # type: ignore[method-assign]


def _fail(*_: object) -> list[int]:
    raise IoFailure("apply", "here", OSError("killed"))


def _with_other_title(content: str) -> str:
    title = str(json.loads(content)["title"])
    return content.replace(json.dumps(title), json.dumps(title[1:] + title[:1]), 1)


def differences(history: History, steps: int, reopen: Callable[[], Tracker]) -> list[str]:
    """How often and how the projection was wrong: that of one process, and that of a new process each time."""
    found: list[str] = []
    for number in range(steps):
        history.step()
        if number % 3 == 0:
            found += (difference(each, finished=history.chance.random() < 0.5) for each in (history.tracker, reopen()))
    return [each for each in found if each]


@pytest.fixture
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_SAVE_EVERY", 0.0)


def test_issues_that_the_index_no_longer_lists_are_in_the_order_of_their_age(scratch: Path) -> None:
    tracker = opened(FileStore(scratch), scratch)
    tracker.initialise()
    ids = [tracker.create(NewIssue(title=each)).id for each in ("older", "newer")]
    index = scratch / ".jit/index.json"
    for listed in (ids[::-1], []):  # as another program, or a checkout, leaves it
        index.write_text(json.dumps(json.loads(index.read_text()) | {"all_ids": listed}))
        assert [each.id for each in tracker.summaries(finished=False)] == (listed or ids)
        assert difference(tracker, finished=False) == ""


def test_a_deleted_issue_that_others_depend_on_has_its_place_by_age(scratch: Path) -> None:
    """Checkouts leave such files: the index calls the issue deleted, its file is there, and another one needs it."""
    tracker = opened(FileStore(scratch), scratch)
    tracker.initialise()
    older, newer, last = [tracker.create(NewIssue(title=each)).id for each in ("older", "newer", "last")]
    tracker.dependencies.add(last, older)
    index = scratch / ".jit/index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"all_ids": [last], "deleted_ids": [older]}))
    assert [each.id for each in tracker.snapshot()] == [last, older, newer]
    assert difference(tracker, finished=False) == ""


@pytest.mark.usefixtures("saved_often")
def test_a_finished_issue_that_changes_again_is_not_remembered_as_it_was(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of finished issues is written again; that of unfinished ones has those that they depend on."""
    monkeypatch.setattr(projection, "_MOST_CHANGED", 4)
    monkeypatch.setattr(stat_cache, "RECENT", -60_000_000_000)  # reads only what has changed, as on a server
    tracker = opened(FileStore(scratch), scratch)
    tracker.initialise()
    others = [each.issue.id for each in tracker.create_all([NewIssue(title=str(each)) for each in range(8)])]
    needed = tracker.create(NewIssue(title="needed")).id
    waiting = tracker.create(NewIssue(title="waiting", depends_on=(needed,))).id
    for each in (needed, *others):
        tracker.update(each, Update(state=State.DONE))
    tracker.update(waiting, Update(state=State.IN_PROGRESS))
    assert opened(FileStore(scratch), scratch).summaries(finished=False).blocked() == []
    tracker.update(needed, Update(state=State.REJECTED))
    for each in others:
        tracker.update(each, Update(title="changed again"))
    tracker.summaries(finished=True)  # writes the file of finished issues
    found = opened(FileStore(scratch), scratch).summaries(finished=False)
    assert [(each.id, on) for each, on in found.blocked()] == [(waiting, [needed])]


@pytest.mark.usefixtures("saved_often")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_in_files_the_projection_never_differs_from_a_full_read(scratch: Path, seed: int) -> None:
    history = FilesHistory(scratch, seed)
    steps = rounds(STEPS, least=50)
    assert differences(history, steps, lambda: opened(FileStore(scratch), scratch)) == []


@pytest.mark.usefixtures("saved_often")
@pytest.mark.parametrize("seed", range(HISTORIES) if SHARE == 1 else [3])
def test_on_servers_the_projection_never_differs_from_a_full_read(scratch: Path, served_url: str, seed: int) -> None:
    store = open_address(scratch, served_url)
    history = History(store, scratch, seed)
    with contextlib.closing(store):
        steps = rounds(STEPS, least=30)
        assert differences(history, steps, lambda: opened(store, scratch)) == []
    assert (scratch / CHECKPOINTS / CHECKPOINT).exists()


def test_in_memory_the_projection_never_differs_from_a_full_read() -> None:
    store = MemoryStore()
    steps = rounds(HISTORIES * STEPS, least=200)
    assert differences(History(store, None, 4), steps, lambda: opened(store, None)) == []


@pytest.fixture(params=["postgres", "etcd"])
def served_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


def test_planted_staleness_is_found(scratch: Path, monkeypatch: pytest.MonkeyPatch, saved_often: None) -> None:
    """A projection that examines only whether the directory has changed misses what was written in place."""
    monkeypatch.setattr(stat_cache._Files, "seem_unchanged", lambda *_: True)
    monkeypatch.setattr(stat_cache, "RECENT", -60_000_000_000)
    history = FilesHistory(scratch, 1)
    history.actions = [history.create, history.write_in_place, history.write_in_place]
    assert differences(history, 30, lambda: opened(FileStore(scratch), scratch)) != []


def test_a_look_at_unchanged_issues_reads_none_of_them(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = opened(FileStore(scratch), scratch)
    tracker.initialise()
    made = tracker.create_all([NewIssue(title=str(each)) for each in range(20)])
    then = time.time_ns() + 60_000_000_000
    monkeypatch.setattr("holdfast.store.stat_cache.time.time_ns", lambda: then)
    tracker.summaries()
    read: list[str] = []
    original = calls.open

    def noting(path: str, *arguments: object, **options: object) -> int:
        read.append(str(path))
        return original(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calls, "open", noting)
    assert len(opened(FileStore(scratch), scratch).summaries(finished=False)) == 20
    assert not [each for each in read if any(made_.issue.id in each for made_ in made)]


def test_a_command_decodes_only_the_issues_that_it_needs(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that are saved, and of those that have changed since."""
    tracker = opened(store := MemoryStore(), None)
    tracker.initialise()
    tracker.create_all([NewIssue(title=str(each)) for each in range(300)])
    IssueProjection(store, scratch).look(tracker.transactions.reading(), finished=False)
    decoded: list[int] = []
    original = SavedRows.row

    def noting(rows: SavedRows, at: int) -> IssueSummary:
        decoded.append(at)
        return original(rows, at)

    monkeypatch.setattr(SavedRows, "row", noting)
    monkeypatch.setattr(projection, "_decode_rows", lambda content: [] if len(content) < 9 else pytest.fail("all"))
    for step in range(3):
        tracker.claims.take_next(tracker.claims.request())
        seen = IssueProjection(store, scratch).look(tracker.transactions.reading(), finished=False)
        assert len([each.id for each in islice(seen.by_urgency(), 5)]) == 5
        assert len(list(seen.working())) == step + 1
        assert seen.blocked() == []
    assert len(decoded) < 150, "finding the place of a changed issue takes some ten"


def test_a_damaged_order_of_the_checkpoint_is_noticed(scratch: Path) -> None:
    """Numbers that fit no issue, with the right checksum."""
    tracker = opened(store := MemoryStore(), None)
    tracker.initialise()
    tracker.create_all([NewIssue(title=str(each)) for each in range(3)])
    read = tracker.transactions.reading()
    planted = OpenIssues.encoded(list(tracker.summaries()), {})
    planted[4] = array("I", [0, 1, 99]).tobytes()
    with mock.patch.object(OpenIssues, "encoded", return_value=planted):
        IssueProjection(store, scratch).look(read, finished=False)
    seen = IssueProjection(store, scratch).look(read, finished=False)
    with pytest.raises(CheckpointDamaged, match="checkpoint"):
        list(seen.by_urgency())


def test_a_checkpoint_that_cannot_be_written_changes_nothing(scratch: Path) -> None:
    tracker = opened(FileStore(scratch), scratch)
    tracker.initialise()
    issue = tracker.create(NewIssue(title="one"))
    (scratch / ".holdfast/checkpoints").write_text("not a directory")
    assert [each.id for each in tracker.summaries()] == [issue.id]
    assert [each.id for each in opened(FileStore(scratch), scratch).summaries()] == [issue.id]


def test_a_checkpoint_of_another_store_is_not_used(scratch: Path) -> None:
    one, other = opened(MemoryStore(), None), opened(MemoryStore(), None)
    for tracker, title in ((one, "one"), (other, "other")):
        tracker.initialise()
        tracker.create(NewIssue(title=title))
    for tracker, name in ((one, "one"), (other, "other"), (one, "one")):
        own = IssueProjection(tracker.store, scratch, name)
        assert [each.title for each in own.look(tracker.transactions.reading(), finished=True)] == [name]
