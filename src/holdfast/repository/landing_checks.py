"""Runs of a target's checks on one commit, in scratch worktrees that stay prepared between runs.

A run takes a scratch worktree, checks the commit out, prepares the worktree if it is not prepared for this commit, and
runs the commands one after the other until one fails. It holds no document lock. Its record and its log are files on
this machine, which other processes can read while it runs:

    <root>/.jvs/checks/runs/<run>.json      the record of a run
    <root>/.jvs/checks/runs/<run>.log       the output of its commands, bounded

`worktree.copy` and `worktree.setup` prepare a worktree, which then stays prepared until one of them, or a file that
`land.inputs` names, changes. If the setup fails, the run also prepares the commit that the candidate is built on. If
that succeeds, the candidate has broken the setup, and the run fails. If not, this machine is to blame (a full disk, an
unreachable registry): the run has no result, and `SetupFailed` is raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.clock import format_duration, format_instant
from holdfast.errors import Corrupt, GitFailed, NotFound, Refused, SetupFailed
from holdfast.fs import calls, durable
from holdfast.fs.directory import Closing, Directory, failing_to, io_failure, make_directories, opened, write_all
from holdfast.fs.names import is_safe_name, printable, split_relative
from holdfast.git import worktrees as linked
from holdfast.git.program import without_repository
from holdfast.issues.gates import Watched, run_checker
from holdfast.issues.model import Checker
from holdfast.repository.git_home import GitHome
from holdfast.repository.landing_plan import PARALLEL
from holdfast.repository.payloads import is_abandoned
from holdfast.repository.preparation import TIME_LIMIT, copy_files, files_to_copy, worktree_variables
from holdfast.repository.scratch_worktrees import RUN_VARIABLE, ScratchWorktree, scratch_worktree, scratch_worktrees
from holdfast.repository.settings import CHECKS, LOCK_FILES, SETUP, Settings, read_settings, require_approved
from holdfast.store.model import SafeName, StructCodec

if TYPE_CHECKING:
    from holdfast.issues.tracker import Tracker
    from holdfast.repository.context import RepositoryPaths
    from holdfast.repository.repository import Repository

MOST_LOG = 2 << 20  # bytes of a log before only the end of each further command is kept
MOST_OF_END = 64 << 10
KEPT_RUNS = 100
_RECORD, _LOG = ".json", ".log"
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW"))
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"))
_ISSUE, _GATE = "HOLDFAST_ISSUE_ID", "HOLDFAST_GATE"
_NOT_OURS = ("HOLDFAST_LOCK_ID", "HOLDFAST_TOKEN", _ISSUE, _GATE)  # the caller may have set them


class LandingCheck(NamedTuple):
    """A command that a candidate must pass; with `gate`, the checker of a gate that these issues require."""

    checker: Checker
    gate: str | None = None
    issue_ids: tuple[str, ...] = ()
    is_setup: bool = False


class CommandRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command of a run. `exit_status` is None if the command was killed or not started; `message` says why."""

    command: str
    passed: bool
    seconds: float
    exit_status: int | None = None
    message: str | None = None
    gate: str | None = None
    issue_ids: tuple[str, ...] = ()
    is_setup: bool = False


class CheckRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of the checks on one commit. `passed` is None while it runs, and if it was cancelled or its process died.

    `commands` are those that have ended, including setup commands; the first one that fails ends the run, after the
    setup of the base if it was a setup command. `read_log` returns the log of a `run_id`.
    """

    run_id: SafeName
    commit: str
    target: str
    landing_id: str
    began_at: str
    holder_id: str
    tree: str = ""  # of the commit
    checks: str = ""  # see `checks_key`
    entries: tuple[str, ...] = ()  # the candidate: `landing_id` is the last of them
    passed: bool | None = None
    cancelled: bool = False
    seconds: float = 0.0
    commands: tuple[CommandRun, ...] = ()


_CODEC: StructCodec[CheckRun] = StructCodec(CheckRun)


# --- The commands -------------------------------------------------------------------------------------


def target_checks(repository: Repository) -> list[LandingCheck]:
    """The commands of the setting `land.checks`, with the time limit `land.check_timeout`.

    Raises `NotApproved` if the user has not approved one of them, or a setup command that would run before them.
    """
    settings = read_settings(repository.root)
    for key in (SETUP, CHECKS):
        require_approved(repository.root, settings, key)
    limit = settings.check_timeout or TIME_LIMIT
    return [LandingCheck(Checker(each, limit, None, {})) for each in settings.checks]


def gate_checks(tracker: Tracker, issue_ids: Collection[str]) -> list[LandingCheck]:
    """The checkers of the automatic gates that these issues require, whatever their status: they decide on the commit
    that lands.

    A checker whose command names HOLDFAST_ISSUE_ID runs once per issue; any other runs once for all of them, without
    that variable. Raises `NotApproved` if the user has not approved one of them.
    """
    gates = tracker.gates.all()
    requiring: dict[str, list[str]] = {}
    for issue_id in issue_ids:
        for key in tracker.issue(issue_id).gates_required:
            requiring.setdefault(key, []).append(issue_id)
    found = []
    for key, issues in requiring.items():
        checker = gates[key].checker if key in gates else None
        if checker is None:
            continue
        tracker.gates.require_approved(key, checker)
        groups = [(each,) for each in issues] if _ISSUE in checker.command else [tuple(issues)]
        found += [LandingCheck(checker, key, each) for each in groups]
    return found


def checks_key(repository: Repository, checks: Sequence[LandingCheck]) -> str:
    """A digest of the checks and the setup before them; a result is valid only for the same digest."""
    settings = read_settings(repository.root)
    everything = (settings.setup, settings.copy, [tuple(each) for each in checks])
    return hashlib.sha256(repr(everything).encode("utf-8", "surrogateescape")).hexdigest()


# --- Runs ---------------------------------------------------------------------------------------------


class CandidateCommit(NamedTuple):
    """A commit to run checks on, its tree, the base that it is built on, which is known to be sound, and the entries
    that it adds to the base."""

    commit: str
    tree: str = ""
    base: str | None = None
    entries: tuple[str, ...] = ()


def run_checks(
    repository: Repository,
    tested: CandidateCommit,
    checks: Sequence[LandingCheck],
    *,
    target: str,
    landing_id: str,
    afresh: bool = False,
    cancelled: threading.Event | None = None,
) -> CheckRun:
    """Run the checks on a commit, one after the other, and return the record of the run.

    Uses a free scratch worktree, or creates one, and locks it until this returns; `afresh` empties and prepares it.
    Threads and processes may call this concurrently; each call has its own worktree. No document lock is held. When
    `cancelled` is set, the running command is ended with its whole process tree, and the run has no result; a caller
    that holds a lease sets it when the lease is lost. Raises `Refused` in a home that is not a git checkout, and
    `SetupFailed` if not even the base can be prepared.
    """
    home = repository.context.home
    if not isinstance(home, GitHome):
        raise Refused(f"{repository.root} is not in a git checkout, so nothing can land in it")
    settings = read_settings(repository.root)
    require_approved(repository.root, settings, SETUP)
    commit = linked.commit_of(home.git, tested.commit)
    now = repository.context.store.now()
    run = CheckRun(
        run_id=f"{int(now * 1000):013d}-{secrets.token_hex(4)}",
        commit=commit,
        target=target,
        landing_id=landing_id,
        began_at=format_instant(now),
        holder_id=repository.context.holder.holder_id,
        tree=tested.tree,
        checks=checks_key(repository, checks),
        entries=tested.entries,
    )
    purpose = _purpose(repository, home, settings, commit)
    kept = settings.parallel or PARALLEL
    with scratch_worktree(home.paths, run.run_id, purpose, kept=kept) as place, _RunFiles(home.paths, run) as files:
        ongoing = _Ongoing(repository, place, files, cancelled or threading.Event())
        if afresh:
            place.empty()
        return ongoing.carry_out(settings, purpose, checks, tested.base)


class _Ongoing:
    """One run, in its scratch worktree."""

    def __init__(
        self, repository: Repository, place: ScratchWorktree, files: _RunFiles, cancelled: threading.Event
    ) -> None:
        self._repository, self._place, self._files, self._cancelled = repository, place, files, cancelled

    def carry_out(self, settings: Settings, purpose: str, checks: Sequence[LandingCheck], base: str | None) -> CheckRun:
        """Check out, prepare, run the commands; return the record as it was written last."""
        began = time.monotonic()
        environment = self._environment()
        passed = self._is_ready(self._files.run.commit, settings, purpose, environment)
        if passed:
            passed = self._all_pass(checks, environment)
        elif base is not None and not self._cancelled.is_set():
            self._require_ready(base, settings, environment)
        is_cancelled = not passed and self._cancelled.is_set()
        seconds = time.monotonic() - began
        return self._files.note(passed=None if is_cancelled else passed, cancelled=is_cancelled, seconds=seconds)

    def _require_ready(self, base: str, settings: Settings, environment: Mapping[str, str]) -> None:
        """Raise `SetupFailed` if a fresh setup of the base fails too."""
        why, log = described(self._files.run), self._files.run.run_id
        self._files.write_end(f"[Preparing {base} too, to see whether the commit is to blame]\n".encode())
        self._place.empty()
        assert isinstance(self._repository.context.home, GitHome)
        purpose = _purpose(self._repository, self._repository.context.home, settings, base)
        if not self._is_ready(base, settings, purpose, environment) and not self._cancelled.is_set():
            message = f"no scratch worktree can be prepared for checks, not even for the tip of the branch: {why}"
            look = f"'holdfast landing log {self._files.run.landing_id}' has the output"
            hint = f"The work stays queued. Find the cause ({look}), then continue: 'holdfast land --all'."
            raise SetupFailed(message, hint=hint, log=log)

    def _is_ready(self, commit: str, settings: Settings, purpose: str, environment: Mapping[str, str]) -> bool:
        return self._checks_out(commit, purpose) and self._is_prepared(settings, purpose, environment)

    def _checks_out(self, commit: str, purpose: str) -> bool:
        """Check out a commit. If git cannot, the run fails as if a check had failed, and other candidates go on."""
        if not self._place.is_prepared(purpose):
            self._place.empty()
        try:
            self._place.check_out(commit)
        except GitFailed as failure:
            self._files.write_end(f"{failure.message}\n".encode("utf-8", "backslashreplace"))
            ended = CommandRun(command=f"git checkout {commit}", passed=False, seconds=0.0, message=failure.message)
            self._files.note(commands=(*self._files.run.commands, ended))
            return False
        return True

    def _is_prepared(self, settings: Settings, purpose: str, environment: Mapping[str, str]) -> bool:
        """Prepare the worktree unless it is already prepared; return False if a setup command fails."""
        if self._place.is_prepared(purpose):
            return True
        copy_files(self._repository, settings, self._place.path)
        setup = [LandingCheck(Checker(each, TIME_LIMIT, None, {}), is_setup=True) for each in settings.setup]
        passed = self._all_pass(setup, environment)
        if passed:
            self._place.note(prepared=purpose)
        return passed

    def _all_pass(self, checks: Sequence[LandingCheck], environment: Mapping[str, str]) -> bool:
        return all(self._passes(each, environment) for each in checks)

    def _passes(self, check: LandingCheck, environment: Mapping[str, str]) -> bool:
        if self._cancelled.is_set():
            return False
        if check.gate is not None:
            environment = {**environment, _GATE: check.gate}
            if _ISSUE in check.checker.command:
                environment[_ISSUE] = check.issue_ids[0]
        files, command = self._files, check.checker.command
        files.write(f"$ {printable(command)}\n".encode())
        result = run_checker(check.checker, self._place.path, environment, Watched(files.write, self._cancelled))
        how = result.message or f"exit status {result.exit_code}"
        files.write_end(f"[{how}, after {format_duration(result.seconds)}]\n".encode())
        ended = CommandRun(
            command=command,
            passed=result.passed,
            seconds=result.seconds,
            exit_status=result.exit_code,
            message=result.message,
            gate=check.gate,
            issue_ids=check.issue_ids,
            is_setup=check.is_setup,
        )
        files.note(commands=(*files.run.commands, ended))
        return result.passed

    def _environment(self) -> dict[str, str]:
        repository, run = self._repository, self._files.run
        kept = {name: value for name, value in repository.environment.items() if name not in _NOT_OURS}
        return {
            **without_repository(kept),
            **worktree_variables(repository, self._place.name),
            "HOLDFAST_REPO": str(repository.root),
            "HOLDFAST_WORKTREE": self._place.name,
            "HOLDFAST_LANDING": run.landing_id,
            "HOLDFAST_TARGET": run.target,
            "HOLDFAST_COMMIT": run.commit,
            RUN_VARIABLE: run.run_id,
        }


def _purpose(repository: Repository, home: GitHome, settings: Settings, commit: str) -> str:
    """Identifies everything that a scratch worktree is prepared from; equal for commits that need no new setup."""
    if not settings.setup and not settings.copy:
        return "nothing"
    patterns = [split_relative(each) for each in settings.inputs or LOCK_FILES]
    inputs = []
    for line in home.git.run("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
        facts, _, path = os.fsdecode(line).partition("\t")
        if path and any(_is_match(path.split("/"), each) for each in patterns):
            inputs.append((facts, path))
    everything = (settings.setup, settings.copy, files_to_copy(repository, settings), inputs)
    return hashlib.sha256(repr(everything).encode("utf-8", "surrogateescape")).hexdigest()


def _is_match(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern, part by part; `**` stands for any number of directories. Only the last `**` so
    far is tried again: what comes before it matches anyway."""
    if pattern[-1] != "**" and not fnmatchcase(path[-1], pattern[-1]):
        return False  # by far the most frequent case
    at, here, again = 0, 0, None
    while at < len(path):
        if here < len(pattern) and pattern[here] == "**":
            here += 1
            again = at, here
        elif here < len(pattern) and fnmatchcase(path[at], pattern[here]):
            at, here = at + 1, here + 1
        elif again is not None:
            again = again[0] + 1, again[1]
            at, here = again
        else:
            return False
    return here == len(pattern)


