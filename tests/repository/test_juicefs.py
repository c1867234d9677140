"""A real JuiceFS: snapshots with its own clones, and two mounts of one volume as two machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import (
    ConsistencyUnavailable,
    EngineUnavailable,
    FilesystemUnsafe,
    LockConflict,
    LockTimeout,
)
from holdfast.fs.probe import SAFE_OPTIONS, find_capabilities, require_safe, settings_of
from holdfast.locks.file_lock import FileLocker
from holdfast.repository.context import MAIN
from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.trees import engines as cloning
from holdfast.trees.capture import capture, capture_best
from holdfast.trees.engines import Engine, choose_engine
from holdfast.trees.restore import materialise
from holdfast.trees.verify import verify
from proof.crash import Kill, Report, fresh, judge, run_killed
from proof.effort import SHARE, rounds
from tests.cli.commands import environment, error, holdfast
from tests.repository.interruptions import FEW, SEEN, cases, world
from tests.repository.stages import events, files_in, files_kept, put_files, unprobed
from tests.support.juicefs import COHERENT, JuiceFs
from tests.trees.groves import grow, seen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="JuiceFS is mounted on Linux")

CACHING = ("--attr-cache", "600", "--entry-cache", "600", "--dir-entry-cache", "600")
"""Caches that outlive every test."""


@pytest.fixture(scope="module")
def here(juicefs: JuiceFs) -> Path:
    """The volume as mounted on one machine."""
    return juicefs.mount(*COHERENT, "--enable-xattr")


@pytest.fixture(scope="module")
def there(juicefs: JuiceFs, here: Path) -> Path:
    """The volume as mounted on another machine."""
    return juicefs.mount(*COHERENT, "--enable-xattr")


@pytest.fixture(scope="module")
def caching(juicefs: JuiceFs, here: Path) -> Path:
    """The volume as mounted on a machine that caches names and attributes."""
    return juicefs.mount(*CACHING, "--enable-xattr")


@pytest.fixture
def place(here: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    directory = here / request.node.name[:40]
    directory.mkdir()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def data_of(*arguments: str | Path, cwd: Path, **extra: str) -> Any:
    """The data printed by a command, which must succeed."""
    done = holdfast(*arguments, "--json", cwd=cwd, env=extra)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["data"]


# --- Safety of mounts -------------------------------------------------------------------------------


@pytest.mark.req("WT-12")
def test_a_mount_without_caches_is_safe_and_one_with_caches_is_refused(here: Path, caching: Path) -> None:
    found = require_safe(here)
    assert (found.kind, found.network, found.flock, found.link) == ("fuse.juicefs", True, True, True)
    assert found.rename_exchange
    assert found.sync_directory
    assert settings_of(here) == ({}, False)
    with pytest.raises(FilesystemUnsafe, match="caches of names") as caught:
        require_safe(caching)
    assert SAFE_OPTIONS in caught.value.message
    assert find_capabilities(caching).troubles(records_elsewhere=True) == []
    refused = holdfast("init", caching / "refused", "--json")
    assert error(refused)["code"] == "E_FILESYSTEM_UNSAFE"
    assert not (caching / "refused" / ".jvs").exists()


def test_unreadable_settings_count_as_unsafe(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.fs.probe._CONFIGS", ("not-there",))
    with pytest.raises(FilesystemUnsafe, match="only root may"):
        require_safe(here)
    initialise(here / "unknown", probe=unprobed)
    with Repository(here / "unknown") as repository:
        (found,) = repository.examine()
    assert (found.code, found.severity) == ("filesystem-unsafe", "warning")  # only a warning: root could read them


def test_a_user_file_is_not_mistaken_for_the_settings(juicefs: JuiceFs, here: Path) -> None:
    mounted = juicefs.mount("--prefix-internal")  # frees the name for user files
    (mounted / ".config").write_bytes((here / ".config").read_bytes())
    found = settings_of(mounted)
    assert found is not None
    assert "entry-cache" in found.remembers


def test_a_mount_with_writeback_is_refused(juicefs: JuiceFs) -> None:
    with pytest.raises(FilesystemUnsafe, match="writeback"):
        require_safe(juicefs.mount(*COHERENT, "--writeback"))


def test_a_mount_with_caches_does_read_stale_records(here: Path, caching: Path) -> None:
    """The reason for the refusal: a stale read under the lock, after a rename on another machine."""
    record, seen_there = here / "record", caching / "record"
    record.write_text("old")
    assert seen_there.read_text() == "old"
    old = seen_there.stat().st_ino
    (here / "draft").write_text("new")
    os.replace(here / "draft", record)
    with FileLocker().lock_exclusive(caching / "lock"):
        assert seen_there.stat().st_ino == old
    record.unlink()


# --- Snapshots --------------------------------------------------------------------------------------


@pytest.mark.req("WT-12")
@pytest.mark.long
def test_every_engine_captures_a_directory_identically(place: Path) -> None:
    source = without_empty_attributes(grow(place / "source"))
    before = seen(source)
    assert choose_engine(source, place) is Engine.JUICEFS_CLONE
    engines = [Engine.JUICEFS_CLONE, Engine.COPY, Engine.LINKED]
    hashes = set()
    for engine in engines:
        for quiesced in (True, False):
            tree = place / f"{engine}-{quiesced}"
            made = capture(source, tree, engine=engine, cache=place / "cache", quiesced=quiesced)
            hashes.add(made.payload_hash)
            assert made.not_preserved == ()
            assert list(verify(tree, made.payload_hash)) == []
            materialise(tree, place / f"{engine}-{quiesced}-again")
            again = seen(place / f"{engine}-{quiesced}-again")
            special = {path for path, each in before.items() if path.rpartition(b"/")[2] in SPECIAL}
            assert {path: again[path] for path in again if path not in special} == {
                path: each for path, each in before.items() if path not in special
            }
    assert len(hashes) == 1
    assert seen(source) == before
    cloned = place / f"{Engine.JUICEFS_CLONE}-True" / "payload"
    assert (cloned / "other name").samefile(cloned / "a" / "one")


@pytest.mark.req("WT-12")
def test_a_directory_that_juicefs_cannot_clone_is_captured_by_the_next_best_engine(place: Path) -> None:
    """With its metadata in SQL, JuiceFS cannot clone an empty extended attribute."""
    source = grow(place / "source")
    with pytest.raises(EngineUnavailable, match="juicefs clone"):
        capture(source, place / "cloned", engine=Engine.JUICEFS_CLONE, quiesced=True)
    made = capture_best(source, place / "tree", beside=place, quiesced=True)
    assert made.engine is Engine.LINKED
    assert list(verify(place / "tree", made.payload_hash)) == []


def without_empty_attributes(top: Path) -> Path:
    if sys.platform != "linux":
        raise NotImplementedError
    for path in (top / "plain", top / "empty"):
        times = path.stat().st_mtime_ns
        os.removexattr(path, "user.empty")
        os.utime(path, ns=(times, times))
    return top


SPECIAL = {b"fifo", b"socket", b"device"}


def test_hard_links_are_recreated_in_a_read_only_directory(place: Path) -> None:
    source = place / "source"
    (source / "locked").mkdir(parents=True)
    (source / "locked" / "one").write_text("content")
    os.link(source / "locked" / "one", source / "other")
    os.link(source / "locked" / "one", source / "locked" / "two")
    (source / "locked").chmod(0o555)
    os.utime(source / "locked", ns=(10**18, 10**18))
    made = capture(source, place / "tree", engine=Engine.JUICEFS_CLONE, quiesced=False)
    clone = place / "tree" / "payload"
    assert (clone / "locked" / "one").stat().st_nlink == 3
    assert (clone / "locked").stat().st_mtime_ns == 10**18
    assert (clone / "locked").stat().st_mode & 0o777 == 0o555
    assert list(verify(place / "tree", made.payload_hash)) == []


@pytest.mark.req("WT-12")
@pytest.mark.parametrize("by", ["this machine", "another machine"])
def test_a_change_during_the_clone_fails_a_quiesced_snapshot(
    place: Path, here: Path, there: Path, caching: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Even if this machine has cached the old attributes, and so does not see a write by the other one."""
    name = place.relative_to(here)
    seen_by = here if by == "this machine" else caching
    writer = here if by == "this machine" else there
    put_files(here / name / "source", {"file": "before", "other": "same"})
    source = seen_by / name / "source"
    real = cloning.clone_directory

    def change_first(one: str, other: str) -> None:
        put_files(writer / name / "source", {"file": "after!"})
        real(one, other)

    monkeypatch.setattr(cloning, "clone_directory", change_first)
    with pytest.raises(ConsistencyUnavailable, match="file"):
        capture(source, seen_by / name / "tree", engine=Engine.JUICEFS_CLONE, quiesced=True)
    loose = capture(source, seen_by / name / "loose", engine=Engine.JUICEFS_CLONE, quiesced=False)
    assert list(verify(seen_by / name / "loose", loose.payload_hash)) == []


