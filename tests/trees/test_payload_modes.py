"""Nobody but its owner can write to a payload; the manifest has the original modes, and restoring follows it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.repository.compare import export
from holdfast.trees.capture import capture, capture_best
from holdfast.trees.engines import Engine, close_clone
from holdfast.trees.manifest import PAYLOAD, read_manifest
from holdfast.trees.restore import materialise
from holdfast.trees.scan import scan_directory
from holdfast.trees.shared_dirs import share_tree
from holdfast.trees.verify import verify
from holdfast.trees.walker import TreeWalker
from proof.interpose import Attempt, interposed
from tests.repository.stages import make_repository
from tests.support.juicefs import COHERENT, JuiceFs
from tests.support.loop_mounts import LoopMount

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")

MODES = {
    "": 0o2777,
    "open": 0o666,
    "group": 0o664,
    "setuid": 0o4777,
    "unreadable": 0o022,
    "private": 0o600,
    "sticky": 0o1777,
    "sticky/file": 0o646,
    "above": 0o777,
    "above/below": 0o770,
    "above/below/file": 0o660,
}


@pytest.fixture
def no_mask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def fill(source: Path) -> Path:
    source.mkdir(exist_ok=True)
    for name in filter(None, MODES):
        path = source / name
        path.mkdir() if name in ("sticky", "above", "above/below") else path.write_text(name)
    for name, mode in reversed(MODES.items()):
        (source / name).chmod(mode)
    return source


def modes(top: Path) -> dict[str, int]:
    every = [top, *(each for each in top.rglob("*") if not each.is_symlink())]
    return {str(each.relative_to(top)).lstrip("."): stat.S_IMODE(each.stat().st_mode) for each in every}


def require_closed(tree: Path) -> None:
    assert {name: f"{mode:o}" for name, mode in modes(tree).items() if mode & 0o7022} == {}
    for each in read_manifest(tree):
        name = os.fsdecode(each.path)
        assert each.mode == MODES[name], name
    assert list(verify(tree)) == []


@pytest.mark.usefixtures("no_mask")
@pytest.mark.parametrize("engine", [Engine.COPY, Engine.LINKED])
def test_only_the_owner_may_write_to_a_payload(tmp_path: Path, engine: Engine) -> None:
    source, cache = fill(tmp_path / "source"), tmp_path / "cache"
    capture(source, tmp_path / "a", engine=engine, cache=cache, quiesced=True)
    (source / "above/below/file").write_text("changed")  # its parents are created, others are shared
    capture(source, tmp_path / "b", engine=engine, base=tmp_path / "a", cache=cache, quiesced=True)
    share_tree(tmp_path / "b", tmp_path / "c")

    for name in "abc":
        require_closed(tmp_path / name)
        materialise(tmp_path / name, tmp_path / f"{name}-restored")
        assert modes(tmp_path / f"{name}-restored") == MODES


def test_an_exported_file_has_its_original_mode(scratch: Path) -> None:
    repository = make_repository(scratch / "repository")
    fill(repository.path("main"))
    with repository.lease() as held:
        made = repository.snapshot(lease=held)
    export(repository.context, made.snapshot_id, scratch / "all")
    export(repository.context, made.snapshot_id, scratch / "one", path=b"open")

    assert modes(scratch / "all") == MODES
    assert modes(scratch / "one") == {"": MODES["open"]}


def clone(source: Path, tree: Path, engine: Engine) -> None:
    for quiesced in (True, False):
        where = tree.with_name(f"{tree.name}-{quiesced}")
        capture(source, where, engine=engine, cache=tree.with_name("cache"), quiesced=quiesced)
        require_closed(where)
        materialise(where, where.with_name(f"{where.name}-restored"))
        assert modes(where.with_name(f"{where.name}-restored")) == MODES
    assert modes(source) == MODES


def test_the_clone_of_a_subvolume_is_closed_too(loop_mount: Callable[[str], LoopMount]) -> None:
    place = loop_mount("btrfs").path
    subprocess.run(["btrfs", "subvolume", "create", str(place / "source")], check=True, capture_output=True)
    clone(fill(place / "source"), place / "tree", Engine.BTRFS_SUBVOLUME)


def test_a_clone_of_juicefs_is_closed_too(juicefs: JuiceFs) -> None:
    place = juicefs.mount(*COHERENT)
    clone(fill(place / "source"), place / "tree", Engine.JUICEFS_CLONE)


def test_a_clone_with_files_of_other_users_is_closed_as_far_as_the_system_allows(tmp_path: Path) -> None:
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for name in ("own", "theirs"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o666)
    tmp_path.chmod(0o777)
    for path in (tmp_path, tmp_path / "own"):
        os.chown(path, 65534, 65534)
    with TreeWalker(tmp_path) as made:
        identity = scan_directory(made.enter("")).identity
        os.seteuid(65534)
        try:
            close_clone(made, [("", identity)])
        finally:
            os.seteuid(0)
    assert modes(tmp_path) == {"": 0o755, "own": 0o644, "theirs": 0o666}


# --- Verifying -----------------------------------------------------------------------------------------


def test_a_snapshot_of_an_earlier_version_that_others_may_write_is_sound(tmp_path: Path) -> None:
    capture(fill(tmp_path / "source"), tmp_path / "tree", engine=Engine.COPY, quiesced=True)
    for name in ("open", "group", "sticky/file", "sticky"):
        (tmp_path / "tree" / PAYLOAD / name).chmod(MODES[name] & 0o777)

    assert list(verify(tmp_path / "tree")) == []


@pytest.mark.parametrize(("name", "mode"), [("private", 0o602), ("group", 0o666), ("open", 0o600), ("open", 0o755)])
def test_another_mode_than_the_original_one_is_found(tmp_path: Path, name: str, mode: int) -> None:
    capture(fill(tmp_path / "source"), tmp_path / "tree", engine=Engine.COPY, quiesced=True)
    (tmp_path / "tree" / PAYLOAD / name).chmod(mode)

    assert [(each.path, each.what) for each in verify(tmp_path / "tree")] == [(name, "mode")]


def test_nobody_looks_into_a_restore_in_the_making(tmp_path: Path) -> None:
    source, seen = tmp_path / "source", set[int]()
    (source / "private").mkdir(parents=True)
    (source / "private").chmod(0o700)
    (source / "private/secret").write_text("x")
    source.chmod(0o755)
    capture_best(source, tmp_path / "tree", beside=tmp_path, quiesced=True)

    def look(attempt: Attempt) -> Any:
        if attempt.arguments[0] == "secret":
            seen.add(stat.S_IMODE((tmp_path / "out").stat().st_mode))
        return attempt.perform()

    with interposed(look, ("open",)):
        materialise(tmp_path / "tree", tmp_path / "out")
    assert seen == {0o700}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