def described(run: CheckRun | None) -> str:
    """The failed command of a run, and how it failed, as text for people."""
    failed = next((each for each in run.commands if not each.passed), None) if run else None
    if failed is None:
        return "the checks could not run"
    what = "the setup " if failed.is_setup else ""
    return f"{what}'{failed.command}' failed: {failed.message or f'exit status {failed.exit_status}'}"


# --- Records and logs ---------------------------------------------------------------------------------


class _RunFiles(Closing):
    """The record and the log of a run in progress."""

    def __init__(self, paths: RepositoryPaths, run: CheckRun) -> None:
        place = _place(paths)
        make_directories(place, mode=0o700)
        self.run = run
        self._directory = Directory.open(place)
        self._lock = threading.Lock()
        self._left, self._dropped, self._end = MOST_LOG, 0, b""
        self._fd: int | None = None
        for old in _run_ids(self._directory)[KEPT_RUNS - 1 :]:
            for suffix in (_LOG, _RECORD):
                durable.remove_in(self._directory, old + suffix, durable=False)
        self._fd = self._directory.create(run.run_id + _LOG, _WRITE, 0o600)
        self.note()

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            calls.close(fd)
        self._directory.close()

    def note(self, **changes: object) -> CheckRun:
        """Write the record with these changes, and return it."""
        self.run = msgspec.structs.replace(self.run, **changes)
        durable.replace_in(self._directory, self.run.run_id + _RECORD, _CODEC.encode(self.run) + b"\n", mode=0o600)
        return self.run

    def write(self, block: bytes) -> None:
        """Append output until the log has reached its limit; from then on, keep only the end of the output."""
        with self._lock:
            if self._fd is None:
                return  # from a process that left the process tree and outlived the run
            now, later = block[: self._left], block[self._left :]
            self._left -= len(now)
            self._append(now)
            if later:
                kept = self._end + later
                self._dropped += max(0, len(kept) - MOST_OF_END)
                self._end = kept[-MOST_OF_END:]

    def write_end(self, line: bytes) -> None:
        """Append the end of a command's output, if `write` has kept it, and a last line."""
        with self._lock:
            dropped = f"\n[{self._dropped} bytes left out]\n".encode() if self._dropped else b""
            self._append(dropped + self._end + line)
            self._dropped, self._end = 0, b""

    def _append(self, content: bytes) -> None:
        if self._fd is not None and content:
            with failing_to("write", self._directory.where(self.run.run_id + _LOG)):
                write_all(self._fd, content)


