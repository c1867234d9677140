"""Eight agents commit, snapshot, restore and are killed in eight worktrees, while a person uses git in the checkout.

Everybody notes what was acknowledged: commits, snapshots with their content, and what their index, HEAD and branch were
before Holdfast worked. After each round, the verdict compares the notes with the repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import LockConflict
from holdfast.fs import durable
from holdfast.fs.directory import rename
from holdfast.git import snapshots as commits
from holdfast.git.program import Git
from holdfast.git.snapshots import GitSource
from holdfast.repository import git_init
from holdfast.repository.context import MAIN, OPERATIONS, Consistency, settle
from holdfast.repository.git_home import GitHome
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.repository import Repository
from proof import effort
from tests.repository.stages import files_in, put_files
from tests.support.homes import SAFE, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")

AGENTS = [f"a{number}" for number in range(8)]
STEPS = 3  # of an agent in a round, unless it is killed
ERRANDS = 3  # of the person in a round
ROUNDS_IN_ONE = 20  # repository: each verdict examines every snapshot
LONGEST_LIFE = 1.2  # seconds until a kill


class Notes:
    """What one agent, or the person, knows for sure: one line each, written in one call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, **facts}) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def git_directory(top: Path) -> Path:
    """git's own directory of a checkout."""
    place = top / ".git"
    return place if place.is_dir() else Path(place.read_text().strip().removeprefix("gitdir: "))


def fingerprint(top: Path, branch: str) -> dict[str, str]:
    """What belongs to the user of a checkout alone."""
    git_dir = git_directory(top)
    index = git_dir / "index"
    found = {
        "HEAD": (git_dir / "HEAD").read_text(),
        "index": hashlib.sha256(index.read_bytes()).hexdigest() if index.exists() else "",
        "branch": git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}", at=top),
        "reflog": " ".join(line[:81] for line in (git_dir / "logs/HEAD").read_text().splitlines()),  # gc rewrites it
    }
    if branch == "trunk":
        found["stash"] = git("stash", "list", "--format=%H", at=top)
        others = git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags", at=top).split()
        found["branches"] = " ".join(each for each in others if not each.startswith("refs/heads/hf/"))
        found["config"] = (git_dir / "config").read_text()
    return found