@pytest.mark.req("WT-12")
@pytest.mark.long
def test_a_typical_workflow_works_on_juicefs(place: Path) -> None:
    root = place / "repository"
    made = data_of("init", root, cwd=place)
    assert made["filesystem"] == "fuse.juicefs"
    main = root / "main"
    put_files(main, {"file": "one", "directory/below": "kept"})
    program = 'import pathlib; pathlib.Path("file").write_text("two")'
    for each in ("pass", program):
        done = holdfast("run", "--snapshot", "--", sys.executable, "-c", each, cwd=main)
        assert done.returncode == 0, done.stderr
    shown = data_of("show", "head~1", cwd=main)
    first = shown["snapshot_id"]
    assert shown["engine"] == "juicefs-clone"
    assert [each["path"] for each in data_of("diff", first, "head", cwd=main)["changes"]] == ["file"]
    assert data_of("info", cwd=main)["warnings"] == []
    data_of("verify", "--all", cwd=main)
    data_of("restore", first, "old", cwd=main)
    assert files_in(root / "worktrees" / "old") == {"file": "one", "directory/below": "kept"}
    put_files(main, {"unsaved": "work"})
    data_of("restore", first, "--inplace", "--reason", "tested", cwd=root)
    assert files_in(main) == {"file": "one", "directory/below": "kept"}
    data_of("worktree", "rename", "old", "older", cwd=root)
    data_of("worktree", "remove", "older", "--keep-for", "0s", cwd=root)
    data_of("gc", "policy", "--keep-last", "1", cwd=root)
    plan = data_of("gc", "plan", cwd=root)
    assert plan["delete"] != []
    data_of("gc", "run", "--plan", plan["plan"], cwd=root)
    assert len(data_of("history", "--all", cwd=root)["snapshots"]) == 1
    assert data_of("doctor", "--strict", cwd=root)["findings"] == []
    assert list((root / ".jvs" / "tmp").iterdir()) == []