def check_runs(paths: RepositoryPaths) -> Iterator[CheckRun]:
    """The runs that this machine keeps, the newest first."""
    try:
        directory = Directory.open(_place(paths))
    except NotFound:
        return
    with directory:
        for run_id in _run_ids(directory):
            name = run_id + _RECORD
            with contextlib.suppress(NotFound, Corrupt):  # removed meanwhile; or not ours
                yield _CODEC.decode(durable.read_in(directory, name, limit=MOST_LOG), directory.where(name))


def is_running(paths: RepositoryPaths, run: CheckRun) -> bool:
    """Whether a process on this machine is still carrying out a run."""
    used = (each for each in scratch_worktrees(paths) if each.state().run_id == run.run_id)
    return run.passed is None and not run.cancelled and any(not is_abandoned(each.records) for each in used)


def read_log(paths: RepositoryPaths, run_id: str, *, offset: int = 0, limit: int = 1 << 20) -> bytes:
    """Part of the log of a run, also while it runs; empty at the end. Raises `NotFound` if the log is not kept here."""
    missing = NotFound(f"the log of the run {printable(run_id)!r} is not kept here", run_id=run_id)
    if not is_safe_name(run_id):
        raise missing
    try:
        with Directory.open(_place(paths)) as directory:
            name = run_id + _LOG
            with opened(directory.at(name), _READ, dir_fd=directory.fd) as fd:
                calls.lseek(fd, offset, os.SEEK_SET)
                return calls.read(fd, limit)
    except (NotFound, FileNotFoundError):
        raise missing from None
    except OSError as error:
        raise io_failure("read the log of", run_id, error) from error


def _place(paths: RepositoryPaths) -> Path:
    return paths.checks / "runs"


def _run_ids(directory: Directory) -> list[str]:
    """The runs, the newest first: their names begin with the time."""
    names = (name.removesuffix(_RECORD) for name in directory.names() if name.endswith(_RECORD))
    return sorted(filter(is_safe_name, names), reverse=True)
