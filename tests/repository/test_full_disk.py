"""A full disk: operations that free space or release leases still work."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import IoFailure
from holdfast.fs.reserve import FILES, LARGE, LARGE_BYTES, Reserve
from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Update
from holdfast.repository import gc
from holdfast.repository.context import MAIN
from holdfast.repository.gc_plan import propose, set_policy
from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.repository.retention import Policy
from holdfast.trees.verify import verify
from proof.interpose import Attempt, interposed
from tests.cli.commands import error, holdfast
from tests.issues.trackers import problems, tracker_at
from tests.repository import damage
from tests.repository.stages import events, files_in, put_files, unprobed
from tests.support.loop_mounts import LoopMount, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fills a Linux file system")

Mount = Callable[[str], LoopMount]


def fill_to_the_last_byte(directory: Path) -> None:
    """Leave no space for data or for names: write smaller and smaller files."""
    (directory / "ballast").mkdir(exist_ok=True)
    number = len(list((directory / "ballast").iterdir()))
    for size in (4 << 20, 64 << 10, 4096, 1024, 512, 1):
        for _ in range(1000):
            number += 1
            path = directory / "ballast" / str(number)
            try:
                with path.open("wb", buffering=0) as file:
                    block = os.urandom(size)
                    while True:
                        file.write(block)
                        os.fsync(file.fileno())
            except OSError:
                if not path.exists() or path.stat().st_size == 0:
                    break


def data_of(*arguments: str | Path) -> Any:
    """The data printed by a command, which must succeed."""
    done = holdfast(*arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["data"]


def codes_found(root: Path) -> set[str]:
    """The codes of the doctor's findings."""
    said = json.loads(holdfast("doctor", "--repo", root, "--json").stdout)
    return {each["code"] for each in said["data" if said["ok"] else "error"]["findings"]}


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
@pytest.mark.sampled(1)
def test_gc_frees_space_on_a_full_disk_and_leases_can_be_released(loop_mount: Mount, kind: str) -> None:
    disk = loop_mount(kind).path
    root = disk / "repository"
    initialise(root)
    with Repository(root) as repository:
        with repository.lease() as held:
            for number in range(6):
                shared = {f"shared-{number}/file": "same", f"shared-{number}/own/file": "same"}
                large = {"large": f"{number}" * (1 << 20), "shared-0/own/file": str(number)}
                put_files(repository.path(MAIN), {**shared, **large})
                time.sleep(0.03)  # else these files are too young for the stat cache
                newest = repository.snapshot(MAIN, held).snapshot_id
        repository.worktrees.create("other")
        lease = repository.leases.acquire(MAIN, repository.leases.request(ttl=3600.0)).lease
    fill_to_the_last_byte(disk)

    full = holdfast("lease", "acquire", "--repo", root, "--worktree", "other", "--json")
    assert error(full)["errno"] == errno.ENOSPC
    assert "gc plan" in error(full)["hint"]
    data_of("lease", "renew", "--repo", root, "--lock-id", lease.lock_id)
    fill_to_the_last_byte(disk)  # the reserve may have been refilled
    data_of("lease", "release", "--repo", root, "--lock-id", lease.lock_id)
    assert codes_found(root) == {"disk-full"}
    data_of("gc", "policy", "--keep-last", "1", "--repo", root)
    plan = data_of("gc", "plan", "--repo", root)
    assert len(plan["delete"]) == 5
    done = data_of("gc", "run", "--plan", plan["plan"], "--repo", root)
    assert done["deleted"] == 5
    assert len(list((root / ".jvs" / "remnants").iterdir())) >= 4

    assert codes_found(root) <= {"disk-full"}  # some blocks are reserved for root
    assert len(list((root / ".jvs" / "reserve").iterdir())) == FILES
    with Repository(root) as repository:
        assert repository.snapshots.all_ids() == [newest]
        descriptor = repository.snapshots.named("head")
        assert list(verify(repository.context.paths.tree(newest), descriptor.payload_hash)) == []
        assert "lock_released" in [each.event for each in events(repository)]


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
@pytest.mark.sampled(1)
def test_a_change_that_succeeds_on_a_nearly_full_disk_is_in_the_file(loop_mount: Mount, kind: str) -> None:
    disk = loop_mount(kind).path
    tracker = tracker_at(disk)
    tracker.initialise()
    issue_id = tracker.create(NewIssue(title="first")).id
    fill_to_the_last_byte(disk)
    outcomes = []
    for number, path in enumerate(sorted((disk / "ballast").iterdir(), key=lambda each: each.stat().st_size)):
        path.unlink()  # perhaps a block
        run("sync")
        outcomes.append(True)
        try:
            tracker.update(issue_id, Update(title=f"attempt {number}"))
        except IoFailure as failure:
            outcomes[-1] = failure.facts["errno"] != errno.ENOSPC
        title = json.loads((disk / f".jit/issues/{issue_id}.json").read_text())["title"]
        assert (title == f"attempt {number}") is outcomes[-1], f"{title!r} after {outcomes}"
        if sum(outcomes) == 3:
            break
    assert not outcomes[0]
    assert outcomes[-1]
    shutil.rmtree(disk / "ballast")
    tracker.update(issue_id, Update(title="enough"))
    assert problems(tracker) == []


