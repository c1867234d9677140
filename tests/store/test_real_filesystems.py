"""Power cuts on real file systems: ext4 and xfs, shut down without a flush of their journal.

The enumerated power cuts are those that POSIX allows; these are the ones that two file systems really produce. A
child makes a commit. After one of its calls, the file system is shut down, so that no later write reaches the disk,
and the child is killed. Then the file system is remounted and the store examined.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from holdfast.fs import calls
from proof.crash import Attempt, Ending, Outcome, fresh, interposed, scratch
from tests.store.commit_cases import LARGE, SEVERAL, SINGLE
from tests.store.commit_scenarios import CommitCase
from tests.support.loop_mounts import LoopMount

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shuts down Linux file systems")

_SHUTDOWN = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125
_WITHOUT_FLUSHING_THE_LOG = 2
_SYNCS = ("fsync", "sync_directory", "sync_filesystem")

Mount = Callable[[str], LoopMount]
KINDS = ("ext4", "xfs")
CUTS = 3
"""The number of cuts during each commit; one more follows after it has returned."""

CASES = {
    "replace": SINGLE["replace"],
    "append a line": SINGLE["append a line"],
    "append to the ledger": SINGLE["append to the ledger"],
    "create an issue": SEVERAL["create an issue"],
    "delete an issue": SEVERAL["delete an issue"],
    "wide": SEVERAL["wide"],
    "twelve steps": LARGE["twelve steps"],
}
"""Seven commits, four cuts each, on two file systems: 56 points."""


def number_of_calls(case: CommitCase) -> int:
    made: list[str] = []

    def count(attempt: Attempt) -> Any:
        made.append(attempt.name)
        return attempt.perform()

    with scratch() as base, fresh(base) as directory:
        case.prepare(directory)
        with interposed(count):
            case.operate(directory)
    return len(made)


def cut_power(mounted: Path) -> None:
    if sys.platform == "win32":
        raise NotImplementedError
    descriptor = os.open(mounted, os.O_RDONLY)
    fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING_THE_LOG))


def operate_and_cut(case: CommitCase, directory: Path, mounted: Path, index: int | None, writer: int) -> NoReturn:
    """In the child: cut the power after call number `index`; if None, after the commit has returned."""
    if sys.platform == "win32":
        raise NotImplementedError
    made = 0

    def count(attempt: Attempt) -> Any:
        nonlocal made
        made += 1
        try:
            return attempt.perform()
        finally:  # also after a call that fails, such as a lookup of a missing file
            if made == index:
                cut_power(mounted)
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        with interposed(count):
            case.operate(directory)
        cut_power(mounted)
        os.write(writer, b"returned")
    finally:
        os._exit(0)


def run_until_the_cut(case: CommitCase, directory: Path, mounted: Path, index: int | None) -> Outcome:
    if sys.platform == "win32":
        raise NotImplementedError
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork with threads: this child only dies
        child = os.fork()
    if child == 0:
        operate_and_cut(case, directory, mounted, index, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        returned = said.read() == b"returned"
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if returned else -signal.SIGKILL), f"the child exited with {status}"
    when = "it returned" if index is None else f"call {index}"
    return Outcome(Ending.POWER_CUT, f"shut down after {when}", acknowledged=returned)


def check_cut(case: CommitCase, disk: LoopMount, index: int | None) -> Outcome:
    """One crash point: sync the old state, run the commit until the cut, remount, and check."""
    directory = disk.path / f"cut-{index}"
    directory.mkdir()
    case.prepare(directory)
    with _opened(disk.path) as descriptor:
        calls.sync_filesystem(descriptor)
    outcome = run_until_the_cut(case, directory, disk.path, index)
    disk.unmount()
    disk.mount()
    try:
        case.check(directory, outcome)
    except Exception as error:
        error.add_note(f"{outcome}, acknowledged: {outcome.acknowledged}")
        raise
    finally:
        gc.collect()  # an open file would prevent the next unmount
    return outcome


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_a_commit_survives_a_power_cut_or_was_never_made(loop_mount: Mount, kind: str, name: str) -> None:
    disk, case = loop_mount(kind), CASES[name]
    most = number_of_calls(case)
    cuts = [most * (number + 1) // (CUTS + 1) for number in range(CUTS)]
    outcomes = [check_cut(case, disk, index) for index in (*cuts, None)]
    assert [outcome.acknowledged for outcome in outcomes] == [False] * CUTS + [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["replace", "create an issue"])
def test_a_store_whose_syncs_do_nothing_loses_acknowledged_commits(
    loop_mount: Mount, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    disk, case = loop_mount(kind), CASES[name]
    operate = case.operate

    def without_syncs(directory: Path) -> None:
        with interposed(lambda attempt: None, _SYNCS):
            operate(directory)

    monkeypatch.setattr(case, "operate", without_syncs)
    with pytest.raises(AssertionError) as found:
        check_cut(case, disk, None)
    assert "acknowledged: True" in found.value.__notes__[0]