@pytest.mark.req("WT-12")
@pytest.mark.long
def test_a_kill_at_any_call_of_a_snapshot_leaves_the_old_state_or_the_new(place: Path) -> None:
    report = Report("killed on JuiceFS")
    with world(FEW) as old:
        case = cases(old)["snapshot"]
        for index in range(1, 1000, 13 if SHARE == 1 else 61):
            with fresh(place) as directory:
                outcome = run_killed(case, directory, Kill.BEFORE, index, names=SEEN)
                report.add(outcome, judge(case, directory, outcome), "")
            if outcome.call is None:
                break
    report.require_clean(at_least=3 if SHARE == 1 else 1)


@pytest.mark.long
def test_committed_data_survives_a_crash_of_the_mount(juicefs: JuiceFs) -> None:
    """The mount process buffers unsynced data, which is lost when it is killed."""
    mounted = juicefs.mount(*COHERENT)
    root = mounted / "outlives"
    initialise(root)
    with Repository(root) as repository, repository.lease() as held:
        put_files(repository.path(MAIN), {f"file-{number}": "x" * number for number in range(0, 2 << 20, 99999)})
        taken = [
            repository.snapshot(MAIN, held, engine=engine).snapshot_id
            for engine in (Engine.COPY, Engine.LINKED, Engine.JUICEFS_CLONE)
        ]
    with Repository(root) as repository:
        lease = repository.leases.acquire(MAIN, repository.leases.request(ttl=3600.0)).lease
    juicefs.crash(mounted)
    again = juicefs.mount(*COHERENT)
    with Repository(again / "outlives") as repository:
        found = repository.leases.state(MAIN)
        assert found is not None
        assert found.lease.lock_id == lease.lock_id
        assert [each.event for each in events(repository)][-1] == "lock_acquired"
        for each in taken:
            assert list(repository.snapshots.verify(each)) == []


# --- Two machines -----------------------------------------------------------------------------------


