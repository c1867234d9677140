"""Real git repositories for the tests of `holdfast.git`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.git import snapshots
from holdfast.git.checkout import find_checkout
from holdfast.git.contents import export
from holdfast.git.program import Git
from holdfast.git.restore import unsaved
from holdfast.git.snapshots import GitCaptured, GitSource, capture
from holdfast.trees.results import Change
from tests.support.homes import copied

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
    return copied(_make_checkout, tmp_path / "checkout")


def _make_checkout(top: Path) -> None:
    new_repository(top)
    for name in ("one", "two", "sub/three"):
        write(top / name, f"{name}\n")
    commit_all(top)


class Home:
    """A checkout with a private index and scratch directories, as a git home has them."""

    def __init__(self, top: Path) -> None:
        found = find_checkout(str(top))
        assert found is not None
        self.top = top
        self.git = Git(Path(found.common))
        self.own = self.git.common / "holdfast"
        self.own.mkdir(exist_ok=True)
        self.index = self.own / "index" / top.name
        self.index.parent.mkdir(exist_ok=True)
        self.ids = iter(range(10**6))

    def source(self) -> GitSource:
        scratch = self.own / "tmp" / os.urandom(6).hex()
        scratch.mkdir(parents=True)
        return GitSource(self.git, self.top, self.index, scratch / "objects")

    def capture(self, parent: GitCaptured | None = None, *, quiesced: bool = True) -> GitCaptured:
        """Steps 1 to 4: the snapshot has its reference afterwards."""
        name = f"s{next(self.ids)}"
        found = capture(
            self.source(),
            snapshot_id=name,
            parent_tree=parent and parent.tree,
            message=f"snapshot {name}\n",
            quiesced=quiesced,
        )
        if found.commit is not None:
            snapshots.create_ref(self.git, name, found.commit)
            snapshots.drop_keep(self.git, name)
        return found

    def unsaved(self, tree: str) -> list[Change]:
        return list(unsaved(self.git, self.top, self.index, tree))

    def exported(self, commit: str) -> dict[bytes, tuple[str, bytes]]:
        target = self.top.parent / f"export-{os.urandom(6).hex()}"
        export(self.git, commit, target)
        found = content_of(target)
        shutil.rmtree(target)
        return found


def content_of(top: Path) -> dict[bytes, tuple[str, bytes]]:
    """Every file and symbolic link below a directory, without `.git`: its kind (x: executable) and content."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        names[:] = [name for name in names if name != b".git"]
        for name in [*files, *(each for each in names if os.path.islink(os.path.join(directory, each)))]:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, os.fsencode(top))
            if os.path.islink(path):
                found[relative] = "l", os.readlink(path)
            elif name != b".git":
                with open(path, "rb") as file:
                    found[relative] = (
                        "x" if os.access(path, os.X_OK) and os.stat(path).st_mode & 0o100 else "f",
                        file.read(),
                    )
    return found


def fingerprint(common: Path) -> dict[str, str]:
    """Everything in a git directory except objects and our own references and files."""
    found = {}
    for path in sorted(common.rglob("*")):
        name = path.relative_to(common).as_posix()
        if name.startswith(("objects/", "refs/holdfast", "holdfast/")) or name in ("objects", "holdfast"):
            continue
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
    return found


@pytest.fixture
def home(checkout: Path) -> Home:
    return Home(checkout)