def test_a_worktree_can_be_removed_from_a_full_disk(loop_mount: Mount) -> None:
    disk = loop_mount("ext4").path
    root = disk / "repository"
    initialise(root)
    with Repository(root) as repository:
        repository.worktrees.create("large")
        put_files(repository.path("large"), {"file": "x" * (8 << 20)})
    fill_to_the_last_byte(disk)
    refused = holdfast("worktree", "remove", "large", "--repo", root, "--json")
    assert error(refused)["errno"] == errno.ENOSPC  # a removal takes a snapshot first
    assert (root / "worktrees" / "large" / "file").stat().st_size == 8 << 20
    fill_to_the_last_byte(disk)
    data_of("worktree", "remove", "large", "--no-snapshot", "--repo", root)
    assert not (root / "worktrees" / "large").exists()
    assert codes_found(root) <= {"disk-full"}  # some blocks are reserved for root


def make_repository_on(disk: Path) -> tuple[Path, str]:
    """Make a repository with two snapshots; return its root and the older snapshot."""
    root = disk / "repository"
    initialise(root)
    with Repository(root) as repository, repository.lease() as held:
        put_files(repository.path(MAIN), {"file": "x" * (5 << 20)})
        older = repository.snapshot(MAIN, held).snapshot_id
        put_files(repository.path(MAIN), {"file": "y"})
        repository.snapshot(MAIN, held)
    set_policy(Repository(root).context, Policy(keep_last=1))
    return root, older


def test_a_snapshot_can_be_exported_from_a_full_disk(small_disk: Path, scratch: Path) -> None:
    root, older = make_repository_on(small_disk)
    fill_to_the_last_byte(small_disk)
    data_of("export", older, scratch / "saved", "--repo", root)
    assert (scratch / "saved" / "file").read_text() == "x" * (5 << 20)
    refused = holdfast("export", older, small_disk / "saved", "--repo", root, "--json")
    assert error(refused)["errno"] == errno.ENOSPC
    assert [each.name for each in small_disk.iterdir() if "saved" in each.name] == []


@pytest.mark.parametrize(
    ("make", "listed"),
    [(("pin", "add", "--reason", "why"), "pins"), (("ref", "create", "kept"), "references")],
    ids=["pin", "ref"],
)
def test_a_full_disk_refuses_new_pins_and_references_with_a_clear_error(
    small_disk: Path, make: tuple[str, ...], listed: str
) -> None:
    root, older = make_repository_on(small_disk)
    fill_to_the_last_byte(small_disk)
    refused = holdfast(*make, older, "--repo", root, "--json")
    assert error(refused)["errno"] == errno.ENOSPC
    assert "gc plan" in error(refused)["hint"]
    assert data_of(make[0], "list", "--repo", root)[listed] == []
    assert codes_found(root) == {"disk-full"}

    shutil.rmtree(small_disk / "ballast")
    data_of(*make, older, "--repo", root)
    assert len(data_of(make[0], "list", "--repo", root)[listed]) == 1