@contextlib.contextmanager
def pruning_excluded(path: Path, *, shared: bool) -> Iterator[int]:
    """git does not promise that its own `commit` survives `git gc --prune=now` beside it: these exclude each other."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)  # not unlocked: a git that outlives us keeps it


class Storm:
    """A checkout that was adopted, its agents and its person."""

    def __init__(self, directory: Path, seed: str, done: Counter[str] | None = None) -> None:
        directory.mkdir(exist_ok=True)
        self.chance = random.Random(seed)
        self.top = directory / "project"
        self.pruning, self.pruned = directory / "pruning.lock", directory / "pruned"
        self.notes = {name: Notes(directory / f"{name}.notes") for name in [*AGENTS, MAIN, "watcher"]}
        self.done: Counter[str] = Counter() if done is None else done
        self.checked: defaultdict[str, int] = defaultdict(int)
        git("init", "-q", "-b", "trunk", self.top)
        for setting in ("user.name=person", "user.email=person@example", "gc.auto=0", "core.fsync=none"):
            git("config", *setting.split("="), at=self.top)
        put_files(self.top, {f"src/f{number}": f"{number}\n" * 9 for number in range(12)} | {".gitignore": "*.log\n"})
        git("add", "-A", at=self.top)
        git("commit", "-qm", "first", at=self.top)
        adopt_checkout(self.top)
        self.repository = Repository(self.top)
        for name in AGENTS:
            self.repository.worktrees.create(name)
        self.notes[MAIN].add("is", **fingerprint(self.top, "trunk"))

    # --- Agents ------------------------------------------------------------------------------------

    def agent(self, name: str, seed: str) -> None:
        """Work until the steps are done, or until the kill."""
        chance, notes = random.Random(seed), self.notes[name]
        repository = Repository(self.top)
        with repository.lease(name, ttl=600, wait=30) as lease:
            top = repository.path(name)
            self._clear_own_locks(top, name)
            taken: list[dict[str, Any]] = [each for each in notes.read() if each["what"] == "snapshot"]
            for _ in range(STEPS):
                self._change(top, name, chance)
                if chance.random() < 0.6:
                    self._commit(top, name, notes)
                    self._change(top, name, chance)
                before = fingerprint(top, f"hf/{name}")
                notes.add("begins", **before)
                if taken and chance.random() < 0.25:
                    old = chance.choice(taken)
                    repository.restore(old["id"], name, lease, reason="it was better")
                    notes.add("ends", **fingerprint(top, f"hf/{name}"))
                    notes.add("restored", id=old["id"], wanted=old["files"], found=files_in(top))
                    continue
                files = files_in(top)
                made = repository.snapshot(name, lease)
                notes.add("ends", **fingerprint(top, f"hf/{name}"))
                notes.add("snapshot", id=made.snapshot_id, files=files)
                taken.append({"id": made.snapshot_id, "files": files})

    def _clear_own_locks(self, top: Path, name: str) -> None:
        """What a person does after a crash of git: git that was killed leaves its lock files."""
        own = git_directory(top)
        for path in (own / "index.lock", own / "HEAD.lock", self.top / f".git/refs/heads/hf/{name}.lock"):
            path.unlink(missing_ok=True)

    def _change(self, top: Path, name: str, chance: random.Random) -> None:
        for _ in range(chance.randrange(1, 4)):
            target = f"src/{chance.choice(['f', 'new'])}{chance.randrange(12)}"
            if chance.random() < 0.2:
                (top / target).unlink(missing_ok=True)
            else:
                put_files(top, {target: f"{name} {chance.random()}\n" * chance.choice([1, 50])})

    def _commit(self, top: Path, name: str, notes: Notes) -> None:
        with pruning_excluded(self.pruning, shared=True) as lock:
            for command in (["add", "-A"], ["commit", "-q", "--allow-empty", "-m", name]):
                subprocess.run(["git", *command], cwd=top, pass_fds=[lock], check=True)
        notes.add("commit", id=git("rev-parse", "HEAD", at=top))

    def watcher(self) -> None:
        """Save `main` as it is, over and over, whatever the person does there."""
        repository, notes = Repository(self.top), self.notes["watcher"]
        with repository.lease(MAIN, ttl=600, wait=30) as lease:
            for _ in range(STEPS):
                made = repository.snapshot(MAIN, lease, consistency=Consistency.BEST_EFFORT)
                notes.add("snapshot", id=made.snapshot_id)

    # --- The person --------------------------------------------------------------------------------

    def person(self) -> None:
        """One thing at a time, and nobody else touches anything of the person's."""
        for _ in range(ERRANDS):
            self._require_untouched()
            getattr(self, f"_person_{self.chance.choice(['status', 'commit', 'gc', 'gc', 'stash'])}")()
            self.notes[MAIN].add("is", **fingerprint(self.top, "trunk"))

    def _require_untouched(self) -> None:
        known = {key: value for key, value in self.notes[MAIN].read()[-1].items() if key != "what"}
        assert fingerprint(self.top, "trunk") == known, "something of the person's has changed"

    def _person_edit(self) -> None:
        put_files(self.top, {f"src/f{self.chance.randrange(12)}": f"person {self.chance.random()}\n"})

    def _person_status(self) -> None:
        self._person_edit()
        git("status", "--porcelain", at=self.top)

    def _person_commit(self) -> None:
        self._person_edit()
        git("add", "-A", at=self.top)
        self._person_edit()
        git("commit", "-qm", "person", "--allow-empty", at=self.top)
        self.notes[MAIN].add("commit", id=git("rev-parse", "HEAD", at=self.top))

    def _person_gc(self) -> None:
        with pruning_excluded(self.pruning, shared=False):
            git("gc", "-q", "--prune=now", at=self.top)
        with self.pruned.open("a") as file:
            file.write("x")

    def _person_stash(self) -> None:
        self._person_edit()
        before = self._stashed()
        told = git("stash", "push", "--include-untracked", at=self.top)
        after = self._stashed()
        assert after[1:] == before, f"{told}: {before} became {after}"
        if self.chance.random() < 0.7:
            told = git("stash", "pop", at=self.top)
            assert self._stashed() == before, f"{told}: {after} became {self._stashed()}"
        else:
            self.notes[MAIN].add("commit", id=git("rev-parse", "stash@{0}", at=self.top))

    def _stashed(self) -> list[str]:
        return git("stash", "list", "--format=%H", at=self.top).split()

    # --- A round, and its verdict ------------------------------------------------------------------

    def round(self, number: int) -> None:
        children = [self._start(name, partial(self.agent, name, f"{number} {name}")) for name in AGENTS]
        children.append(self._start("watcher", self.watcher))
        timers = []
        for child in self.chance.sample(children, len(AGENTS) // 2):
            victim = child if self.chance.random() < 0.5 else -child  # alone, or with the git that it has started
            timers.append(threading.Timer(self.chance.uniform(0, LONGEST_LIFE), _kill, [victim]))
        for timer in timers:
            timer.start()
        try:
            self.person()
        finally:
            for child in children:
                self.done["killed"] += os.WIFSIGNALED(os.waitpid(child, 0)[1])
            for timer in timers:
                timer.cancel()
                timer.join()
            for child in children:
                _kill(-child)
        self.judge()

    def _start(self, name: str, work: Callable[[], object]) -> int:
        child = os.fork()
        if child:
            with contextlib.suppress(OSError):
                os.setpgid(child, child)
            return child
        status = 1
        try:
            os.setpgid(0, 0)
            work()
            status = 0
        except BaseException:
            self.notes[name].add("failed", why=traceback.format_exc())
        finally:
            os._exit(status)

    def judge(self) -> None:
        for name in [name for name, _ in self.repository.context.store.scan(OPERATIONS)]:
            _until_settled(self.repository, name)
        self._require_untouched()
        for name, notes in self.notes.items():
            new = notes.read()[self.checked[name] :]
            self.checked[name] += len(new)
            self._judge_notes(name, new)
        for state in list(self.repository.leases.states()):  # of the killed
            self.repository.leases.release(state.lease.worktree_id, state.lease.lock_id)
        assert self.repository.repair(strict=True).failed == ()
        assert [str(each) for each in self.repository.examine(strict=True)] == []
        assert git("fsck", "--strict", "--no-dangling", at=self.top) == "", "git fsck found something"

    def _judge_notes(self, name: str, new: list[dict[str, Any]]) -> None:
        self.done.update(each["what"] for each in new)
        failed = [each["why"] for each in new if each["what"] == "failed"]
        assert not failed, f"{name} failed:\n{failed[0]}"
        branch = "trunk" if name in (MAIN, "watcher") else f"hf/{name}"
        acknowledged = {each["id"] for each in new if each["what"] == "commit"}
        kept = set(git("rev-list", f"refs/heads/{branch}", "--glob=refs/stash*", at=self.top).split())
        kept |= set(git("stash", "list", "--format=%H", at=self.top).split())
        told = "\n".join(map(str, new))
        assert acknowledged <= kept, f"{name} has lost {acknowledged - kept}, of:\n{told}"
        before: dict[str, Any] = {}
        for each in new:
            if each["what"] in ("begins", "ends"):
                assert each["what"] == "begins" or each | {"what": ""} == before, f"Holdfast changed what is {name}'s"
                before = each | {"what": ""}
            assert each["what"] != "restored" or each["wanted"] == each["found"], f"{name} restored something else"
        if new and new[-1]["what"] == "begins":  # killed there
            now = fingerprint(self.repository.path(name), branch)
            assert now | {"what": ""} == before, f"Holdfast changed what is {name}'s"
        self._judge_snapshots([each for each in new if each["what"] == "snapshot"])

    def _judge_snapshots(self, taken: list[dict[str, Any]]) -> None:
        """All exist and are complete; the last one has the content that it should have."""
        for each in taken:
            assert list(self.repository.snapshots.verify(each["id"])) == [], "a snapshot is damaged"
        for each in taken[-1:]:
            target = self.top.with_name("exported")
            self.repository.snapshots.export(each["id"], target)
            assert each.get("files") in (None, files_in(target)), "a snapshot has other content"
            subprocess.run(["rm", "-rf", target], check=True)

    def judge_all(self) -> None:
        """At the end, every snapshot that was ever acknowledged is still there."""
        git("gc", "-q", "--prune=now", at=self.top)
        assert git("fsck", "--strict", "--no-dangling", at=self.top) == ""
        home, known = self.repository.context.home, set(self.repository.snapshots.all_ids())
        assert isinstance(home, GitHome)
        for notes in self.notes.values():
            taken = {each["id"] for each in notes.read() if each["what"] == "snapshot"}
            assert taken <= known, "a snapshot is lost"
            assert taken <= set(home.stored()), "a reference is lost"


def _kill(victim: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)


def _until_settled(repository: Repository, name: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            settle(repository.context, name)
        except LockConflict:  # the git of a killed process has just been killed too
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "agent")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "agent@example")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_eight_agents_and_a_person_lose_nothing(scratch: Path, record_property: Callable[[str, object], None]) -> None:
    done: Counter[str] = Counter()
    storms: list[Storm] = []
    for number in effort.until(lambda: all(done[each] for each in ("killed", "commit", "snapshot")), 200):
        if number % ROUNDS_IN_ONE == 0:
            storms.append(Storm(scratch / f"{number}", f"{effort.SEED} {number}", done))
        storms[-1].round(number)
        if number % ROUNDS_IN_ONE == ROUNDS_IN_ONE - 1:
            storms[-1].judge_all()
    storms[-1].judge_all()
    record_property("storm", dict(done))


