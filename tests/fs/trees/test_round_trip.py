"""What is captured comes back as it was, by every engine, on every file system, and has the same hash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.fs.trees import (
    Engine,
    capture,
    choose_engine,
    materialise,
    sync_tree,
    verify,
)
from tests.fs.trees.groves import grow, seen
from tests.support.loop_mounts import LoopMount

if sys.platform == "win32":
    pytest.skip("trees need directories that can be opened", allow_module_level=True)

FILE_BY_FILE = [Engine.COPY, Engine.LINKED, Engine.REFLINK]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, scratch: Path) -> Path:
    return tmp_path if request.param == "disk" else scratch


def round_trip(place: Path, engines: list[Engine]) -> None:
    """Capture with each engine, twice, and restore: all the same."""
    source = grow(place / "source")
    before, hashes = seen(source), set()
    for engine in engines:
        first = capture(source, place / f"{engine}-1", engine=engine, cache=place / "cache", quiesced=True)
        base = place / f"{engine}-1"
        again = capture(source, place / f"{engine}-2", engine=engine, base=base, quiesced=True)
        cached = capture(
            source, place / f"{engine}-3", engine=engine, base=base, cache=place / "cache", quiesced=False
        )
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
def test_everything_comes_back(place: Path, engine: Engine) -> None:
    round_trip(place, [engine])


def test_all_engines_that_go_file_by_file_give_one_hash(place: Path) -> None:
    round_trip(place, FILE_BY_FILE)


def test_all_engines_work_on_xfs(loop_mount: Callable[[str], LoopMount]) -> None:
    place = loop_mount("xfs").path

    assert choose_engine(place, place) is Engine.REFLINK
    round_trip(place, FILE_BY_FILE)


def test_all_engines_work_on_btrfs(loop_mount: Callable[[str], LoopMount]) -> None:
    place = loop_mount("btrfs").path
    assert choose_engine(place / ".", place) is Engine.BTRFS_SUBVOLUME  # the top of a file system is one
    round_trip(place, FILE_BY_FILE)
    subprocess.run(["btrfs", "subvolume", "create", str(place / "volume")], check=True, capture_output=True)
    grow(place / "volume" / "source")
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
    assert seen(place / "restored") == seen(place / "volume")
