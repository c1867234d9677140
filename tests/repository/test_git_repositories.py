"""One whole life of a repository in git checkouts of many kinds: afterwards, everything of the user's is as before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Failure, Refused
from holdfast.git.program import _require_trust
from holdfast.repository import git_init
from holdfast.repository.context import MAIN
from holdfast.repository.git_init import adopt_checkout, deinitialise
from holdfast.repository.repository import Repository
from tests.repository.stages import put_files
from tests.support.homes import SAFE, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="paths and users of POSIX")

PROJECT = Path(__file__).parents[2]
LOCAL = ("-c", "protocol.file.allow=always")


@pytest.fixture(autouse=True)
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_init, "require_safe", lambda directory, records_elsewhere: SAFE)


def begun(path: Path, *options: str, files: dict[str, str] | None = None) -> Path:
    git("init", "-q", "-b", "trunk", *options, path)
    git("config", "user.name", "user", at=path)
    git("config", "user.email", "user@example", at=path)
    git("config", "gc.auto", "0", at=path)
    put_files(path, files or {"README": "read me\n", "src/a": "a\n", ".gitignore": "*.log\n", "x.log": "ignored"})
    return path


def committed(path: Path, message: str = "first") -> Path:
    git("add", "-A", at=path)
    git("commit", "-qm", message, at=path)
    return path


# --- Kinds of repositories ------------------------------------------------------------------------------


def own_history(scratch: Path) -> Path:
    git("clone", "-q", PROJECT, scratch / "project")
    return scratch / "project"


def many_files(scratch: Path) -> Path:
    top = begun(scratch / "project")
    for directory in range(100):
        (top / f"d{directory}").mkdir()
        for number in range(1000):
            (top / f"d{directory}/f{number}").write_text(f"{directory} {number}\n")
    return committed(top)


def many_branches(scratch: Path) -> Path:
    top = committed(begun(scratch / "project"))
    commit = git("rev-parse", "HEAD", at=top)
    lines = "".join(f"create refs/heads/topic/{number} {commit}\n" for number in range(5000))
    subprocess.run(["git", "update-ref", "--stdin"], cwd=top, input=lines.encode(), check=True)
    return top


def submodules(scratch: Path) -> Path:
    inner = committed(begun(scratch / "inner"))
    outer = committed(begun(scratch / "outer"))
    git(*LOCAL, "submodule", "--quiet", "add", inner, "in", at=outer)
    committed(outer, "second")
    top = committed(begun(scratch / "project"))
    git(*LOCAL, "submodule", "--quiet", "add", outer, "deep/out", at=top)
    git(*LOCAL, "submodule", "--quiet", "update", "--init", "--recursive", at=top)
    committed(top, "second")
    put_files(top, {"deep/out/changed": "inside a submodule\n"})
    return top


def filters(scratch: Path) -> Path:
    """Content that is another one in git, by attributes of a path and of a name, as LFS has it."""
    top = begun(scratch / "project")
    for name, (clean, smudge) in {
        "rot": ("tr a-z n-za-m", "tr n-za-m a-z"),
        "lfs": ("sed s/^/!/", "sed s/^!//"),
    }.items():
        git("config", f"filter.{name}.clean", clean, at=top)
        git("config", f"filter.{name}.smudge", smudge, at=top)
        git("config", f"filter.{name}.required", "true", at=top)
    put_files(top, {".gitattributes": "*.rot filter=rot\n/src/big/** filter=lfs\n", "a.rot": "abc\n"})
    put_files(top, {"src/big/one": "large\n", "src/big/deep/two": "larger\n", "src/a": "a\n"})
    return committed(top)


def line_endings(scratch: Path) -> Path:
    top = begun(scratch / "project")
    git("config", "core.safecrlf", "true", at=top)
    attributes = ("*.txt text eol=crlf", "*.auto text=auto", "*.bin -text", "utf.le working-tree-encoding=UTF-16LE")
    put_files(top, {".gitattributes": "\n".join(attributes)})
    (top / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (top / "a.auto").write_bytes(b"one\ntwo\n")
    (top / "a.bin").write_bytes(b"one\r\ntwo\n\r")
    (top / "utf.le").write_bytes("text\n".encode("utf-16-le"))
    committed(top)
    (top / "a.txt").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    return top


def sha256(scratch: Path) -> Path:
    return committed(begun(scratch / "project", "--object-format=sha256"))


def detached(scratch: Path) -> Path:
    top = committed(begun(scratch / "project"))
    git("checkout", "-q", "--detach", at=top)
    put_files(top, {"src/a": "on no branch\n"})
    return committed(top, "on no branch")


def rebasing(scratch: Path) -> Path:
    """A rebase that has stopped at a conflict: an index with unmerged entries."""
    top = committed(begun(scratch / "project"))
    git("checkout", "-q", "-b", "side", at=top)
    put_files(top, {"src/a": "side\n"})
    committed(top, "side")
    git("checkout", "-q", "trunk", at=top)
    put_files(top, {"src/a": "trunk\n"})
    committed(top, "trunk")
    subprocess.run(["git", "rebase", "-q", "side"], cwd=top, capture_output=True)
    assert (top / ".git/rebase-merge").is_dir()
    return top


def stashed(scratch: Path) -> Path:
    """A stash, and a staged, an unstaged, an intended and an untracked change."""
    top = committed(begun(scratch / "project"))
    put_files(top, {"src/a": "stashed\n"})
    git("stash", "-q", at=top)
    put_files(top, {"src/a": "staged\n", "later": "intended\n"})
    git("add", "src/a", at=top)
    git("add", "-N", "later", at=top)
    put_files(top, {"src/a": "unstaged\n", "new": "untracked\n"})
    return top


def odd_path(scratch: Path) -> Path:
    top = begun(scratch / "a b 'c' \"d\"\ne: $(f) \\g é")
    put_files(top, {"with space": "x\n", 'quo"te': "x\n", "new\nline": "x\n", "-x": "x\n", ":(top)": "x\n"})
    (Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe"))).write_text("not UTF-8\n")
    return committed(top)


def in_a_bare_repository(scratch: Path) -> Path:
    committed(begun(scratch / "origin"))
    git("clone", "-q", "--bare", scratch / "origin", scratch / "project/.bare")
    git("worktree", "add", "-q", scratch / "project/trunk", at=scratch / "project/.bare")
    return scratch / "project/trunk"


def in_a_submodule(scratch: Path) -> Path:
    return submodules(scratch) / "deep/out"


def sparse(scratch: Path) -> Path:
    top = committed(begun(scratch / "project", files={f"{each}/f": f"{each}\n" for each in "abc"}))
    git("sparse-checkout", "set", "--cone", "a", at=top)
    return top


def apart(scratch: Path) -> Path:
    return committed(begun(scratch / "project", f"--separate-git-dir={scratch / 'elsewhere.git'}"))


KINDS: list[Any] = [
    own_history,
    pytest.param(many_files, marks=pytest.mark.long),
    pytest.param(many_branches, marks=pytest.mark.long),
    *(submodules, filters, line_endings, sha256, detached, rebasing, stashed, odd_path),
    *(in_a_bare_repository, in_a_submodule, sparse, apart),
]


# --- The life -------------------------------------------------------------------------------------------


def of_the_user(top: Path) -> dict[str, object]:
    """Everything in git that is not Holdfast's, byte by byte."""
    found = git("rev-parse", "--absolute-git-dir", "--path-format=absolute", "--git-common-dir", at=top)
    common = Path(found[found.index("\n/") + 1 :]) if found.count("\n") == 1 else top / ".git"
    own = Path(found[: found.index("\n/")]) if found.count("\n") == 1 else top / ".git"
    names = ["config", "info/exclude", "HEAD", "logs/HEAD", "logs/refs/stash"]
    kept = {name: (common / name).read_bytes() for name in names if (common / name).exists()}
    return {
        "refs": git("for-each-ref", at=top),
        "index": (own / "index").read_bytes() if (own / "index").exists() else None,
        "HEAD": (own / "HEAD").read_bytes(),
        "status": git("status", "--porcelain=v2", "--branch", "--ignored", at=top),
        "worktrees": git("worktree", "list", "--porcelain", at=top),
        **kept,
    }


