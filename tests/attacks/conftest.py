"""Fixtures: a runner of commands, and a fresh victim with a real repository for each attack."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.locks.file_lock import FileLocker
from proof.hostile.runner import Runner
from proof.hostile.victim import Victim, copy_tree, make_repository, make_victim, remove_everything

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # forks with limits need the calls of Linux


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    with Runner() as running:
        yield running


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Victim:
    """The victim that all others are copies of, made once by whichever process of this run comes first."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    victim = Victim(shared / "victim")
    with FileLocker(120.0).lock_exclusive(shared / "victim.lock"):
        if not victim.base.exists():
            with tempfile.TemporaryDirectory(prefix="holdfast-", dir=_memory()) as directory:
                made = make_victim(Path(directory, "base"))
                make_repository(made, runner.run)  # in memory: it syncs often
                copy_tree(made.base, shared / "victim-draft")
            os.rename(shared / "victim-draft", victim.base)
    return victim


@pytest.fixture
def victim(template: Victim) -> Iterator[Victim]:
    """A copy of the template, in memory if possible."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_memory()))
    copied = Victim(directory / "base")
    copy_tree(template.base, copied.base)
    yield copied
    remove_everything(directory)
