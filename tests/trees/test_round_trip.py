"""A captured directory is restored exactly, by every engine, on every file system, with the same hash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import (
    AlreadyExists,
    Corrupt,
    EngineUnavailable,
    NotFound,
    PartialSnapshot,
)
from holdfast.trees import engines as engines_module
from holdfast.trees.capture import capture, capture_best
from holdfast.trees.engines import Engine, choose_engine
from holdfast.trees.manifest import READY, read_manifest
from holdfast.trees.restore import materialise
from holdfast.trees.shared_dirs import share_tree
from holdfast.trees.verify import changes, verify
from holdfast.trees.walker import sync_tree
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import grow, seen

if sys.platform == "win32":
    pytest.skip("trees need directories that can be opened", allow_module_level=True)

FILE_BY_FILE = [Engine.COPY, Engine.LINKED, Engine.REFLINK]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, scratch: Path) -> Path:
    return tmp_path if request.param == "disk" else scratch


@pytest.mark.parametrize("time", [(1 << 63) + 10**9, -(1 << 63) - 10**9])
def test_a_time_that_64_bits_cannot_hold_does_not_prevent_a_capture(tmp_path: Path, time: int) -> None:
    """Archives may contain such times."""
    source, tree, cache = tmp_path / "source", tmp_path / "tree", tmp_path / "cache"
    source.mkdir()
    for name in ("file", "directory"):
        path = source / name
        path.touch() if name == "file" else path.mkdir()
        os.utime(path, ns=(time, time))
    capture(source, tree, engine=Engine.COPY, cache=cache, quiesced=True)
    assert list(changes(source, tree, cache=cache)) == []
    assert list(verify(tree)) == []
    materialise(tree, tmp_path / "back", cache=tmp_path / "another")
    assert list(changes(tmp_path / "back", tree, cache=tmp_path / "another")) == []


def round_trip(place: Path, engines: list[Engine]) -> None:
    """Capture repeatedly with each engine and restore: all results are equal."""
    source = grow(place / "source")
    before, hashes = seen(source), set()
    for engine in engines:
        first = capture(source, place / f"{engine}-1", engine=engine, cache=place / "cache", quiesced=True)
        base = place / f"{engine}-1"
        again = capture(source, place / f"{engine}-2", engine=engine, base=base, quiesced=True)
        cached = capture(source, place / f"{engine}-3", engine=engine, base=base, cache=place / "cache", quiesced=False)
        hashes |= {first.payload_hash, again.payload_hash, cached.payload_hash}
        for number in (1, 2, 3):
            tree = place / f"{engine}-{number}"
            sync_tree(tree)
            assert list(verify(tree, first.payload_hash)) == []
            materialise(tree, place / f"{engine}-restored-{number}")
            assert seen(place / f"{engine}-restored-{number}") == before
    assert len(hashes) == 1
    assert seen(source) == before


@pytest.mark.parametrize("engine", FILE_BY_FILE)
def test_everything_is_restored(place: Path, engine: Engine) -> None:
    round_trip(place, [engine])


def test_all_file_by_file_engines_give_the_same_hash(place: Path) -> None:
    round_trip(place, FILE_BY_FILE)


@pytest.mark.req("WT-12")
def test_all_engines_work_on_xfs(loop_mount: Callable[[str], LoopMount]) -> None:
    place = loop_mount("xfs").path

    assert choose_engine(place, place) is Engine.REFLINK
    round_trip(place, FILE_BY_FILE)


@pytest.mark.req("WT-12")
def test_all_engines_work_on_btrfs(loop_mount: Callable[[str], LoopMount]) -> None:
    place = loop_mount("btrfs").path
    assert choose_engine(place / ".", place) is Engine.BTRFS_SUBVOLUME  # the top of a file system is a subvolume
    round_trip(place, FILE_BY_FILE)
    subprocess.run(["btrfs", "subvolume", "create", str(place / "volume")], check=True, capture_output=True)
    grow(place / "volume" / "source")
    nested = ["btrfs", "subvolume", "create", str(place / "volume" / "source" / "nested")]
    subprocess.run(nested, check=True, capture_output=True)
    copied = capture(place / "volume", place / "copied", engine=Engine.COPY, quiesced=True)

    assert choose_engine(place / "volume", place) is Engine.BTRFS_SUBVOLUME
    whole = capture(
        place / "volume",
        place / "whole",
        engine=Engine.BTRFS_SUBVOLUME,
        cache=place / "cache-2",
        quiesced=True,
    )
    assert whole.payload_hash == copied.payload_hash
    assert whole.stored_bytes == 0
    assert list(verify(place / "whole", whole.payload_hash)) == []
    materialise(place / "whole", place / "restored")
    assert whole.not_preserved == ("source/nested: another filesystem is mounted there",)
    before, after = seen(place / "volume"), seen(place / "restored")
    assert before.pop(b"source/nested").kind == after.pop(b"source/nested").kind
    assert after == before


# --- Partial restores and shared trees --------------------------------------------------------------


@pytest.fixture
def tree(scratch: Path) -> Path:
    capture(grow(scratch / "source"), scratch / "tree", engine=Engine.LINKED, quiesced=True)
    return scratch / "tree"


@pytest.mark.parametrize("path", [b"a/b", b"a", b"plain", b"link", b"fifo", b"a/b/c/third name", b"new\nline"])
def test_a_single_path_can_be_restored(tree: Path, scratch: Path, path: bytes) -> None:
    materialise(tree, scratch / "part", only=path)
    whole, part = seen(scratch / "source"), seen(scratch / "part")
    below = [each for each in whole if each == path or each.startswith(path + b"/")]
    expected = {each[len(path) + 1 :]: whole[each] for each in below}

    assert part.keys() == expected.keys()
    for each, found in part.items():
        assert found._replace(names=frozenset()) == expected[each]._replace(names=frozenset())


def test_a_path_that_is_not_in_the_snapshot_is_not_found(tree: Path, scratch: Path) -> None:
    for path in (b"nothing", b"a/nothing", b"nothing/below", b"plain/below", b"../source"):
        with pytest.raises(NotFound):
            materialise(tree, scratch / "part", only=path)
        assert not (scratch / "part").exists()


def test_nothing_is_overwritten(tree: Path, scratch: Path) -> None:
    (scratch / "there").mkdir()
    with pytest.raises(AlreadyExists):
        materialise(tree, scratch / "there")
    with pytest.raises(AlreadyExists):
        materialise(tree, scratch / "there", only=b"plain")
    assert list((scratch / "there").iterdir()) == []


def test_an_incomplete_tree_is_not_restored(tree: Path, scratch: Path) -> None:
    (tree / READY).unlink()
    with pytest.raises(PartialSnapshot):
        materialise(tree, scratch / "restored")
    assert not (scratch / "restored").exists()


def test_a_tree_that_shares_everything_with_another_is_equal_to_it(tree: Path, scratch: Path) -> None:
    share_tree(tree, scratch / "second")
    (payload_hash,) = {fields["payload_hash"] for fields in ready(tree, scratch / "second")}

    assert list(verify(scratch / "second", payload_hash)) == []
    materialise(scratch / "second", scratch / "restored")
    assert seen(scratch / "restored") == seen(scratch / "source")


def ready(*trees: Path) -> list[dict[str, str]]:
    return [json.loads((each / READY).read_bytes()) for each in trees]


def test_the_manifest_can_be_listed_as_json(tree: Path) -> None:
    records = [each.as_record() for each in read_manifest(tree)]
    listed = json.loads(json.dumps(records))

    assert len({each["path"] for each in listed}) == len(listed) == len(seen(tree.parent / "source"))
    assert {each["kind"] for each in listed} >= set("dflps")
    assert next(each for each in listed if each["path"] == "dangling")["target"] == "../nowhere"


def test_a_newer_manifest_is_refused(tree: Path, scratch: Path) -> None:
    content = (tree / "manifest").read_bytes()
    (tree / "manifest").unlink()
    (tree / "manifest").write_bytes(content.replace(b"holdfast manifest 1\n", b"holdfast manifest 2\n"))
    with pytest.raises(Corrupt, match="format version 2") as caught:
        materialise(tree, scratch / "restored")
    assert "newer Holdfast" in caught.value.hint


# --- Engines ----------------------------------------------------------------------------------------


def test_an_engine_that_cannot_work_here_is_refused_with_the_reason(scratch: Path) -> None:
    for wanted in ("btrfs-subvolume", "juicefs-clone", "telepathy"):
        with pytest.raises(EngineUnavailable) as caught:
            choose_engine(scratch, scratch, wanted)
        assert caught.value.facts["engine"] == wanted
    assert choose_engine(scratch, scratch, "copy") is Engine.COPY
    assert choose_engine(scratch, scratch) in (Engine.LINKED, Engine.REFLINK)
    assert list(scratch.iterdir()) == []


def test_a_new_file_system_with_a_reused_device_number_is_probed_again(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device numbers are reused after an unmount."""
    kind, probed = "first", list[str]()

    def probe(_places: object) -> str:
        probed.append(kind)
        return f"it is on {kind}"

    monkeypatch.setattr(engines_module, "_found", {})
    monkeypatch.setattr(engines_module, "filesystem_kind", lambda _: kind)
    monkeypatch.setitem(engines_module._PROBES, Engine.REFLINK, probe)
    for each in ("first", "second", "second"):
        kind = each
        with pytest.raises(EngineUnavailable, match=each):
            choose_engine(scratch, scratch, Engine.REFLINK)
    assert probed == ["first", "second"]


