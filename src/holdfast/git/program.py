"""The user's `git` program: how Holdfast starts it, and the failures that it raises.

git gets none of the caller's `GIT_*` variables that say which repository, index or objects to use: inside a hook, these
point elsewhere. It never prompts, never starts `git gc`, and runs no hooks. Programs that the repository's own
configuration names need the user's approval (`git/configured.py`); those that Holdfast never needs are switched off.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Generic, NamedTuple, Self, TypeVar

from holdfast.errors import GitFailed, GitUnavailable, GitUntrusted, NotFound, Refused
from holdfast.fs import calls
from holdfast.fs.directory import Directory, failing_to
from holdfast.git.checkout import is_worktree_of, main_checkout
from holdfast.git.configured import ConfiguredProgram, programs_of, require_approved
from holdfast.git.soundness import end_if_it_waits_for_a_pipe, require_plain_reference, require_sound
from holdfast.locks.flock import descriptors_of_held

S = TypeVar("S")
T = TypeVar("T")

_PROGRAM = "git"
_OLDEST = (2, 38)
_MOST_LINES = 8
_WAITED = -1  # in place of an exit status
_FATAL = 128  # with which git itself refuses a name
_PIPE = b"fatal: a named pipe is in place of one of its files ('find . -type p' lists them)"
_HALF_ADDED = b"fatal: bad object worktrees/"
"""What git says if it reads the HEAD of a worktree that another git is adding: at first it is all zeros."""
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)  # before git is started again
_LOOK = 1.0  # seconds between two looks at what a git that takes long is doing
_FITS_IN_A_PIPE = 512  # bytes, on every system
_MOST_WORDS = 4
_MOST_AT_ONCE = 16
_KEPT = tuple(
    f"GIT_{name}"
    for name in """
    CONFIG_GLOBAL CONFIG_SYSTEM CONFIG_NOSYSTEM ASKPASS SSH SSH_COMMAND SSH_VARIANT PROXY_COMMAND ALLOW_PROTOCOL
    SSL_CAINFO SSL_CAPATH SSL_CERT SSL_KEY SSL_NO_VERIFY
    """.split()
)
"""Variables that say who the user is and how servers are reached, not which repository this is."""
_EVENTS = """
    applypatch-msg commit-msg fsmonitor-watchman p4-changelist p4-post-changelist p4-pre-submit p4-prepare-changelist
    post-applypatch post-checkout post-commit post-index-change post-merge post-receive post-rewrite post-update
    pre-applypatch pre-auto-gc pre-commit pre-merge-commit pre-push pre-rebase pre-receive prepare-commit-msg
    proc-receive push-to-checkout reference-transaction sendemail-validate update
""".split()
"""The events of hooks: from git 2.54 on, a configuration names hooks too, and from 2.55 on, this switches them off."""
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",  # a program that the repository names, which git would ask instead of comparing files
    "commit.gpgSign=false",  # these three start the program `gpg.program`
    "push.gpgSign=false",
    "log.showSignature=false",
    "core.splitIndex=false",
    "index.sparse=false",
    "core.safecrlf=false",  # otherwise line endings that do not survive a round trip are an error
    "core.quotePath=false",
    "advice.addEmbeddedRepo=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "submodule.recurse=false",
    *(f"hook.{event}.enabled=false" for event in _EVENTS),
)
_CHANGING_REFERENCES = ("update-ref", "symbolic-ref", "fetch")
_WITHOUT_OBJECTS = frozenset(
    """
    cat-file check-ignore check-ref-format checkout-index config diff diff-index diff-tree for-each-ref log ls-files
    ls-remote ls-tree merge-base remote rev-list rev-parse show-ref status symbolic-ref update-ref worktree
    """.split()
)
"""Commands that write no objects."""
_REFERENCE = re.compile(r"refs/[^\s\0:]+")
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Without these, git returns the memory of zlib to the system after each object: a third of the time of writing small
objects with the GNU C library. Other systems ignore them."""


class Author(NamedTuple):
    """The author and committer of a commit."""

    name: str
    email: str

    def variables(self) -> dict[str, str]:
        roles, fields = ("AUTHOR", "COMMITTER"), (("NAME", self.name), ("EMAIL", self.email))
        return {f"GIT_{role}_{field}": value for role in roles for field, value in fields}


HOLDFAST = Author("Holdfast", "holdfast@localhost")


