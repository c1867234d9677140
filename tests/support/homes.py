"""The two homes of a repository: tests marked `both_homes`, or with `records`, run in a plain home and in a git home.

The git home is that of a bare repository, `.git`, whose worktrees have the paths of a plain home: `main`, and those in
`worktrees/`. A link leads to the records, where a plain home has them. A test that is about the content of a plain home
alone is marked `plain_home` with the reason.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from holdfast.fs.probe import Capabilities
from holdfast.git.program import Git
from holdfast.repository import git_init
from holdfast.repository.git_init import adopt_checkout
from holdfast.repository.init import initialise
from holdfast.repository.repository import Repository
from holdfast.store.approvals import approve
from proof import effort

SAFE = Capabilities("tmpfs", False, True, True, True, True, False, True, True, True)
_SHARE = 0.04  # of the tests in a git home, outside of full rounds
_current = ["plain"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_homes: run the test in a plain home and in a git home")
    config.addinivalue_line("markers", "plain_home(why): run the test in a plain home only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    node = metafunc.definition
    wanted = node.get_closest_marker("both_homes") or "records" in metafunc.fixturenames
    if wanted and not node.get_closest_marker("plain_home"):
        metafunc.parametrize("home", ["plain", "git"], indirect=True)


def is_left_out(item: pytest.Item) -> bool:
    """Whether a test in a git home is left to the full rounds: the same test runs in a plain home."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    is_chosen = random.Random(f"{effort.SEED} {item.nodeid}").random() < _SHARE
    return parameters.get("home") == "git" and not is_chosen


@pytest.fixture(autouse=True)  # so that it comes before the fixtures that make repositories
def home(request: pytest.FixtureRequest) -> Iterator[str]:
    """The home of the repositories that `make_repository` makes."""
    _current[0] = getattr(request, "param", "plain")
    yield _current[0]
    _current[0] = "plain"


@pytest.fixture
def records(scratch: Path) -> Path:
    """The directory with the records of a new repository."""
    make_repository(scratch / "repo").close()
    return records_of(scratch / "repo")


def in_git() -> bool:
    return _current[0] == "git"


def make_repository(root: Path) -> Repository:
    """A new repository in the current home, on a filesystem that is known to be safe."""
    if not in_git():
        initialise(root, probe=lambda directory: SAFE)
        return Repository(root)
    make_checkout(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)
        adopt_checkout(root / "main")
    (root / ".jvs").symlink_to(root / ".git/holdfast/.jvs")
    return Repository(root)


def records_of(root: Path) -> Path:
    """The directory with the records of a repository that `make_repository` has made."""
    return root / ".git/holdfast" if in_git() else root


def make_checkout(root: Path) -> None:
    """A bare repository in `.git`, with one commit that has no file, checked out in `main`."""
    shutil.copytree(_built(_bare_with_main), root, symlinks=True, dirs_exist_ok=True)
    (root / "main/.git").write_text(f"gitdir: {root.resolve()}/.git/worktrees/main\n")
    (root / ".git/worktrees/main/gitdir").write_text(f"{root.resolve()}/main/.git\n")


def copied(build: Callable[[Path], object], target: Path) -> Path:
    """A copy of the git repository that `build` makes; it is built only once in a process."""
    shutil.copytree(_built(build), target, symlinks=True)
    if (target / ".git").exists():
        git("status", "--porcelain", at=target)  # so that the index knows the copies
    return target


@cache
def _built(build: Callable[[Path], object]) -> Path:
    place, owner = Path(mkdtemp(prefix="holdfast-git-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked process
            shutil.rmtree(place, ignore_errors=True)

    atexit.register(remove)
    build(place / "made")
    for sample in (place / "made").rglob("hooks/*.sample"):
        sample.unlink()  # nobody needs a copy
    return place / "made"


def _bare_with_main(place: Path) -> None:
    git("init", "-q", "--bare", "--template=", place / ".git")
    (place / ".git/config").write_text(
        "[core]\n\trepositoryformatversion = 0\n\tbare = true\n\tlogAllRefUpdates = true\n"
    )
    empty = git("hash-object", "-t", "tree", "-w", "--stdin", at=place / ".git")
    commit = git("commit-tree", empty, "-m", "the beginning", at=place / ".git")
    git("update-ref", "refs/heads/trunk", commit, at=place / ".git")
    git("worktree", "add", "-q", place / "main", "trunk", at=place / ".git")


def approve_programs(top: Path) -> None:
    """Approve what the configuration of a checkout names, as `holdfast trust` does."""
    approve(top / ".git/holdfast", commands=[each.text for each in Git(top / ".git").programs()])


def git(*arguments: str | Path, at: Path | None = None) -> str:
    """The output of a git command, as a user of the tests would run it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = {f"GIT_{role}_{field}": "user@example" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}
    command = ["git", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=at, env=kept | who, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()