def test_a_file_lock_of_one_machine_excludes_the_other(place: Path, here: Path, there: Path) -> None:
    ours = place / "file"
    theirs = there / ours.relative_to(here)
    with FileLocker().lock_exclusive(ours), pytest.raises(LockTimeout):
        FileLocker(timeout=0.1).lock_exclusive(theirs)
    FileLocker(timeout=10.0).lock_exclusive(theirs).release()


ROUNDS = rounds(20, least=1)

_RIVAL = """
import os, pathlib, sys, time
from holdfast.errors import LockConflict
from holdfast.repository.repository import Repository
root, start, rounds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
repository = Repository(root)
print("ready", flush=True)
while not start.exists():
    time.sleep(0.001)
won = 0
while won < rounds:
    try:
        with repository.lease(ttl=60.0) as held:
            begun = time.monotonic()
            count = int((root / "main" / "count").read_text())
            (root / "main" / "count").write_text(str(count + 1))
            print(held.token, begun, time.monotonic(), flush=True)
            won += 1
    except LockConflict:
        time.sleep(0.002)
"""


@pytest.mark.long
@pytest.mark.req("WT-12")
def test_leases_of_two_machines_exclude_each_other(place: Path, here: Path, there: Path) -> None:
    """A process on each of two mounts increments a number that only the lease protects."""
    initialise(place / "repository")
    put_files(place / "repository" / "main", {"count": "0"})
    start = place / "start"
    roots = [machine / (place / "repository").relative_to(here) for machine in (here, there)]
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", _RIVAL, str(root), str(start), str(ROUNDS)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for root in roots
    ]
    for rival in rivals:
        assert rival.stdout is not None
        assert rival.stdout.readline() == "ready\n"
    start.touch()
    reported = [line.split() for rival in rivals for line in rival.communicate(timeout=120)[0].splitlines()]
    assert [rival.returncode for rival in rivals] == [0] * len(rivals)
    held = sorted((int(token), float(begun), float(ended)) for token, begun, ended in reported)
    assert [token for token, _, _ in held] == list(range(1, len(rivals) * ROUNDS + 1))
    assert all(one[2] <= other[1] for one, other in pairwise(held)), "two processes held the lease at once"
    assert (place / "repository" / "main" / "count").read_text() == str(len(held))
    for root in roots[:2]:
        with Repository(root) as repository:
            assert sum(each.event == "lock_acquired" for each in events(repository)) == len(held)


@pytest.mark.long
def test_snapshots_of_two_machines_form_one_linear_history(place: Path, here: Path, there: Path) -> None:
    root = place / "repository"
    initialise(root)
    taken = []
    for number in range(6):
        machine = (here, there)[number % 2]
        with Repository(machine / root.relative_to(here)) as repository:
            put_files(repository.root / "main", {"file": str(number)})
            with repository.lease() as held:
                taken.append(repository.snapshot(MAIN, lease=held).snapshot_id)
            line = repository.snapshots.line(MAIN).entries
            assert [each.descriptor.snapshot_id for each in line] == taken[::-1]
    with Repository(there / root.relative_to(here)) as repository:
        for each in taken:
            assert list(repository.snapshots.verify(each)) == []


@pytest.mark.long
@pytest.mark.req("WT-12")
def test_a_mount_with_caches_is_safe_if_the_records_are_on_a_server(here: Path, caching: Path, etcd_url: str) -> None:
    """The server keeps the leases, and trees are intact whatever a machine has cached."""
    initialise(caching / "served", store=etcd_url)
    taken = []
    for number in range(4):
        machine = (here, caching)[number % 2]
        with Repository(machine / "served") as repository, repository.lease() as held:
            with Repository(here / "served") as other, pytest.raises(LockConflict):
                other.lease()
            put_files(repository.path(MAIN), {f"file-{number}": str(number)})
            taken.append(repository.snapshot(MAIN, held))
    with Repository(caching / "served") as repository:
        for number, each in enumerate(taken):
            assert list(repository.snapshots.verify(each.snapshot_id)) == []
            kept = files_kept(repository.context.paths.tree(each.snapshot_id))
            assert kept[f"file-{number}"] == str(number)
        assert {each.code for each in repository.examine(strict=True)} <= {"store-risky"}
    info = data_of("info", cwd=caching / "served")
    assert info["store"] == etcd_url
    assert any("caches of names" in each for each in info["warnings"])