def content_of(top: Path) -> dict[bytes, bytes]:
    """Every file and link that git does not ignore, but not in nested repositories."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=top,
        capture_output=True,
        check=True,
    )
    found = {}
    for path in {each for each in listed.stdout.split(b"\0") if each}:
        where = os.path.join(os.fsencode(top), path)
        if os.path.isfile(where):
            found[path] = Path(os.fsdecode(where)).read_bytes()
    return found


def exported(repository: Repository, snapshot_id: str, target: Path) -> dict[bytes, bytes]:
    repository.snapshots.export(snapshot_id, target)
    top = os.fsencode(target) + b"/"
    paths = [b"%s/%s" % (above, name) for above, _, names in os.walk(top[:-1]) for name in names]
    found = {path.removeprefix(top): Path(os.fsdecode(path)).read_bytes() for path in paths}
    shutil.rmtree(target)
    return found


def require_sound(repository: Repository) -> None:
    git("fsck", "--strict", at=repository.payload())
    assert [str(each) for each in repository.examine(strict=True)] == []


def there_and_back(repository: Repository, name: str, aside: Path, *, whole: bool) -> None:
    """Snapshot, change, snapshot; compare, export; restore the first and then the second."""
    top = repository.path(name)
    with repository.lease(name) as lease:
        first = repository.snapshot(name, lease)
        one = content_of(top)
        assert list(repository.snapshots.status(name).changes) == []
        put_files(top, {"made/by agent": "new\n", "README": "changed\n"})
        assert {each.path for each in repository.snapshots.status(name).changes} == {b"made/by agent", b"README"}
        second = repository.snapshot(name, lease)
        two = content_of(top)
        changed = repository.snapshots.compare(name, first.snapshot_id, second.snapshot_id).changes
        assert {each.path for each in changed} == {b"made/by agent", b"README"}
        for taken, content in ((first, one), (second, two)):
            found = exported(repository, taken.snapshot_id, aside)
            assert found == content if whole else found.items() >= content.items()
        for taken, content in ((first, one), (second, two), (first, one)):
            repository.restore(taken.snapshot_id, name, lease, reason="there and back")
            assert content_of(top) == content
            assert list(repository.snapshots.status(name).changes) == []
        for each in (first, second):
            assert list(repository.snapshots.verify(each.snapshot_id)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
@pytest.mark.timeout(3600)
def test_a_whole_life_leaves_git_as_it_was(kind: Callable[[Path], Path], scratch: Path) -> None:
    top = kind(scratch)
    before, content = of_the_user(top), content_of(top)
    adopt_checkout(top, agree=lambda programs: None)
    repository = Repository(top)
    assert of_the_user(top) == before
    repository.worktrees.create("dev")
    dev = repository.path("dev")
    there_and_back(repository, "dev", scratch / "aside", whole=kind is not sparse)
    put_files(dev, {"committed": "work\n"})
    committed(dev, "work of the agent")
    there_and_back(repository, MAIN, scratch / "aside", whole=kind is not sparse)
    assert content_of(top) == content
    repository.worktrees.change_name("dev", "done", force=True)
    put_files(repository.path("done"), {"uncommitted": "more work\n"})
    require_sound(repository)
    removed = repository.remove_worktree("done", force=True)
    assert exported(repository, f"{removed.saved}", scratch / "aside")[b"uncommitted"] == b"more work\n"
    plan = repository.gc.plan()
    repository.gc.run(plan.plan.plan_id)
    require_sound(repository)
    git("branch", "-q", "-D", "hf/done", at=top)
    with pytest.raises(Refused, match="would be deleted with content that is in no commit"):
        deinitialise(repository)
    deinitialise(repository, force=True)

    assert of_the_user(top) == before
    assert content_of(top) == content
    git("fsck", "--strict", at=top)


# --- Other circumstances --------------------------------------------------------------------------------


def test_before_the_first_commit_there_are_snapshots_but_no_worktrees(scratch: Path) -> None:
    top = begun(scratch / "project")
    adopt_checkout(top)
    repository = Repository(top)
    there_and_back(repository, MAIN, scratch / "aside", whole=True)
    with pytest.raises(Refused, match="no commit yet"):
        repository.worktrees.create("dev")
    head = repository.config().head_snapshot_id
    repository.worktrees.create("dev", snapshot=head)

    assert content_of(repository.path("dev")) == content_of(top)
    require_sound(repository)


def test_a_path_that_is_not_utf_8_is_refused(scratch: Path) -> None:
    top = committed(begun(Path(os.fsdecode(os.fsencode(scratch) + b"/\xff"))))
    with pytest.raises(Refused, match="not valid UTF-8"):
        adopt_checkout(top)
    assert not (top / ".git/holdfast").exists()


HOOK = """#!/bin/sh
env | grep ^GIT_ > {seen}
exec {python} -m holdfast snapshot --json > {said} 2>&1
"""


@pytest.mark.parametrize("place", [MAIN, "dev"])
@pytest.mark.parametrize("how", [["-a"], ["--", "src/a"], ["--amend", "-a"]], ids=["all", "partial", "amend"])
@pytest.mark.sampled(1)
def test_a_hook_takes_a_snapshot_although_git_points_elsewhere(scratch: Path, place: str, how: list[str]) -> None:
    """`git commit` gives its hooks an index that is not complete, by variables that say which one to use."""
    top = committed(begun(scratch / "project"))
    adopt_checkout(top)
    repository = Repository(top)
    repository.worktrees.create("dev")
    here = repository.path(place)
    hook = top / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(HOOK.format(seen=scratch / "seen", said=scratch / "said", python=sys.executable))
    hook.chmod(0o755)
    put_files(here, {"src/a": "committed\n", "README": "staged\n", "new": "untracked\n"})
    git("add", "README", at=here)
    content = content_of(here)
    git("commit", "-qm", "with a hook", *how, at=here)

    assert "GIT_INDEX_FILE" in (scratch / "seen").read_text()
    taken = repository.config(place).head_snapshot_id
    assert taken is not None, (scratch / "said").read_text()
    assert exported(repository, taken, scratch / "aside") == content
    assert git("show", "--format=", "--name-only", "HEAD", at=here).split()
    require_sound(repository)


def as_user(user: int, home: Path, work: Callable[[], object]) -> str:
    """What a process of this user fails with, or an empty text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.environ["HOME"] = str(home)
            work()
        except Failure as failure:
            said = f"{failure.code}: {failure.message} {failure.hint}"
        except BaseException as failure:
            said = f"{failure!r}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to act as two users")
def test_a_repository_of_another_user_is_refused_until_git_trusts_it(scratch: Path) -> None:
    _require_trust.cache_clear()
    scratch.chmod(0o777)
    top, home = committed(begun(scratch / "project")), scratch / "home"
    home.mkdir()
    for path in (top, *top.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)

    refused = as_user(12346, home, lambda: adopt_checkout(top))
    assert "E_GIT_UNTRUSTED" in refused
    assert "belongs to another user" in refused
    assert "safe.directory" in refused
    assert not (top / ".git/holdfast").exists()

    git("config", "--file", home / ".gitconfig", "--add", "safe.directory", top)
    (home / ".gitconfig").chmod(0o644)
    unwritable = as_user(12346, home, lambda: adopt_checkout(top))
    assert "E_NOT_WRITABLE" in unwritable
    assert as_user(12345, home, lambda: adopt_checkout(top)) == ""
    assert as_user(12345, home, lambda: Repository(top).worktrees.create("dev")) == ""
    assert "E_NOT_WRITABLE" in as_user(12346, home, lambda: Repository(top).worktrees.create("more"))