def test_pins_and_references_can_be_removed_on_a_full_disk_and_gc_frees_the_space(
    small_disk: Path,
) -> None:
    root, older = make_repository_on(small_disk)
    pin = data_of("pin", "add", older, "--repo", root)["pin_id"]
    data_of("ref", "create", "kept", older, "--repo", root)
    for away in (("pin", "remove", pin), ("ref", "delete", "kept")):
        fill_to_the_last_byte(small_disk)
        data_of(*away, "--repo", root)
    fill_to_the_last_byte(small_disk)
    plan = data_of("gc", "plan", "--repo", root)
    assert [each["snapshot_id"] for each in plan["delete"]] == [older]
    assert data_of("gc", "run", "--plan", plan["plan"], "--repo", root)["deleted"] == 1
    assert codes_found(root) == set()
    trail = [each.event for each in events(Repository(root))]
    assert {"pin_removed", "reference_deleted"} <= set(trail)


@pytest.mark.parametrize("name", ["unfinished commit", "unfinished operation", "orphaned tree"])
@pytest.mark.sampled(1)
def test_the_doctor_repairs_damage_on_a_full_disk(small_disk: Path, name: str) -> None:
    root, _ = make_repository_on(small_disk)
    planted = damage.ALL[name]
    planted.plant(Repository(root).context)
    fill_to_the_last_byte(small_disk)
    assert planted.code in codes_found(root)

    repaired = json.loads(holdfast("doctor", "--fix", "--repo", root, "--json").stdout)
    said = repaired["data" if repaired["ok"] else "error"]
    assert planted.code in {each["code"] for each in said["fixed"]}
    assert said["failed"] == []
    assert {each["code"] for each in said["findings"]} <= {"disk-full"}
    assert codes_found(root) <= {"disk-full"}


def test_gc_frees_inodes_on_a_disk_that_has_none_left(loop_mount: Mount) -> None:
    mounted = loop_mount("ext4")
    mounted.unmount()
    run("mkfs.ext4", "-q", "-F", "-N", "600", str(mounted.image))
    mounted.mount()
    root = mounted.path / "repository"
    initialise(root)
    with Repository(root) as repository, repository.lease() as held:
        for number in range(34):  # more than one batch
            put_files(repository.path(MAIN), {"file": str(number)})
            repository.snapshot(MAIN, held)
    with contextlib.suppress(OSError):
        for number in range(1000):
            (mounted.path / str(number)).touch()
    assert error(holdfast("lease", "acquire", "--repo", root, "--json"))["errno"] == errno.ENOSPC
    data_of("gc", "policy", "--keep-last", "1", "--repo", root)
    plan = data_of("gc", "plan", "--repo", root)
    assert data_of("gc", "run", "--plan", plan["plan"], "--repo", root)["deleted"] == 33
    assert codes_found(root) == set()


def test_without_a_reserve_gc_fails_and_says_why(loop_mount: Mount) -> None:
    """A control experiment: the reserve makes the difference."""
    disk = loop_mount("ext4").path
    initialise(disk / "repository")
    with Repository(disk / "repository") as repository, repository.lease() as held:
        for number in range(2):
            put_files(repository.path(MAIN), {"file": str(number)})
            repository.snapshot(MAIN, held)
        set_policy(repository.context, Policy(keep_last=1))
        while repository.context.paths.reserve.release():
            pass
    fill_to_the_last_byte(disk)
    failed = holdfast("gc", "plan", "--repo", disk / "repository", "--json")
    assert (error(failed)["code"], error(failed)["errno"]) == ("E_IO", errno.ENOSPC)
    assert len(data_of("gc", "plan", "--dry-run", "--repo", disk / "repository")["delete"]) == 1


