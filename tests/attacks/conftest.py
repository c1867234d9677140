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
from proof.hostile.victim import Victim, copy_tree, copy_victim, make_repository, make_victim, remove_everything

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
    """The victim that all others are copies of."""
    return _template(tmp_path_factory, runner, "victim")


@pytest.fixture(scope="session")
def git_template(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Victim:
    """The same, with a git home."""
    return _template(tmp_path_factory, runner, "git-victim", in_git=True)


def _template(factory: pytest.TempPathFactory, runner: Runner, name: str, *, in_git: bool = False) -> Victim:
    """A victim that whichever process of this run comes first makes."""
    shared = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    victim = Victim(shared / name, in_git)
    with FileLocker(120.0).lock_exclusive(shared / f"{name}.lock"):
        if not victim.base.exists():
            with tempfile.TemporaryDirectory(prefix="holdfast-", dir=_memory()) as directory:
                made = make_victim(Path(directory, "base"), in_git=in_git)
                make_repository(made, runner.run)  # in memory: it syncs often
                copy_tree(made.base, shared / f"{name}-draft")
            os.rename(shared / f"{name}-draft", victim.base)
    return victim


@pytest.fixture
def victim(template: Victim) -> Iterator[Victim]:
    """A copy of the template, in memory if possible."""
    yield from _copy(template)


@pytest.fixture
def git_victim(git_template: Victim) -> Iterator[Victim]:
    """The same, with a git home."""
    yield from _copy(git_template)


def _copy(template: Victim) -> Iterator[Victim]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir=_memory()))
    yield copy_victim(template, directory / "base")
    remove_everything(directory)
