"""Snapshots between two clones, through a bare repository on disk that may be hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import AlreadyExists, GitFailed, NotFound, Refused
from holdfast.git import transfer as carried
from holdfast.repository import git_init
from holdfast.repository.context import DESCRIPTORS, MAIN, Proof
from holdfast.repository.gc_plan import propose
from holdfast.repository.git_init import adopt_checkout, deinitialise
from holdfast.repository.repository import Repository
from holdfast.repository.snapshots import SnapshotOptions
from proof.crash import Outcome, Scenario, kill_points
from proof.effort import SHARE
from tests.cli.commands import HOLDFAST, data, environment, holdfast
from tests.repository.stages import LASTING, events, files_in, put_files
from tests.repository.test_git_home import kill_at_git_commands
from tests.support.homes import SAFE, copied, git, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs git")
SNAPSHOTS = "refs/holdfast/snapshots"


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)


class Machine:
    """A clone with a repository in it."""

    def __init__(self, path: Path, remote: Path) -> None:
        git("clone", "-q", remote, path)
        git("config", "user.name", "user", at=path)
        git("config", "user.email", "user@example", at=path)
        adopt_checkout(path)
        self.path = path
        self.repository = Repository(path)

    def take(self, files: dict[str, str], note: str = "", **options: Any) -> str:
        put_files(self.path, files)
        with self.repository.lease(MAIN) as lease:
            made = self.repository.snapshots.take(MAIN, Proof.of(lease), SnapshotOptions(note=note, **options))
        return made.snapshot_id

    def exported(self, snapshot_id: str) -> dict[str, str]:
        target = self.path.parent / f"export-{os.urandom(4).hex()}"
        self.repository.snapshots.export(snapshot_id, target)
        return files_in(target)

    def of_the_user(self) -> dict[str, object]:
        refs = git("for-each-ref", at=self.path).splitlines()
        return {
            "refs": [each for each in refs if "refs/holdfast/" not in each],
            "HEAD": (self.path / ".git/HEAD").read_text(),
            "FETCH_HEAD": (self.path / ".git/FETCH_HEAD").exists(),
            "config": (self.path / ".git/config").read_text(),
            "index": (self.path / ".git/index").read_bytes(),
        }

    def ours(self) -> list[str]:
        return git("for-each-ref", "--format=%(refname)", "refs/holdfast", at=self.path).split()

    def require_sound(self) -> None:
        git("fsck", "--strict", at=self.path)
        assert [str(each) for each in self.repository.examine(strict=True)] == []


@pytest.fixture
def remote(scratch: Path) -> Path:
    return copied(make_remote, scratch / "remote.git")


def make_remote(path: Path) -> None:
    git("init", "-q", "--bare", "-b", "trunk", path)
    seed = path.with_name("seed")
    git("clone", "-q", path, seed)
    put_files(seed, {"README": "read me", "src/a": "a"})
    git("add", "-A", at=seed)
    git("-c", "user.name=u", "-c", "user.email=u@e", "commit", "-qm", "first", at=seed)
    git("push", "-q", "origin", "HEAD:trunk", at=seed)


@pytest.fixture
def here(scratch: Path, remote: Path) -> Machine:
    return Machine(scratch / "here", remote)


@pytest.fixture
def there(scratch: Path, remote: Path) -> Machine:
    return Machine(scratch / "there", remote)


def test_snapshots_travel_with_their_content_history_and_notes(here: Machine, there: Machine) -> None:
    one = here.take({"src/a": "one", "new": "x"}, "first note")
    put_files(here.path, {"committed": "1"})
    git("add", "committed", at=here.path)
    git("commit", "-qm", "not pushed as a branch", at=here.path)
    two = here.take({"src/a": "two"}, "second note")
    before = [each.of_the_user() for each in (here, there)]

    pushed = here.repository.snapshots.push()
    fetched = there.repository.snapshots.fetch()

    assert (pushed.remote, set(pushed.pushed), pushed.known) == ("origin", {one, two}, ())
    assert [each.snapshot_id for each in fetched.fetched] == [one, two]
    for each in (one, two):
        assert there.exported(each) == here.exported(each)
        assert list(there.repository.snapshots.verify(each)) == []
    found = there.repository.snapshots.named(two)
    sent = here.repository.snapshots.named(two)
    assert (found.parent_id, found.note, found.files, found.created_at) == (
        one,
        "second note",
        sent.files,
        sent.created_at,
    )
    assert (found.fetched_from, found.lock_id, found.fencing_token) == ("origin", None, None)
    after = [each.of_the_user() for each in (here, there)]
    assert after == before
    assert there.ours() == [f"{SNAPSHOTS}/{each}" for each in sorted((one, two))]
    for machine in (here, there):
        machine.require_sound()


def test_a_second_push_and_a_second_fetch_change_nothing(here: Machine, there: Machine, remote: Path) -> None:
    one = here.take({"src/a": "one"})
    here.repository.snapshots.push()
    there.repository.snapshots.fetch()
    before = git("for-each-ref", at=remote), there.ours(), len(events(there.repository))

    assert here.repository.snapshots.push() == ("origin", (), (one,))
    assert there.repository.snapshots.fetch() == ("origin", (), (one,))
    assert there.repository.snapshots.push() == ("origin", (), (one,))  # what was fetched is the same snapshot
    assert here.repository.snapshots.fetch() == ("origin", (), (one,))
    assert (git("for-each-ref", at=remote), there.ours(), len(events(there.repository))) == before


def test_no_head_moves_and_the_worktree_of_a_fetched_snapshot_is_only_a_label(here: Machine, there: Machine) -> None:
    base = there.take({"src/a": "base"})
    there.repository.snapshots.push()
    here.repository.snapshots.fetch()
    git("checkout", "-q", "--", ".", at=here.path)
    here.repository.snapshots.restore(base, "dev")
    there.repository.snapshots.fetch()
    child = forged(here, parent_id=base, worktree_id=MAIN)
    here.repository.snapshots.push(None, [child])
    there.repository.snapshots.fetch()

    assert there.repository.snapshots.named(child).parent_id == base
    assert there.repository.config(MAIN).head_snapshot_id == base
    assert [str(each) for each in there.repository.examine(strict=True)] == []  # not "the head is behind"


def forged(machine: Machine, **fields: object) -> str:
    """A snapshot whose descriptor is changed on disk."""
    made = machine.take({"src/a": os.urandom(4).hex()}, allow_empty=True)
    path = machine.repository.root / ".jvs/descriptors" / f"{made}.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **fields}, indent=2))
    return made


def test_only_named_snapshots_travel(here: Machine, there: Machine) -> None:
    one, two = here.take({"src/a": "one"}), here.take({"src/a": "two"})
    assert here.repository.snapshots.push("origin", ["head"]).pushed == (two,)
    assert here.repository.snapshots.push("origin", [one[:8]]).pushed == (one,)

    found = there.repository.snapshots.fetch("origin", [two[:8]]).fetched
    assert [(each.snapshot_id, each.parent_id) for each in found] == [(two, None)]
    with pytest.raises(NotFound, match="no snapshot"):
        there.repository.snapshots.fetch("origin", ["0123"])
    there.require_sound()


def test_the_remote_is_that_of_the_branch_or_origin_or_named(here: Machine, scratch: Path) -> None:
    other = scratch / "other.git"
    git("init", "-q", "--bare", other)
    git("remote", "add", "other", other, at=here.path)
    one = here.take({"src/a": "one"})

    assert here.repository.snapshots.push("other").pushed == (one,)
    git("config", "branch.trunk.remote", "other", at=here.path)
    assert here.repository.snapshots.push().remote == "other"
    git("config", "branch.trunk.remote", ".", at=here.path)
    assert here.repository.snapshots.push().remote == "origin"
    git("remote", "set-url", "origin", "../remote.git", at=here.path)  # from the top of the checkout
    assert here.repository.snapshots.push("origin") == ("origin", (), (one,))
    for name in ("nowhere", "--upload-pack=touch x", str(other)):
        with pytest.raises(NotFound, match="no remote"):
            here.repository.snapshots.fetch(name)


def test_a_fetched_snapshot_is_pinned_and_then_collectable(here: Machine, there: Machine) -> None:
    one = here.take({"src/a": "one"})
    here.repository.snapshots.push()
    there.repository.snapshots.fetch()

    (pin,) = there.repository.snapshots.pins()
    assert (pin.snapshot_id, pin.reason) == (one, "fetched from origin")
    assert propose(there.repository.context, store=False).candidates == ()
    there.repository.snapshots.remove_pin(pin.pin_id)
    assert [each.snapshot_id for each in propose(there.repository.context, store=False).candidates] == [one]


def test_a_fetched_snapshot_can_be_restored(here: Machine, there: Machine) -> None:
    one = here.take({"src/a": "one", "new": "x"})
    here.repository.snapshots.push()
    there.repository.snapshots.fetch()
    there.repository.snapshots.restore(one, "dev")
    assert files_in(there.repository.path("dev")) == there.exported(one)
    there.require_sound()


def test_content_that_is_missing_here_comes_back(here: Machine) -> None:
    one, two = here.take({"src/a": "one"}), here.take({"src/a": "two"})
    here.repository.snapshots.push()
    for each in (one, two):
        git("update-ref", "-d", f"{SNAPSHOTS}/{each}", at=here.path)
    path = here.repository.root / ".jvs/descriptors" / f"{two}.json"
    before = path.read_text()
    path.write_text(before.replace(json.loads(before)["payload_hash"], "0" * 40))
    repository = here.repository = Repository(here.path)
    with pytest.raises(Refused, match="another snapshot has this id here"):
        repository.snapshots.fetch()
    assert here.exported(one)["src/a"] == "one"
    path.write_text(before)
    assert [each.snapshot_id for each in repository.snapshots.fetch().fetched] == [two]

    assert here.exported(two)["src/a"] == "two"
    assert repository.snapshots.pins() == []  # it is the head
    assert not repository.snapshots.named(two).fetched_from
    here.require_sound()


def test_tags_that_git_copies_by_rules_of_the_user_do_no_harm(here: Machine, there: Machine) -> None:
    for machine in (here, there):
        git("config", "--add", "remote.origin.fetch", "+refs/holdfast/*:refs/holdfast/*", at=machine.path)
    one = here.take({"src/a": "one"})
    here.repository.snapshots.push()
    assert git("cat-file", "-t", f"{SNAPSHOTS}/{one}", at=here.path) == "commit"  # git would update what it tracks
    git("fetch", "-q", at=there.path)
    git("fetch", "-q", at=here.path)
    assert git("cat-file", "-t", f"{SNAPSHOTS}/{one}", at=here.path) == "tag"

    assert Repository(here.path).snapshots.push() == ("origin", (), (one,))
    assert [each.snapshot_id for each in there.repository.snapshots.fetch().fetched] == [one]
    for machine in (here, there):
        assert machine.exported(one)["src/a"] == "one"
        machine.require_sound()
    there.repository.context.home.retire(there.repository.context, [one])
    here.repository.context.home.retire(here.repository.context, [one])
    assert (here.ours(), there.ours()) == ([], [])


# --- Conflicts and failures ----------------------------------------------------------------------------


def tag_on(remote: Path, name: str, text: str | bytes, target: str = "trunk", tag: str | None = None) -> None:
    """Put a tag on the remote under any name, without a check."""
    commit = git("rev-parse", target, at=remote)
    content = f"object {commit}\ntype commit\ntag {tag or name}\ntagger x <x@y> 0 +0000\n\n".encode()
    content += text if isinstance(text, bytes) else text.encode()
    done = subprocess.run(
        ["git", "hash-object", "-t", "tag", "-w", "--stdin", "--literally"],
        cwd=remote, input=content, capture_output=True, check=True,
    )  # fmt: skip
    place = remote / SNAPSHOTS / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(done.stdout)


def test_a_snapshot_on_the_remote_is_never_replaced(here: Machine, remote: Path) -> None:
    one = here.take({"src/a": "one"})
    tag_on(remote, one, "{}")
    before = git("for-each-ref", at=remote)
    two = here.take({"src/a": "two"})
    with pytest.raises(AlreadyExists, match="another snapshot"):
        here.repository.snapshots.push()
    assert git("for-each-ref", at=remote) == before
    with pytest.raises(Refused, match="another snapshot has this id here"):
        here.repository.snapshots.fetch()
    assert here.exported(one)["src/a"] == "one"
    assert here.repository.snapshots.push("origin", [two]).pushed == (two,)


def test_one_that_appears_during_the_push_is_not_replaced(
    here: Machine, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = here.take({"src/a": "one"})
    real = carried.push

    def late(*arguments: Any) -> None:
        tag_on(remote, one, "{}")
        real(*arguments)

    monkeypatch.setattr(carried, "push", late)
    with pytest.raises(AlreadyExists, match="another snapshot"):
        here.repository.snapshots.push()


def test_a_remote_that_refuses_or_is_gone_says_why(here: Machine, remote: Path) -> None:
    one = here.take({"src/a": "one"})
    hook = remote / "hooks/pre-receive"
    hook.write_text("#!/bin/sh\necho protected >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(GitFailed, match=r"the remote origin: .*protected.*pre-receive hook declined\)$"):
        here.repository.snapshots.push()
    hook.unlink()
    remote.rename(remote.with_name("moved.git"))
    with pytest.raises(GitFailed, match=r"the remote origin: .*does not appear to be a git repository; .*") as failure:
        here.repository.snapshots.push()
    assert "make sure" not in failure.value.message
    assert "holdfast-" not in failure.value.message.replace(str(remote), "")
    with pytest.raises(GitFailed, match="Could not read from remote repository"):
        here.repository.snapshots.fetch()
    assert here.repository.snapshots.named(one)
    here.require_sound()


GOOD = {
    "worktree_id": "main", "parent_id": None, "created_at": "2026-01-01T00:00:00Z", "consistency_level": "quiesced",
    "engine": "git", "files": 2, "bytes": 8,
}  # fmt: skip
ID = "0123456789abcdef"


def hostile(remote: Path, name: str = ID, **fields: object) -> None:
    tree = git("rev-parse", "trunk^{tree}", at=remote)
    tag_on(remote, name, json.dumps({"snapshot_id": name, "payload_hash": tree, **GOOD, **fields}))


def plain(remote: Path) -> None:
    git("update-ref", f"{SNAPSHOTS}/{ID}", "trunk", at=remote)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a good one": (hostile, ""),
    "a name that is no id": (lambda remote: hostile(remote, "v1"), "not the id"),
    "a nested name": (lambda remote: hostile(remote, f"deep/{ID}"), "not the id"),
    "a commit": (plain, "not a tag"),
    "another id": (lambda remote: hostile(remote, snapshot_id="f" * 16), "its descriptor that of"),
    "another id in the tag": (
        lambda remote: tag_on(
            remote, ID, json.dumps({"snapshot_id": ID, "payload_hash": "", **GOOD}), tag="f" * 16
        ),
        "its tag is that of",
    ),
    "an id with a path": (lambda remote: hostile(remote, snapshot_id="../../x"), "cannot be understood"),
    "a parent with a path": (lambda remote: hostile(remote, parent_id="../x"), "cannot be understood"),
    "a worktree with a path": (lambda remote: hostile(remote, worktree_id=".."), "cannot be understood"),
    "another tree": (lambda remote: hostile(remote, payload_hash="0" * 40), "not that of its descriptor"),
    "another engine": (lambda remote: hostile(remote, engine="copy"), "not that of a snapshot of a git checkout"),
    "a negative size": (lambda remote: hostile(remote, bytes=-1), "not that of a snapshot of a git checkout"),
    "a huge descriptor": (lambda remote: hostile(remote, note="x" * (2 << 20)), "more than a descriptor may have"),
    "a long note": (lambda remote: hostile(remote, note="x" * 2000), "text in its descriptor"),
    "no JSON": (lambda remote: tag_on(remote, ID, b"\xff{"), "cannot be understood"),
    "two values": (lambda remote: tag_on(remote, ID, '{"engine":"git","engine":"x"}'), "cannot be understood"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_snapshot_is_refused_and_the_others_arrive(
    here: Machine, there: Machine, remote: Path, case: str
) -> None:
    plant, why = CASES[case]
    one = here.take({"src/a": "one"})
    here.repository.snapshots.push()
    plant(remote)
    before = there.of_the_user()
    if why:
        with pytest.raises(Refused, match=why) as refusal:
            there.repository.snapshots.fetch()
        assert refusal.value.facts["fetched"] == [one]
    else:
        assert {each.snapshot_id for each in there.repository.snapshots.fetch().fetched} == {one, ID}

    assert [name for name, _ in there.repository.context.store.scan(DESCRIPTORS)] == sorted(
        [one, *([] if why else [ID])]
    )
    assert there.of_the_user() == before
    assert not [each for each in there.ours() if "incoming" in each]
    there.require_sound()


def test_a_tree_with_a_bad_name_does_not_arrive(there: Machine, remote: Path) -> None:
    blob = git("rev-parse", "trunk:README", at=remote)
    raw = b"100644 ..\0" + bytes.fromhex(blob)
    tree = subprocess.run(
        ["git", "hash-object", "-t", "tree", "-w", "--stdin", "--literally"],
        cwd=remote, input=raw, capture_output=True, check=True,
    ).stdout.decode().strip()  # fmt: skip
    commit = git("-c", "user.name=u", "-c", "user.email=u@e", "commit-tree", "-m", "x", tree, at=remote)
    tag_on(remote, ID, json.dumps({"snapshot_id": ID, "payload_hash": tree, **GOOD}), target=commit)
    with pytest.raises(GitFailed):
        there.repository.snapshots.fetch()
    assert there.ours() == []
    there.require_sound()


def test_a_server_that_lists_impossible_names_is_not_asked_for_them(
    there: Machine, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile(remote)
    real = carried.advertised
    names = ["../../../heads/trunk", "..", "-x", "", "a:b", "x\nrefs/heads/trunk"]
    monkeypatch.setattr(carried, "advertised", lambda *of: dict.fromkeys(names, "0" * 40) | real(*of))
    with pytest.raises(Refused, match="not the id") as refusal:
        there.repository.snapshots.fetch()
    assert set(refusal.value.facts["refused"]) == set(names)  # type: ignore[call-overload]
    assert there.ours() == [f"{SNAPSHOTS}/{ID}"]


def test_local_facts_of_the_other_machine_do_not_arrive(there: Machine, remote: Path) -> None:
    hostile(remote, doomed_by="plan", lock_id="x", fencing_token=10**9, fetched_from="x", parent_id="f" * 16)
    (found,) = there.repository.snapshots.fetch().fetched
    assert (found.doomed_by, found.lock_id, found.fencing_token) == (None, None, None)
    assert (found.fetched_from, found.parent_id) == ("origin", None)
    there.require_sound()


def test_a_plain_repository_has_no_remotes(scratch: Path) -> None:
    with pytest.raises(Refused, match="transferred by git"):
        make_repository(scratch / "plain").snapshots.push()


def test_deinit_removes_what_a_killed_fetch_left(here: Machine) -> None:
    git("update-ref", "refs/holdfast/incoming/x/y", "HEAD", at=here.path)
    deinitialise(here.repository)
    assert here.ours() == []
    assert not (here.path / ".git/refs/holdfast").exists()


# --- Kills ---------------------------------------------------------------------------------------------


class Fetch(Scenario):
    """A fetch of two snapshots into the second of two clones."""

    def prepare(self, directory: Path) -> None:
        remote = directory / "remote.git"
        git("init", "-q", "--bare", "-b", "trunk", remote)
        here = Machine(directory / "here", remote)
        put_files(here.path, {"README": "read me"})
        git("add", "-A", at=here.path)
        git("commit", "-qm", "first", at=here.path)
        git("push", "-q", "origin", "HEAD:trunk", at=here.path)
        ids = [here.take({"a": "one"}), here.take({"a": "two"})]
        here.repository.snapshots.push()
        Machine(directory / "there", remote)
        (directory / "ids").write_text("\n".join(ids))

    def operate(self, directory: Path) -> None:
        Repository(directory / "there").snapshots.fetch()

    def check(self, directory: Path, outcome: Outcome) -> None:
        """Every second time by `doctor` alone; then a fetch brings what is missing."""
        path, ids = directory / "there", (directory / "ids").read_text().split()
        repository = Repository(path)
        for each in repository.snapshots.all_ids():
            assert list(repository.snapshots.verify(each)) == []
        if outcome.call is None or outcome.call.index % 2:
            assert repository.repair(strict=True).failed == ()
            left = git("for-each-ref", "--format=%(refname)", "refs/holdfast", at=path).split()
            assert left == [f"{SNAPSHOTS}/{each}" for each in sorted(repository.snapshots.all_ids())]
        repository.snapshots.fetch()
        assert repository.snapshots.all_ids() == sorted(ids)
        assert repository.snapshots.named(ids[1]).parent_id == ids[0]
        left = git("for-each-ref", "--format=%(refname)", "refs/holdfast", at=path).split()
        assert left == [f"{SNAPSHOTS}/{each}" for each in sorted(ids)]
        fetched = [str(each.facts["snapshot_id"]) for each in events(repository) if each.event == "snapshot_fetched"]
        assert sorted(fetched) == sorted(ids)
        git("fsck", "--strict", at=path)
        assert repository.repair(strict=True).failed == ()
        assert [str(each) for each in repository.examine(strict=True)] == []


class Push(Fetch):
    """A push of one more snapshot: it is on the remote whole, or not at all."""

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        machine = Repository(directory / "here")
        put_files(directory / "here", {"a": "three"})
        with machine.lease(MAIN) as lease:
            made = machine.snapshots.take(MAIN, Proof.of(lease))
        with (directory / "ids").open("a") as file:
            file.write(f"\n{made.snapshot_id}")

    def operate(self, directory: Path) -> None:
        Repository(directory / "here").snapshots.push()

    def check(self, directory: Path, outcome: Outcome) -> None:
        Repository(directory / "there").snapshots.fetch()
        repository = Repository(directory / "here")
        repository.snapshots.push()
        assert repository.repair(strict=True).failed == ()
        assert [str(each) for each in repository.examine(strict=True)] == []
        git("fsck", "--strict", at=directory / "remote.git")
        super().check(directory, outcome)


@pytest.mark.parametrize("scenario", [Fetch, Push])
@pytest.mark.sampled(1)
def test_a_kill_at_any_command_of_git_is_finished_by_the_next(scenario: type[Fetch], scratch: Path) -> None:
    assert kill_at_git_commands(scenario, scratch) > 5


@pytest.mark.long
@pytest.mark.parametrize("scenario", [Fetch, Push])
@pytest.mark.sampled(1)
def test_a_kill_at_any_durable_step_is_finished_by_the_next(scenario: type[Fetch]) -> None:
    kill_points(scenario(), names=LASTING, share=SHARE).require_clean(at_least=3)


# --- Commands ------------------------------------------------------------------------------------------


def test_the_commands(here: Machine, there: Machine, remote: Path) -> None:
    one = data(holdfast("snapshot", "--json", cwd=here.path))["snapshot_id"]
    put_files(here.path, {"src/a": "one"})
    two = data(holdfast("snapshot", "-m", "a note", "--json", cwd=here.path))["snapshot_id"]

    pushed = holdfast("snapshot", "push", cwd=here.path)
    assert (pushed.returncode, pushed.stdout.splitlines()[-1]) == (0, "2 snapshots pushed to origin.")
    fetched = holdfast("snapshot", "fetch", "origin", two[:8], cwd=there.path)
    assert (fetched.returncode, fetched.stdout.splitlines()[-1]) == (0, "1 snapshot fetched from origin.")
    assert f"{two}  main, 2 files" in fetched.stdout
    assert ": a note" in fetched.stdout
    assert data(holdfast("snapshot", "fetch", "--json", cwd=there.path))["fetched"] == [one]
    assert "main of origin" in holdfast("history", "--all", cwd=there.path).stdout
    assert "from origin" in holdfast("show", two, cwd=there.path).stdout
    assert data(holdfast("snapshot", "push", "--worktree", "main", "--json", cwd=here.path))["known"] == [two, one]

    misplaced = holdfast("snapshot", "-m", "x", "push", cwd=here.path)
    assert misplaced.returncode == 2
    assert "must follow 'holdfast snapshot push'" in misplaced.stderr
    unknown = holdfast("snapshot", "pull", cwd=here.path)
    assert unknown.returncode == 2
    assert "There is no command 'pull'" in unknown.stderr
    tag_on(remote, ID, "{}")
    assert holdfast("snapshot", "fetch", cwd=there.path).returncode == 7


# --- Side by side --------------------------------------------------------------------------------------


def test_fetches_at_the_same_time_publish_each_snapshot_once(here: Machine, there: Machine) -> None:
    ids = sorted(here.take({"src/a": str(number)}) for number in range(6))
    here.repository.snapshots.push()
    commands = [[*HOLDFAST, "snapshot", "fetch"], [*HOLDFAST, "doctor", "--fix"]]
    running = [
        subprocess.Popen(each, cwd=there.path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for each in (commands[0], commands[1], commands[0])
    ]
    for process in running:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said

    assert there.repository.snapshots.all_ids() == ids
    assert sum(each.event == "snapshot_fetched" for each in events(there.repository)) == len(ids)
    for each in ids:
        assert list(there.repository.snapshots.verify(each)) == []
    assert there.ours() == [f"{SNAPSHOTS}/{each}" for each in ids]
    there.require_sound()


def test_snapshots_of_a_sha256_repository_travel(scratch: Path) -> None:
    remote = scratch / "remote256.git"
    git("init", "-q", "--bare", "-b", "trunk", "--object-format=sha256", remote)
    seed = scratch / "seed256"  # older git versions clone an empty repository in the wrong format
    git("init", "-q", "-b", "trunk", "--object-format=sha256", seed)
    put_files(seed, {"README": "read me"})
    git("add", "-A", at=seed)
    git("commit", "-qm", "first", at=seed)
    git("push", "-q", remote, "trunk", at=seed)
    here = Machine(scratch / "one", remote)
    there = Machine(scratch / "two", remote)
    one = here.take({"a": "one"})
    here.repository.snapshots.push()
    there.repository.snapshots.fetch()
    assert there.exported(one) == here.exported(one)
    there.require_sound()