class Git(NamedTuple):
    """One repository, by its common directory."""

    common: Path

    @property
    def objects(self) -> Path:
        return self.common / "objects"

    def run(
        self,
        *arguments: str,
        worktree: Path | None = None,
        git_dir: Path | None = None,
        index: Path | None = None,
        objects: Path | None = None,
        alone: bool = False,
        content: bytes | None = None,
        settings: tuple[str, ...] = (),
        author: Author | None = None,
        private: bool = False,
    ) -> bytes:
        """Run a git command and return its standard output; raises `GitFailed` if it fails.

        With a `worktree`, git runs in it, with its git directory or with `git_dir`. With `objects`, new objects go to
        this directory; the repository's are found too, unless the directory is to be used `alone`. Commits are
        Holdfast's own, unless there is an `author`. If `private`, only those who may read the records may read what git
        writes, unless `core.sharedRepository` says otherwise.
        """
        require_git()
        _require_trust(self.common)
        command = [_PROGRAM]
        for setting in (*_SETTINGS, *settings):
            command += ["-c", setting]
        own = _git_dir_of(worktree, self.common) if worktree and git_dir is None else git_dir
        what = next(each for each in arguments if not each.startswith("-"))
        for each in {self.common, own or self.common}:
            require_sound(each, every_object=what not in _WITHOUT_OBJECTS)
        require_approved(self.common, own or self.common, self._listed)
        if what in _CHANGING_REFERENCES:
            for name in set(_REFERENCE.findall("\0".join(arguments) + "\0" + os.fsdecode(content or b""))):
                require_plain_reference(self.common, name)
        variables = {"GIT_DIR": os.fspath(own or self.common), **(author or HOLDFAST).variables()}
        if worktree is not None:
            variables["GIT_WORK_TREE"] = os.fspath(worktree)
        if index is not None:
            variables["GIT_INDEX_FILE"] = os.fspath(index)
        if objects is not None:
            variables["GIT_OBJECT_DIRECTORY"] = os.fspath(objects)
            if not alone:
                variables["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = _quoted(os.fspath(self.objects))
        with descriptors_of_held(os.fspath(self.common / "holdfast")) as held:
            umask = self._umask() if private else -1
            return _output(command, arguments, worktree or self.common, variables, content, held, umask)

    def _umask(self) -> int:
        with Directory.open(self.common / "holdfast") as root:
            return 0o007 if root.is_shared() else 0o077

    def programs(self) -> list[ConfiguredProgram]:
        """The programs that the configuration of this repository names, approved or not."""
        require_git()
        return programs_of(self.common, self._listed)

    def _listed(self, path: Path) -> bytes:
        words = "config", "--file", os.fspath(path), "--no-includes", "--list", "-z"
        return _output([_PROGRAM], words, Path("/"), {}, None)  # not in a repository: git would obey its configuration

    def succeeds(self, *arguments: str, worktree: Path | None = None) -> bool:
        """Whether a git command exits with status 0 (True) or 1 (False); raises `GitFailed` for any other."""
        try:
            self.run(*arguments, worktree=worktree)
        except GitFailed as failure:
            if failure.facts["status"] != 1:
                raise
            return False
        return True


class Background(Generic[T]):
    """Work that runs in a thread during a block: git waits for the disk, and much of it uses only one processor."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._found: list[T] = []
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._found.append(work())
        except BaseException as failure:  # `result` raises it
            self._failures.append(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def result(self) -> T:
        """Wait for the work; return its result or raise its failure."""
        self._thread.join()
        for failure in self._failures:
            raise failure
        return self._found[0]


def side_by_side(work: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The result of `work` for each item, in their order; several run at once, because each git uses one processor.

    After a failure, no further item begins, and the failure is raised when those that had begun have ended.
    """
    left, found = deque(enumerate(items)), dict[int, T]()

    def drain() -> None:
        while True:
            try:
                number, item = left.popleft()
            except IndexError:
                return
            try:
                found[number] = work(item)
            except BaseException:
                left.clear()
                raise

    workers = [Background(drain) for _ in range(min(len(items), _MOST_AT_ONCE, (os.cpu_count() or 1) + 1))]
    for each in workers:
        with each:
            pass
    for each in workers:
        each.result()
    return [found[number] for number in range(len(items))]


def require_git() -> None:
    """Raise `GitUnavailable` unless git is installed, in a version that Holdfast can use. Checked once per process."""
    if why := _why_unavailable():
        raise GitUnavailable(f"git is needed here: {why}")


@cache
def _why_unavailable() -> str:
    try:
        done = subprocess.run([_PROGRAM, "version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        return f"cannot start it: {error.strerror}"
    found = re.search(rb"(\d+)\.(\d+)", done.stdout)
    if found is None:
        return "it does not report its version"
    version = int(found[1]), int(found[2])
    needed = ".".join(map(str, _OLDEST))
    return "" if version >= _OLDEST else f"version {version[0]}.{version[1]} is too old, use {needed} or newer"


@cache
def _require_trust(common: Path) -> None:
    """Raise `GitUntrusted` if the repository belongs to another user and git has not been told to trust it.

    git checks this only when it searches for the repository itself, and we tell it which one to use.
    """
    with failing_to("examine", common):
        owner = calls.stat(common).st_uid
    if sys.platform != "win32" and owner == os.geteuid():
        return
    try:
        _output([_PROGRAM], ("rev-parse", "--git-dir"), Path(main_checkout(os.fspath(common)) or common), {}, None)
    except GitFailed as failure:
        if "dubious ownership" in str(failure.facts["stderr"]):
            raise GitUntrusted(f"{common} belongs to another user", path=str(common)) from failure
        raise


def _git_dir_of(worktree: Path, common: Path) -> Path:
    found = is_worktree_of(os.fspath(worktree), os.fspath(common))
    if found is None:
        if not calls.is_directory(worktree):
            raise NotFound(f"there is no directory {worktree}", path=str(worktree))
        raise Refused(f"{worktree} is not a worktree of {common}, or git does not list it", path=str(worktree))
    return Path(found.git_dir)


def without_repository(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that tell git which repository to use."""
    return {name: value for name, value in environment.items() if not name.startswith("GIT_") or name in _KEPT}


def _environment() -> dict[str, str]:
    # not LC_ALL, which the user's filters may depend on
    return _MEMORY | without_repository(os.environ) | {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": ":", "LANGUAGE": "en"}


def _quoted(path: str) -> str:
    """A path, quoted if need be for a list in which colons separate the paths."""
    if os.pathsep not in path and not path.startswith('"'):
        return path
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _Ended(NamedTuple):
    """How a git ended, and what it wrote."""

    status: int
    output: bytes
    said: bytes


def _output(
    command: list[str],
    arguments: tuple[str, ...],
    directory: Path,
    variables: dict[str, str],
    content: bytes | None,
    inherited: Sequence[int] = (),
    umask: int = -1,
) -> bytes:
    if any("\0" in each for each in arguments):  # from a damaged file of git's: no argument can have one
        raise _failed(tuple(each.replace("\0", "?") for each in arguments), _FATAL, "fatal: a name has a NUL byte")
    words, environment = [*command, *arguments], _environment() | variables
    for pause in (*_PAUSES, None):
        ended = _completed(words, directory, environment, content or b"", inherited, umask)
        if pause is None or not ended.status or _HALF_ADDED not in ended.said:
            break
        time.sleep(pause)
    if ended.status:
        failure = _failed(arguments, ended.status, os.fsdecode(ended.said))
        failure.output = ended.output
        raise failure
    return ended.output


def _completed(
    command: list[str],
    directory: Path,
    environment: dict[str, str],
    content: bytes,
    inherited: Sequence[int],
    umask: int,
) -> _Ended:
    """Run git, which inherits our locks: if we are killed, it goes on, and nobody may finish our work until it ends."""
    try:
        started = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,  # without `content` an empty one: git must not read the user's terminal
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=() if sys.platform == "win32" else inherited,
            umask=-1 if sys.platform == "win32" else umask,
        )
    except OSError as error:
        if not calls.is_directory(directory):
            raise NotFound(f"there is no directory {directory}", path=str(directory)) from None
        raise GitUnavailable(f"cannot start git: {error.strerror}") from error
    with started as running:
        try:
            return _communicate(running, content)
        except BaseException:
            running.kill()
            raise


def _communicate(running: subprocess.Popen[bytes], content: bytes) -> _Ended:
    """Give git its input and wait until it ends. It may work for hours, but must not wait for a named pipe that is in
    place of one of its files."""
    stdin, running.stdin = running.stdin, None  # after a timeout, `communicate` would pass no more of the input
    if len(content) > _FITS_IN_A_PIPE:
        threading.Thread(target=_feed, args=(stdin, content), daemon=True).start()
    elif stdin is not None:
        _feed(stdin, content)
    while True:
        try:
            output, said = running.communicate(timeout=_LOOK)
            return _Ended(running.returncode, output, said)
        except subprocess.TimeoutExpired:
            if end_if_it_waits_for_a_pipe(running.pid):
                return _Ended(_WAITED, b"", _PIPE)


def _feed(stdin: IO[bytes], content: bytes) -> None:
    with contextlib.suppress(OSError), stdin:  # git may end before it has read everything
        stdin.write(content)


def _failed(arguments: tuple[str, ...], status: int, stderr: str) -> GitFailed:
    said = [line for line in stderr.splitlines() if line.strip()]
    shown = " ".join([_PROGRAM, *arguments[:_MOST_WORDS], *(["..."] if len(arguments) > _MOST_WORDS else [])])
    reasons = [line for line in said if line.startswith(("fatal: ", "error: "))] or said  # advice may follow
    why = "; ".join(dict.fromkeys((reasons[0], reasons[-1]))) if reasons else ""  # the cause, and its effect
    why = why or (f"its exit status is {status}" if status > 0 else f"signal {-status} ended it")
    told = "\n".join(said[-_MOST_LINES:])
    return GitFailed(f"'{shown}' failed: {why}", command=list(arguments), status=status, stderr=told)
