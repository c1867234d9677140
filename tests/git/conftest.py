"""Real git repositories for the tests of `holdfast.git`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_VARIABLES = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "User",
    "GIT_AUTHOR_EMAIL": "user@example.org",
    "GIT_COMMITTER_NAME": "User",
    "GIT_COMMITTER_EMAIL": "user@example.org",
}


def git(directory: Path, *arguments: str, content: bytes | None = None, check: bool = True) -> str:
    """What the user's own git prints, run in a directory."""
    done = subprocess.run(
        ["git", *arguments], cwd=directory, env=os.environ | _VARIABLES, input=content, capture_output=True
    )
    if check and done.returncode:
        raise AssertionError(f"git {arguments}: {os.fsdecode(done.stderr)}")
    return os.fsdecode(done.stdout).removesuffix("\n")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def new_repository(path: Path, *arguments: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    git(path, "init", "-q", "-b", "trunk", *arguments, ".")
    return path


def commit_all(directory: Path, message: str = "a commit") -> str:
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "--allow-empty", "-m", message)
    return git(directory, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_NOSYSTEM"):
        monkeypatch.setenv(name, _VARIABLES[name])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a commit of three files."""
    top = new_repository(tmp_path / "checkout")
    for name in ("one", "two", "sub/three"):
        write(top / name, f"{name}\n")
    commit_all(top)
    return top
