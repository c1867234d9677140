"""The source follows its rules, and each rule finds its planted violations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ExitStatus, Failure, all_failures
from tests.source_rules import (
    Use,
    contexts_reached,
    failures_declared,
    file_system_uses,
    front_end_imports,
    front_end_uses,
    paths_looked_up,
    stores_told_apart,
)

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/holdfast"

Rule = Callable[[str], list[Use]]

EXEMPT: dict[Rule, dict[str, str]] = {
    file_system_uses: {
        "fs/calls.py": "the one place that calls the system",
        "fs/native.py": "system calls that Python lacks, behind fs/calls.py",
        "testing/": "harnesses, outside the code under test",
    },
    paths_looked_up: {
        "fs/": "the one place that leads from a path to an open directory",
        "testing/": "harnesses, outside the code under test",
        "setup/": "files of other programs, which may be links; each is resolved, and refused outside the project",
    },
    front_end_uses: {"cli/": "a front end", "__main__.py": "a front end"},
    front_end_imports: {"cli/": "a front end", "__main__.py": "a front end"},
    stores_told_apart: {"store/": "where the kinds are", "testing/": "the contract of each kind"},
    contexts_reached: {"repository/": "the layer that the context belongs to"},
    failures_declared: {"errors.py": "the one place that declares them"},
}
"""Files and directories (ending in a slash) exempt from a rule, with the reason."""

EXCEPTIONS: dict[tuple[Rule, str, str], str] = {
    (file_system_uses, "locks/flock.py", "import fcntl"): "the names of the lock modes, no calls",
    (file_system_uses, "locks/flock.py", "import msvcrt"): "the handle behind a descriptor, for LockFileEx",
    (file_system_uses, "fs/directory.py", ".is_dir()"): "on an entry listed by `calls.scandir`",
    (file_system_uses, "fs/directory.py", ".is_file()"): "on such an entry",
    (file_system_uses, "fs/directory.py", "os.close"): "in a finalizer, which may run at any moment",
    (file_system_uses, "trees/scan.py", ".is_dir()"): "on an entry listed by `calls.scandir`",
    (file_system_uses, "trees/scan.py", ".stat()"): "on such an entry: the one call per unchanged file",
    (file_system_uses, "trees/walker.py", ".is_dir()"): "on an entry listed by `calls.scandir`",
    (file_system_uses, "trees/verify.py", ".is_dir()"): "on such an entry",
    (file_system_uses, "trees/repair.py", ".is_dir()"): "on such an entry",
    (file_system_uses, "trees/retained_dirs.py", ".is_dir()"): "on such an entry",
    (file_system_uses, "trees/retained_dirs.py", ".stat()"): "on such an entry",
    (file_system_uses, "fs/probe.py", "import fcntl"): "the names of the lock modes, no calls",
    (file_system_uses, "fs/probe.py", "import msvcrt"): "the Windows counterpart of flock, on a throw-away file",
    (file_system_uses, "web/layout.py", ".iterdir()"): "files of this package, wherever it was installed",
    (file_system_uses, "web/layout.py", ".read_bytes()"): "the same",
    (front_end_uses, "git/program.py", "os.environ"): "a program of the user's gets the user's environment",
    (front_end_uses, "store/approvals.py", "os.environ"): "the user's approvals count for programs as for commands",
    (front_end_uses, "store/approvals.py", "os.path.expanduser"): "the user's data directory, which has them",
    (
        front_end_uses,
        "store/postgres_connections.py",
        "os.path.expanduser",
    ): "where libpq looks for trusted certificates",
    (paths_looked_up, "cli/candidates.py", "calls.listdir"): "completion offers safe names only, whosever they are",
    (paths_looked_up, "cli/candidates.py", "calls.read_small"): "as a help text beside a name",
    (paths_looked_up, "cli/demo.py", "Directory.follow"): "the directory for temporary files",
    (paths_looked_up, "cli/issue_many.py", "chosen"): "a file that the user named",
    (paths_looked_up, "cli/lock.py", "calls.stat"): "a lock file that the user named",
    (paths_looked_up, "cli/output.py", "calls.open"): "the null device",
    (paths_looked_up, "cli/run.py", "calls.stat"): "compares the current directory with a worktree, for a warning",
    (paths_looked_up, "cli/setup.py", "calls.stat"): "looks for a command on the user's PATH",
    (paths_looked_up, "git/checkout.py", "calls.read_small"): "finds checkouts as git does, and loads no other module",
    (paths_looked_up, "git/program.py", "calls.stat"): "asks who owns the repository that git is to be started in",
    (front_end_uses, "git/configured.py", "os.path.expanduser"): "where git finds a file that a configuration includes",
    (paths_looked_up, "git/configured.py", "calls.read_small"): "reads configurations as git does, wherever they are",
    (paths_looked_up, "git/configured.py", "calls.stat"): "tells whether one of them has changed",
    (paths_looked_up, "git/soundness.py", "calls.stat"): "tells whether a directory has changed, and sees links",
    (paths_looked_up, "git/look.py", "calls.read_small"): "counts the entries of our own index",
    (
        paths_looked_up,
        "git/restore.py",
        "calls.listdir",
    ): "looks whether something is in the way of git; git looks again",
    (paths_looked_up, "git/restore.py", "calls.readlink"): "describes a change, of a file that git has just found",
    (paths_looked_up, "git/restore.py", "calls.stat"): "the same",
    (paths_looked_up, "git/look.py", "calls.stat"): "asks whether a link leads to itself, which takes following it",
    (paths_looked_up, "git/snapshots.py", "calls.read_small"): "asks git's own directory whether HEAD is a branch",
    (paths_looked_up, "git/worktrees.py", "calls.listdir"): "git's list of worktrees, as git reads it",
    (paths_looked_up, "git/worktrees.py", "calls.read_small"): "the same",
    (paths_looked_up, "locks/flock.py", "Directory.follow"): "a lock file that the user named",
    (paths_looked_up, "locks/flock.py", "calls.stat"): "compares with the file that is locked; a link differs",
    (paths_looked_up, "locks/identity.py", "calls.read_small"): "files of the system",
    (paths_looked_up, "locks/kernel_locks.py", "calls.stat"): "names the file of a lock that someone holds",
    (paths_looked_up, "locks/ledger_lock.py", "chosen"): "the directory above a ledger",
    (paths_looked_up, "locks/ledger_lock.py", "calls.stat"): "compares with a directory that was open; a link differs",
    (paths_looked_up, "locks/lock_file.py", "calls.stat"): "compares with the directory that is open; a link differs",
    (paths_looked_up, "repository/attention.py", "calls.free_space"): "the root",
    (paths_looked_up, "repository/checks_storage.py", "calls.free_space"): "the root",
    (paths_looked_up, "repository/compare.py", "chosen"): "the target of an export",
    (paths_looked_up, "repository/guard.py", "calls.read_small"): "answers a question, and loads no other module",
    (paths_looked_up, "repository/guard.py", "calls.scandir"): "the same",
    (paths_looked_up, "repository/repository.py", "calls.stat"): "compares the current directory with the root",
    (paths_looked_up, "repository/usage.py", "calls.readlink"): "files of the system",
    (paths_looked_up, "repository/usage.py", "calls.scandir"): "files of the system",
    (paths_looked_up, "repository/usage.py", "calls.stat"): "compares the directories of processes with a worktree",
    (paths_looked_up, "store/open.py", "Directory.follow"): "a store that the user named",
    (paths_looked_up, "trees/payload.py", "calls.chown"): "an open file",
    (paths_looked_up, "web/pages/overview.py", "calls.free_space"): "the root",
    (paths_looked_up, "trees/payload.py", "calls.getxattr"): "an open file, or a name in an open directory by /proc",
    (paths_looked_up, "trees/payload.py", "calls.listxattr"): "the same",
    (paths_looked_up, "trees/payload.py", "calls.setxattr"): "the same",
}
"""Single uses that are justified: rule, file and use, with the reason."""


def test_the_source_follows_the_rules_and_needs_every_exception() -> None:
    """One test for all rules: each file is parsed once."""
    found: dict[tuple[Rule, str, str], str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name, source = path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")
        for rule, exempt in EXEMPT.items():
            if not any(name == place or (place[-1] == "/" and name.startswith(place)) for place in exempt):
                found |= {
                    (rule, name, use.what): f"src/holdfast/{name}:{use.line}: {use.what}: {rule.__doc__}"
                    for use in rule(source)
                }

    broken = [where for use, where in found.items() if use not in EXCEPTIONS]
    assert not broken, "\n".join(broken)
    assert EXCEPTIONS.keys() <= found.keys()


# --- Each rule finds a planted violation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("open('x')", "open"),
        ("with open('x') as file: pass", "open"),
        ("opener = open", "open"),
        ("import io\nio.open('x')", "io.open"),
        ("import os\nos.open('x', 0)", "os.open"),
        ("import os as system\nsystem.unlink('x')", "os.unlink"),
        ("from os import rename as move\nmove('a', 'b')", "os.rename"),
        ("import os\nremove = os.remove", "os.remove"),
        ("import os\ngetattr(os, 'fdatasync', None)", "os.fdatasync"),
        ("import os\nos.path.exists('x')", "os.path.exists"),
        ("import os.path\nos.path.getsize('x')", "os.path.getsize"),
        ("from os.path import realpath\nrealpath('x')", "os.path.realpath"),
        ("def lazy():\n    import os\n    os.mkdir('x')", "os.mkdir"),
        ("from pathlib import Path\nPath('x').exists()", ".exists()"),
        ("from pathlib import Path\ndef f(path: Path): path.read_text()", ".read_text()"),
        ("class A:\n    def f(self): self.path.unlink()", ".unlink()"),
        ("import pathlib\nfound = map(pathlib.Path.is_dir, [])", "pathlib.Path.is_dir"),
        ("class A:\n    def open(self): return open('x')", "open"),
        ("class A:\n    open = open", "open"),
        ("import shutil", "import shutil"),
        ("def lazy():\n    from tempfile import mkdtemp", "import tempfile"),
        ("import fcntl as f", "import fcntl"),
        ("__import__('msvcrt')", "import msvcrt"),
        ("import importlib\nimportlib.import_module('fcntl')", "import fcntl"),
    ],
)
def test_a_file_system_access_that_bypasses_fs_is_found(source: str, found: str) -> None:
    assert found in [use.what for use in file_system_uses(source)]


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.fs import calls\ncalls.open('x', 0)\ncalls.stat('x')",
        "from holdfast.fs.directory import Directory\nDirectory.open('x')",
        "class Directory:\n    def open(self): ...\nDirectory().close()\nDirectory.open('x')",
        "class A:\n    def f(self): self.open()",
        "import os\nos.getpid(), os.O_RDONLY, os.urandom(6), os.fspath('x'), os.path.join('a', 'b')",
        "'a'.replace('a', 'b')",
        "from pathlib import Path\nPath('x').parent / 'y'",
        "def f(open): open('x')",
        "import stat\nstat.S_ISREG(0)",
        "import ast\nast.walk(None)",
    ],
)
def test_code_that_does_not_touch_the_file_system_passes(source: str) -> None:
    assert file_system_uses(source) == []


_CALLS = "from holdfast.fs import calls\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("calls.stat(path)", "calls.stat"),
        ("calls.stat(path, follow_symlinks=False)", "calls.stat"),
        ("calls.open(root / 'x', flags)", "calls.open"),
        ("calls.rename(old, new)", "calls.rename"),
        ("calls.rename(old, new, src_dir_fd=fd)", "calls.rename"),
        ("calls.scandir(path)", "calls.scandir"),
        ("calls.read_small(f'{root}/proc/x', 9)", "calls.read_small"),
        ("def lazy():\n    from holdfast.fs import calls as c\n    c.unlink(path)", "calls.unlink"),
        ("from holdfast.fs.directory import opened\nwith opened(path, 0) as fd: pass", "opened"),
        ("from holdfast.fs.directory import Directory\nDirectory.follow(path)", "Directory.follow"),
        ("from holdfast.fs.directory import chosen\nchosen(path)", "chosen"),
    ],
)
def test_a_path_that_is_looked_up_outside_of_an_open_directory_is_found(source: str, found: str) -> None:
    assert [use.what for use in paths_looked_up(_CALLS + source)] == [found]


@pytest.mark.parametrize(
    "source",
    [
        "calls.stat(name, dir_fd=directory.fd, follow_symlinks=False)",
        "calls.rename(one, other, src_dir_fd=fd, dst_dir_fd=fd)",
        "calls.scandir(directory.fd)\ncalls.chmod(descriptor, 0)\ncalls.utime(here)",
        "calls.listdir('/proc')\ncalls.read_small(f'/proc/{pid}/stat', 9)\ncalls.open('/dev/tty', 0)",
        "from holdfast.fs.directory import Directory\nDirectory.open(path)",
    ],
)
def test_a_name_in_an_open_directory_passes(source: str) -> None:
    assert paths_looked_up(_CALLS + source) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("print('x')", "print"),
        ("show = print", "print"),
        ("input()", "input"),
        ("raise SystemExit(1)", "SystemExit"),
        ("import sys\nsys.exit(1)", "sys.exit"),
        ("from sys import exit\nexit(1)", "sys.exit"),
        ("import sys\nsys.stderr.write('x')", "sys.stderr"),
        ("import os\nos.environ['X']", "os.environ"),
        ("from os import environ as e\ne.get('X')", "os.environ"),
        ("def lazy():\n    import os\n    return os.getenv('X')", "os.getenv"),
    ],
)
def test_printing_exiting_and_reading_the_environment_are_found(source: str, found: str) -> None:
    assert found in [use.what for use in front_end_uses(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import click",
        "from click import echo",
        "import rich.console",
        "def f():\n    from rich.table import Table",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import click",
    ],
)
def test_a_library_for_front_ends_is_found_wherever_it_is_imported(source: str) -> None:
    assert len(front_end_imports(source)) == 1


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "from holdfast.store.files import FileStore\nisinstance(s, FileStore)",
            "isinstance holdfast.store.files.FileStore",
        ),
        ("def f():\n    from a import B, CStore\n    return isinstance(s, B | CStore)", "isinstance a.CStore"),
        ("getattr(self.store, 'address', '')", "getattr of store"),
    ],
)
def test_code_that_tells_stores_apart_is_found(source: str, found: str) -> None:
    assert [use.what for use in stores_told_apart(source)] == [found]


@pytest.mark.parametrize(
    "source", ["repository.context.store", "opened.repository.context", "f(self.repository.context)"]
)
def test_a_front_end_that_reaches_through_a_repository_is_found(source: str) -> None:
    assert [use.what for use in contexts_reached(source)] == ["repository.context"]


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.errors import Failure\nclass Mine(Failure): ...",
        "from holdfast import errors\nclass Mine(errors.LockConflict): ...",
        "import holdfast.errors\nclass Mine(ValueError, holdfast.errors.Failure): ...",
    ],
)
def test_a_failure_declared_elsewhere_is_found(source: str) -> None:
    assert [use.what for use in failures_declared(source)] == ["Mine"]


def test_a_use_is_reported_with_its_line() -> None:
    assert file_system_uses("import os\n\nos.unlink('x')\n") == [Use(3, "os.unlink")]


# --- Importing the package costs next to nothing ----------------------------------------------------

HEAVY = {"argparse", "asyncio", "click", "ctypes", "dataclasses", "inspect", "json", "psutil", "subprocess"}


def modules_loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter loads for this statement."""
    program = f"import sys; before = set(sys.modules); {statement}; loaded = set(sys.modules) - before"
    report = "import json; print(json.dumps(sorted(loaded)))"
    output = subprocess.run(
        [sys.executable, "-c", f"{program}; {report}"], check=True, capture_output=True, text=True
    ).stdout
    return set(json.loads(output))