def test_caches_are_deleted_after_the_reserve_is_used_up(scratch: Path) -> None:
    reserve = Reserve(scratch / "reserve", caches=scratch / "caches")
    reserve.fill()
    put_files(scratch / "caches", {"main.stat": "known", "dev.stat": "known"})
    assert reserve.release()
    assert len(files_in(scratch / "caches")) == 2
    assert reserve.release()
    assert files_in(scratch) == {}
    assert not reserve.release()


# --- Simulated disks --------------------------------------------------------------------------------


class FullDisk:
    """Refuses writes until the reserve is deleted; an exceeded quota behaves the same."""

    def __init__(self, reserve: Reserve, code: int) -> None:
        self.reserve = reserve
        self.code = code
        self.refused = 0

    def __call__(self, attempt: Attempt) -> Any:
        if attempt.name in ("write", "mkdir") and any(self.reserve.directory.iterdir()):
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        return attempt.perform()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_reserve_helps_on_a_full_disk_and_with_an_exceeded_quota(scratch: Path, code: int) -> None:
    initialise(scratch, probe=unprobed)
    repository = Repository(scratch)
    with repository.lease() as held:
        for number in range(3):
            put_files(repository.path(MAIN), {"file": str(number)})
            repository.snapshot(MAIN, held)
    lease = repository.leases.acquire(MAIN, repository.leases.request(ttl=3600.0)).lease
    context, reserve = repository.context, repository.context.paths.reserve
    steps: list[Callable[[], object]] = [
        lambda: repository.leases.renew(MAIN, lease.lock_id),
        lambda: repository.leases.release(MAIN, lease.lock_id),
        lambda: set_policy(context, Policy(keep_last=1)),
        lambda: gc.run(context, propose(context).plan.plan_id),
    ]
    for step in steps:
        assert reserve.fill()
        disk = FullDisk(reserve, code)
        with interposed(disk):
            step()
        assert disk.refused >= 1
    assert len(repository.snapshots.all_ids()) == 1
    assert repository.leases.state(MAIN) is None


def test_the_reserve_takes_real_space_and_is_refilled(scratch: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    reserve = Reserve(scratch / "reserve")
    reserve.refill()
    assert not reserve.directory.exists()  # a refill never creates a reserve
    assert reserve.fill()
    files = [reserve.directory / str(number) for number in range(FILES)]
    assert set(files) == set(reserve.directory.iterdir())
    assert all(each.stat().st_blocks * 512 >= LARGE_BYTES for each in files[:LARGE])
    files[0].write_bytes(b"torn")
    files[1].unlink()
    assert reserve.fill()
    assert all(each.stat().st_size == LARGE_BYTES for each in files[:LARGE])
    assert reserve.release()
    assert not reserve.release()
    reserve.refill()
    assert len(list(reserve.directory.iterdir())) == FILES


def test_only_a_full_disk_uses_the_reserve_and_only_once(scratch: Path) -> None:
    reserve = Reserve(scratch)
    reserve.fill()
    tries: list[int] = []

    def fail(code: int) -> Callable[[], None]:
        def work() -> None:
            tries.append(len(list(scratch.iterdir())))
            raise IoFailure("write", scratch, OSError(code, os.strerror(code)))

        return work

    with pytest.raises(IoFailure):
        reserve.relieve(fail(errno.EIO))
    assert tries == [FILES]
    with pytest.raises(IoFailure):
        reserve.relieve(fail(errno.ENOSPC))
    assert tries == [FILES, FILES, 0]
    assert len(list(scratch.iterdir())) == FILES
    reserve.release()
    tries.clear()
    with contextlib.suppress(IoFailure):
        reserve.relieve(fail(errno.ENOSPC))
    assert tries == [0], "a second attempt is pointless without a reserve"