STUB = """#!/bin/sh
# A stub for juicefs: takes the same arguments and copies.
[ "$1" = clone ] || exit 9
[ "$2" = --help ] && exit 0
[ "$2" = --preserve ] || exit 8
[ -e "$3/refused" ] && { echo "some reason" >&2; exit 7; }
exec cp -a -- "$3" "$4"
"""


@pytest.mark.req("WT-12")
def test_the_juicefs_engine_runs_juicefs_clone(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stub that copies, on a file system that only pretends to be JuiceFS."""
    programs = scratch / "programs"
    programs.mkdir()
    (programs / "juicefs").write_text(STUB)
    (programs / "juicefs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr("holdfast.trees.engines.filesystem_kind", lambda _path: "fuse.juicefs")
    monkeypatch.setattr("holdfast.trees.engines._found", {})
    source = grow(scratch / "source")

    (scratch / "shared").mkdir()
    (scratch / "shared").chmod(0o2770)
    with pytest.raises(EngineUnavailable, match="a group shares the repository"):
        choose_engine(source, scratch / "shared", Engine.JUICEFS_CLONE)
    assert choose_engine(source, scratch / "shared") is not Engine.JUICEFS_CLONE
    assert choose_engine(source, scratch) is Engine.JUICEFS_CLONE
    cloned = capture(source, scratch / "a", engine=Engine.JUICEFS_CLONE, cache=scratch / "cache", quiesced=True)
    copied = capture(source, scratch / "b", engine=Engine.COPY, quiesced=True)
    assert cloned.payload_hash == copied.payload_hash
    assert list(verify(scratch / "a", cloned.payload_hash)) == []
    (source / "plain").chmod(0o600)
    loose = capture(source, scratch / "d", engine=Engine.JUICEFS_CLONE, cache=scratch / "cache", quiesced=False)
    assert loose.payload_hash != cloned.payload_hash
    assert list(verify(scratch / "d", loose.payload_hash)) == []
    assert list(changes(source, scratch / "d", cache=scratch / "cache")) == []
    (source / "refused").touch()
    with pytest.raises(EngineUnavailable, match=r"juicefs clone.*status 7: some reason"):
        capture(source, scratch / "c", engine=Engine.JUICEFS_CLONE, quiesced=True)
    with pytest.raises(EngineUnavailable):
        capture_best(source, scratch / "e", beside=scratch, wanted=Engine.JUICEFS_CLONE, quiesced=True)
    other = capture_best(source, scratch / "f", beside=scratch, quiesced=True)
    assert other.engine is not Engine.JUICEFS_CLONE
    assert list(verify(scratch / "f", other.payload_hash)) == []