def test_importing_the_package_loads_nothing_heavy_and_none_of_its_parts() -> None:
    loaded = modules_loaded_by("import holdfast")

    assert not loaded & HEAVY
    assert {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names} == {"holdfast"}


def test_a_heavy_import_is_found() -> None:
    assert "json" in modules_loaded_by("import holdfast.fs.strictjson") & HEAVY


# --- Failure classes --------------------------------------------------------------------------------

FAILURES = [each for each in all_failures() if each.__module__.startswith("holdfast.errors")]


def problems_of(failure: type[Failure], page: str) -> list[str]:
    """The defects of a failure class."""
    own = vars(failure)
    wanted = {
        "has no code of its own": "code" in own,
        "has a code that is not like E_SOMETHING": re.fullmatch(r"E(_[A-Z]+)+", failure.code),
        "has no hint": failure.hint.strip(),
        "has no description": (own.get("__doc__") or "").strip(),
        "has an exit status that is not in the table": isinstance(failure.exit_status, ExitStatus),
        "ends with success": failure.exit_status != ExitStatus.OK,
        "is not in the reference": f"| `{failure.code}` |" in page,
    }
    return [problem for problem, is_fine in wanted.items() if not is_fine]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_every_failure_is_complete_and_documented(failure: type[Failure]) -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")

    assert problems_of(failure, page) == []


def test_no_code_is_used_twice() -> None:
    codes = [failure.code for failure in FAILURES]

    assert sorted(codes) == sorted(set(codes))


def test_an_incomplete_failure_is_found() -> None:
    class Bare:
        code, hint, exit_status = "e_bare", " ", 1

    class Inheriting(Bare):
        """Described, but without anything of its own."""

    assert problems_of(Bare, "") == [  # type: ignore[arg-type]
        "has a code that is not like E_SOMETHING",
        "has no hint",
        "has no description",
        "has an exit status that is not in the table",
        "is not in the reference",
    ]
    assert problems_of(Inheriting, "")[0] == "has no code of its own"  # type: ignore[arg-type]
