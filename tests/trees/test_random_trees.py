"""Random trees, edits and races: the shortcuts give the same result as a full copy."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConsistencyUnavailable
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import PAYLOAD, read_manifest
from holdfast.trees.restore import materialise
from holdfast.trees.results import Change
from holdfast.trees.shared_dirs import located, read_shared_directories
from holdfast.trees.verify import changes, compare, verify
from holdfast.trees.walker import remove_tree
from proof.effort import rounds, until
from tests.trees.groves import seen

ODD = st.binary(min_size=1, max_size=4).filter(lambda name: not set(name) & {0, 47} and name.strip(b"."))
NAME = st.one_of(st.sampled_from(["a", "b", "c", "ä", "a b", "-", "a.b"]), ODD.map(os.fsdecode))
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join)
CONTENT = st.binary(max_size=40)
MODE = st.sampled_from([0o644, 0o600, 0o755, 0o400])
TIME = st.integers(1, 2**33).map(lambda second: second * 1_000_000_000 + 7)

EDIT = st.one_of(
    st.tuples(st.just("write"), PATH, CONTENT),
    st.tuples(st.just("mkdir"), PATH, st.none()),
    st.tuples(st.just("symlink"), PATH, NAME),
    st.tuples(st.just("link"), PATH, PATH),
    st.tuples(st.just("rename"), PATH, PATH),
    st.tuples(st.just("remove"), PATH, st.none()),
    st.tuples(st.just("chmod"), PATH, MODE),
    st.tuples(st.just("utime"), PATH, TIME),
    st.tuples(st.just("fifo"), PATH, st.none()),
    st.tuples(st.just("grow"), PATH, st.integers(0, 300_000)),
)
EDITS = st.lists(EDIT, max_size=12)


def _write(target: Path, content: bytes) -> None:
    if not target.is_symlink() and not target.is_fifo():
        target.write_bytes(content)


def _remove(target: Path, _: object) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink()


def _chmod(target: Path, mode: int) -> None:
    if not target.is_symlink() and not target.is_dir():
        target.chmod(mode)


def _fifo(target: Path, _: object) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    os.mkfifo(target)


def _grow(target: Path, size: int) -> None:
    if target.is_file() and not target.is_symlink():
        os.truncate(target, size)


HOW: dict[str, Callable[[Path, Any], object]] = {
    "write": _write,
    "mkdir": lambda target, _: target.mkdir(),
    "symlink": lambda target, leads_to: target.symlink_to(leads_to),
    "link": lambda target, source: os.link(source, target, follow_symlinks=False),
    "rename": lambda target, source: source.rename(target),
    "remove": _remove,
    "chmod": _chmod,
    "utime": lambda target, stamp: os.utime(target, ns=(stamp, stamp), follow_symlinks=False),
    "fifo": _fifo,
    "grow": _grow,
}


def edit(top: Path, how: str, path: str, extra: Any) -> None:
    """Apply a change to a directory; skip it if it is impossible."""
    target = top / path
    try:
        if how not in ("remove", "chmod", "utime"):
            target.parent.mkdir(parents=True, exist_ok=True)
        HOW[how](target, top / extra if how in ("link", "rename") else extra)
    except OSError:
        return


@contextmanager
def place() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-", dir=memory) as made:
        (Path(made) / "source").mkdir()
        yield Path(made)


@given(edits=EDITS)
@settings(max_examples=rounds(40, least=5), deadline=None)
def test_a_random_tree_is_restored_exactly(edits: list[tuple[str, str, Any]]) -> None:
    with place() as here:
        for each in edits:
            edit(here / "source", *each)
        before = seen(here / "source")
        first = capture(here / "source", here / "a", engine=Engine.LINKED, cache=here / "1", quiesced=True)
        materialise(here / "a", here / "restored", cache=here / "2")
        again = capture(
            here / "restored",
            here / "b",
            engine=Engine.LINKED,
            base=here / "a",
            cache=here / "2",
            quiesced=True,
        )

        assert again.payload_hash == first.payload_hash
        assert seen(here / "restored") == seen(here / "source") == before
        assert list(verify(here / "b", first.payload_hash)) == []
        assert list(changes(here / "restored", here / "a", cache=here / "2")) == []


@given(rounds=st.lists(EDITS, min_size=2, max_size=4))
@settings(max_examples=rounds(40, least=5), deadline=None)
@pytest.mark.long
def test_after_random_edits_a_linked_capture_equals_a_full_copy(
    rounds: list[list[tuple[str, str, Any]]],
) -> None:
    with place() as here:
        source, base = here / "source", None
        for number, edits in enumerate(rounds):
            for each in edits:
                edit(source, *each)
            cheap, long = here / f"cheap-{number}", here / f"long-{number}"
            cache = here / "cache"
            linked = capture(source, cheap, engine=Engine.LINKED, base=base, cache=cache, quiesced=True)
            copied = capture(source, long, engine=Engine.COPY, quiesced=False)

            assert linked.payload_hash == copied.payload_hash
            assert list(verify(cheap, linked.payload_hash)) == []
            assert list(changes(source, cheap, cache=cache)) == []
            if base is not None:
                assert applied(base, compare(base, cheap)) == set(seen(source))
            base = cheap


def applied(tree: Path, differences: Iterator[Change]) -> set[bytes]:
    """The paths of a tree after these changes.

    A file that replaces a directory, or the reverse, is one removal and one addition of the same path.
    """
    entries = {(each.path, each.kind == "d") for each in read_manifest(tree)}
    order = []
    for each in differences:
        entry = (each.path, each.kind == "d")
        order.append(entry)
        if each.what == "added":
            assert entry not in entries
            entries.add(entry)
        elif each.what == "removed":
            entries.remove(entry)
        else:
            assert entry in entries
            assert each.aspects
    assert len(set(order)) == len(order)
    paths = {path for path, _ in entries}
    assert len(paths) == len(entries)
    return paths


# --- Races ------------------------------------------------------------------------------------------

FILES = 60


def write_forever(source: str, pause: float) -> None:
    """Write increasing numbers into all files in a fixed order: each write is one state."""
    number = 0
    while True:
        number += 1
        for each in range(FILES):
            with open(f"{source}/d{each % 6}/f{each}", "r+b") as file:
                file.write(b"%08d" % number)
        time.sleep(pause)


def is_one_state(tree: Path) -> bool:
    """Whether the files show one moment: an earlier file is never behind a later one."""
    shared = read_shared_directories(tree)
    paths = [located(tree, shared, f"d{each % 6}/f{each}".encode()) for each in range(FILES)]
    numbers = [int(path.read_bytes()) for path in paths]
    return all(one >= other for one, other in pairwise(numbers)) and numbers[0] - numbers[-1] <= 1


def test_a_quiesced_capture_of_a_busy_source_is_one_state_or_refused(scratch: Path) -> None:
    source = scratch / "source"
    for each in range(FILES):
        (source / f"d{each % 6}").mkdir(parents=True, exist_ok=True)
        (source / f"d{each % 6}/f{each}").write_bytes(b"%08d" % 0)
    if sys.platform == "win32":
        raise NotImplementedError
    fork = multiprocessing.get_context("fork")
    writer = fork.Process(target=write_forever, args=(str(source), 0.02), daemon=True)
    writer.start()
    try:
        met: Counter[str] = Counter()
        base = None
        for number in until(lambda: met["refused"] and met["torn"], 60):
            tree, loose = scratch / f"q{number}", scratch / f"l{number}"
            try:
                capture(source, tree, engine=Engine.LINKED, base=base, cache=scratch / "cache", quiesced=True)
            except ConsistencyUnavailable:
                met["refused"] += 1
                remove_tree(tree)
            else:
                assert is_one_state(tree)
                base = tree
            captured = capture(source, loose, engine=Engine.LINKED, quiesced=False)
            met["torn"] += not is_one_state(loose)
            assert list(verify(loose, captured.payload_hash)) == []
            remove_tree(loose)
    finally:
        writer.kill()
        writer.join()


def test_the_observer_finds_a_state_that_never_existed(scratch: Path) -> None:
    payload = scratch / PAYLOAD
    for each in range(FILES):
        (payload / f"d{each % 6}").mkdir(parents=True, exist_ok=True)
        (payload / f"d{each % 6}/f{each}").write_bytes(b"%08d" % (5 if each < 10 else 4))
    assert is_one_state(scratch)
    (payload / "d0/f54").write_bytes(b"%08d" % 5)
    assert not is_one_state(scratch)
