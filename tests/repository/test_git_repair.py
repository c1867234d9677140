"""Repair of snapshots in a git home from files of worktrees, and how much deleting them would free."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.git import contents
from holdfast.repository.repository import Repository
from tests.repository.stages import files_stored, put_files
from tests.repository.test_git_home import of_the_user, require_sound
from tests.repository.test_git_home import path as path
from tests.repository.test_git_home import repository as repository
from tests.repository.test_git_home import unprobed as unprobed
from tests.support.homes import git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links")


def problems(repository: Repository, snapshot_id: str) -> set[tuple[str, str]]:
    return {(each.path, each.what) for each in repository.snapshots.verify(snapshot_id)}


def loose(path: Path) -> Path:
    """Turn all packs into objects that are files, and return the directory of these."""
    objects = path / ".git/objects"
    for pack in list((objects / "pack").glob("*.pack")):
        shutil.move(pack, path.parent / "pack")
        for each in (objects / "pack").glob(f"{pack.stem}.*"):
            each.unlink()
        piped(path, (path.parent / "pack").read_bytes(), "unpack-objects", "-q")
    return objects


def piped(path: Path, content: bytes, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=path, input=content, capture_output=True, check=True).stdout.decode()


def test_lost_and_changed_files_come_back_from_worktrees(repository: Repository, path: Path) -> None:
    put_files(path, {"lost": "l" * 100, "changed": "c" * 100, "renamed": "r" * 100, "nowhere": "n" * 100})
    (path / "link").symlink_to("target of the link")
    with repository.lease() as lease:
        taken = repository.snapshot(lease=lease).snapshot_id
        stored = files_stored(repository.context, taken)
        repository.worktrees.create("dev", snapshot=taken)
        dev = repository.path("dev")
        git("add", "-A", at=dev)
        (dev / "renamed").rename(dev / "other")
        git("add", "-A", at=dev)
        for name in ("lost", "changed", "renamed", "nowhere", "link"):
            (path / name).unlink()
        for top in (path, dev):
            put_files(top, {"nowhere": "something else"})
    objects, user = loose(path), of_the_user(path)
    before = {}
    for name in ("lost", "changed", "renamed", "nowhere", "link"):
        oid = git("rev-parse", f"refs/holdfast/snapshots/{taken}:{name}", at=path)
        before[name] = objects / oid[:2] / oid[2:]
    for name in ("lost", "renamed", "nowhere", "link"):
        before[name].unlink()
    before["changed"].chmod(0o644)
    before["changed"].write_bytes(b"garbage")
    assert {each for each, _ in problems(repository, taken)} == set(before)

    done = repository.snapshots.repair([taken])

    assert {each.path for each in done} == set(before) - {"nowhere"}
    assert {each.path: each.source for each in done}["renamed"] == str(dev / "other")
    assert problems(repository, taken) == {("nowhere", "missing")}
    assert of_the_user(path) == user
    assert repository.snapshots.repair([taken]) == []
    put_files(path, {"nowhere": stored["nowhere"]})
    assert [each.path for each in repository.snapshots.repair([taken])] == ["nowhere"]
    assert problems(repository, taken) == set()
    assert files_stored(repository.context, taken) == stored
    require_sound(repository)


def test_a_damaged_pack_is_repaired_beside_it(repository: Repository, path: Path) -> None:
    put_files(path, {"file": "".join(map(str, range(5000)))})
    with repository.lease() as lease:
        taken = repository.snapshot(lease=lease).snapshot_id
    oid = git("rev-parse", f"refs/holdfast/snapshots/{taken}:file", at=path)
    for index in (path / ".git/objects/pack").glob("*.idx"):
        offsets = dict(line.split()[1::-1] for line in piped(path, index.read_bytes(), "show-index").splitlines())
        if oid in offsets:
            pack = index.with_suffix(".pack")
            pack.chmod(0o644)
            with pack.open("r+b") as file:
                file.seek(int(offsets[oid]) + 20)
                file.write(b"damaged")
    assert {each for each, _ in problems(repository, taken)} == {"file"}
    assert [each.path for each in repository.snapshots.repair([taken])] == ["file"]
    assert problems(repository, taken) == set()


def objects_of(path: Path, *revisions: str) -> dict[str, int]:
    """Everything that these need, with its size on the disk."""
    oids = git("rev-list", "--objects", "--no-object-names", *revisions, at=path)
    sizes = piped(path, oids.encode() + b"\n", "cat-file", "--batch-check=%(objectname) %(objectsize:disk)")
    return {oid: int(size) for oid, size in (line.split() for line in sizes.splitlines())}


def test_the_reclaimable_size_is_exact_for_every_part_of_a_plan(
    repository: Repository, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, made = repository.context.home, []
    with repository.lease() as lease:
        for number in range(6):
            put_files(path, {"big": "".join(f"{number * 7919 + each}" for each in range(2000 * (1 + number % 3)))})
            put_files(path, {"both": f"{number // 2}" * 5000})
            made.append(repository.snapshot(lease=lease).snapshot_id)
    deleted = [made[2], made[0], made[1], made[4]]
    sizes = home.reclaimable(deleted)
    needs = {each: objects_of(path, f"refs/holdfast/snapshots/{each}") for each in made}
    others = objects_of(path, "--branches", "--tags", "refs/stash", "HEAD")
    for number, size in enumerate(sizes):
        kept = others.keys() | {oid for each in made if each not in deleted[:number] for oid in needs[each]}
        freed = {oid: disk for each in deleted[:number] for oid, disk in needs[each].items() if oid not in kept}
        assert size == sum(freed.values()), number
    assert all(one < other for one, other in itertools.pairwise(sizes))
    monkeypatch.setattr(contents, "_MOST_RUNS", 2)
    few = home.reclaimable(deleted)
    assert (few[0], few[2], few[4]) == (sizes[0], sizes[2], sizes[4])
    assert few == sorted(few)
