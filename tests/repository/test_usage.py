"""Processes that use a worktree are listed, and prevent it from being moved or replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InUse
from holdfast.repository.context import MAIN, Proof
from holdfast.repository.repository import Repository
from holdfast.repository.restore import Restored, RestoreOptions
from holdfast.repository.usage import usage_of
from tests.repository.stages import files_in, make_repository, put_files

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows does not move files in use anyway"),
]

WAYS = {
    "stands in": "import os; os.chdir(PATH)",
    "stands in a directory below": "import os; os.chdir(PATH + '/below')",
    "reads a file": "file = open(PATH + '/below/work')",
    "writes a file that was deleted": "import os; file = open(PATH + '/new', 'w'); os.unlink(PATH + '/new')",
    "holds the directory": "import os; fd = os.open(PATH, os.O_RDONLY)",
}
if sys.platform == "linux":
    WAYS["maps a file"] = (
        "import mmap, os; fd = os.open(PATH + '/below/work', os.O_RDONLY); "
        "mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ); os.close(fd)"
    )


@contextmanager
def process(program: str, directory: Path, *before: str) -> Iterator[int]:
    """Run the program in a process that lives until the block ends; yield its pid."""
    text = program.replace("PATH", repr(str(directory)))
    command = [*before, sys.executable, "-c", f"{text}\nprint('ready', flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == b"ready\n"
            yield running.pid
        finally:
            running.kill()


@pytest.fixture
def repository(scratch: Path) -> Repository:
    repository = make_repository(scratch / "repo")
    repository.worktrees.create("dev")
    put_files(repository.path("dev"), {"below/work": "in progress"})
    return repository


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1)
def test_a_process_that_uses_a_worktree_is_named_and_prevents_rename_and_removal(
    repository: Repository, way: str
) -> None:
    path = repository.path("dev")
    with process(WAYS[way], path) as pid:
        assert [user.pid for user in repository.worktrees.usage("dev").users] == [pid]
        for attempt in (
            lambda: repository.worktrees.change_name("dev", "new"),
            lambda: repository.worktrees.remove("dev", save=None),
        ):
            with pytest.raises(InUse, match=f"pid {pid} ") as refused:
                attempt()
            named = refused.value.facts["processes"]
            assert isinstance(named, list)
            assert named[0]["pid"] == pid
    assert files_in(path) == {"below/work": "in progress"}
    assert repository.leases.state("dev") is None, "the lease of the attempt was not released"
    assert usage_of(path).users == ()
    repository.worktrees.change_name("dev", "new")


def test_force_overrides_processes_that_use_the_worktree(repository: Repository) -> None:
    with process(WAYS["stands in"], repository.path("dev")):
        repository.worktrees.change_name("dev", "new", force=True)
        repository.worktrees.remove("new", save=None, force=True)
    assert [each.worktree_id for each in repository.worktrees.configs()] == [MAIN]


def test_a_process_is_seen_if_the_repository_is_opened_through_a_symlink(repository: Repository, scratch: Path) -> None:
    (scratch / "link").symlink_to(repository.root)
    with process(WAYS["stands in"], repository.path("dev")) as pid:
        named = Repository(scratch / "link")
        with pytest.raises(InUse, match=f"pid {pid} "):
            named.worktrees.remove("dev", save=None)


def test_a_worktree_whose_name_is_a_prefix_of_another_is_not_confused_with_it(repository: Repository) -> None:
    repository.worktrees.create("dev2")
    with process(WAYS["stands in"], repository.path("dev2")):
        assert repository.worktrees.usage("dev").users == ()
        assert len(repository.worktrees.usage("dev2").users) == 1


WRITING = {
    "appends": "file = open(PATH + '/below/work', 'a')",
    "has mapped": (
        "import mmap, os; fd = os.open(PATH + '/below/work', os.O_RDWR); mapped = mmap.mmap(fd, 0); os.close(fd)"
    ),
}


@pytest.mark.plain_home("it is about the exchange of directories")
def test_a_restore_in_place_names_the_processes_that_stand_in_the_old_directory(repository: Repository) -> None:
    path = repository.path("dev")
    with repository.lease("dev") as lease:
        proof = Proof(lease.lock_id, lease.token)
        first = repository.snapshots.take("dev", proof).snapshot_id
        how = RestoreOptions(reason="tested")
        with (
            process(WAYS["stands in"], path) as above,
            process(WAYS["stands in a directory below"], path) as below,
            process(WAYS["reads a file"], path),
        ):
            planned = repository.snapshots.plan("dev", first, how)
            assert {each.pid for each in planned.standing} == {above, below}
            part = repository.snapshots.restore_in_place("dev", first, proof, how._replace(path="below"))
            assert [(each.pid, each.path) for each in part.standing] == [(below, str(path / "below"))]
            whole = repository.snapshots.restore_in_place("dev", first, proof, how)
            assert [(each.pid, each.path) for each in whole.standing] == [(above, str(path))]
            assert str(whole.standing[0]).startswith(f"pid {above} (")


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports which processes write")
@pytest.mark.parametrize("way", WRITING)
def test_a_restore_in_place_is_refused_while_a_file_is_open_for_writing(repository: Repository, way: str) -> None:
    """Its later writes would go to a file that nobody finds again."""
    path = repository.path("dev")
    with repository.lease("dev") as lease:
        proof = Proof(lease.lock_id, lease.token)
        first = repository.snapshots.take("dev", proof).snapshot_id

        def restore(**how: Any) -> Restored:
            wanted = RestoreOptions(**{"reason": "tested", **how})
            return repository.snapshots.restore_in_place("dev", first, proof, wanted)

        with process(WAYS["stands in"], path), process(WAYS["reads a file"], path):
            restore()
        with process(WRITING[way], path) as pid:
            for part in (None, "below", "below/work"):
                with pytest.raises(InUse, match=f"pid {pid} "):
                    restore(path=part)
            put_files(path, {"other": "1"})
            repository.snapshots.take("dev", proof)
            restore(force=True)
    assert files_in(path) == {"below/work": "in progress"}


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="needs root to make a mount namespace",
)
def test_a_process_in_a_container_that_mounts_the_worktree_elsewhere_is_seen(
    repository: Repository, scratch: Path
) -> None:
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    mount = f'mount --bind {repository.path("dev")} {elsewhere} && cd {elsewhere}/below && exec "$@"'
    before = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh")
    with process("", elsewhere, *before) as pid:
        assert [user.pid for user in repository.worktrees.usage("dev").users] == [pid]