# --- Planted bugs, which the storm must find -----------------------------------------------------------


def into_the_users_index(self: GitHome, directory: Path) -> Path:
    """Keeps the private index where the user's is."""
    return git_directory(directory) / "index"


def without_a_keep_file(source: GitSource, pack: Path, snapshot_id: str) -> Path:
    """Moves the pack without its `.keep` file, and gives the person time to collect garbage."""
    pruned = source.git.common.parent.parent / "pruned"
    place = source.git.objects / "pack"
    for path in sorted(pack.parent.glob(f"{pack.name}.*"), key=lambda each: each.suffix == ".idx"):
        rename(path, place / path.name)
    before = len(durable.read(pruned)) if pruned.exists() else 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and (len(durable.read(pruned)) if pruned.exists() else 0) == before:
        time.sleep(0.01)
    return place / f"{pack.name}.pack"


def over_the_branch(git_of: Git, snapshot_id: str, commit: str) -> None:
    """Moves branches of agents to their snapshots."""
    create_ref(git_of, snapshot_id, commit)
    for name in git_of.run("for-each-ref", "--format=%(refname)", "refs/heads/hf", f"--points-at={commit}^").split():
        git_of.run("update-ref", name.decode(), commit)


create_ref = commits.create_ref


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("holdfast.repository.git_snapshots.GitSnapshots.index", into_the_users_index),
        ("holdfast.git.snapshots._move_pack", without_a_keep_file),
        ("holdfast.git.snapshots.create_ref", over_the_branch),
    ],
)
@pytest.mark.sampled(1)
def test_a_planted_bug_is_found(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, place: str, bug: Callable[..., object]
) -> None:
    storm = Storm(scratch, f"{effort.SEED}")
    monkeypatch.setattr(place, bug)
    symptoms = r"changed|failed|lost|damaged|overwritten|fsck|missing|already exists"
    with pytest.raises(AssertionError, match=symptoms):  # noqa: PT012
        for number in range(10):
            storm.round(number)
