"""Everything that can go wrong, as one tree of failures that people and programs can both read.

Each class has a stable `code` (API: never renamed, never reused), the `exit_status` that a command
ends with, whether trying again may help (`retryable`), and a `hint` that says what to do next.
The facts of one occurrence are fields of the exception and, for programs, the mapping `facts`.

All of them are declared here and in the modules of this package, and imported from here. It imports nothing
else, so that every layer can raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.errors.base import ExitStatus as ExitStatus
from holdfast.errors.base import Failure as Failure
from holdfast.errors.base import UsageFailure as UsageFailure
from holdfast.errors.system import AuditChainBroken as AuditChainBroken
from holdfast.errors.system import Blocked as Blocked
from holdfast.errors.system import Corrupt as Corrupt
from holdfast.errors.system import DependencyCycle as DependencyCycle
from holdfast.errors.system import DirectoryReplaced as DirectoryReplaced
from holdfast.errors.system import EngineUnavailable as EngineUnavailable
from holdfast.errors.system import ExchangeUnavailable as ExchangeUnavailable
from holdfast.errors.system import FilesystemUnsafe as FilesystemUnsafe
from holdfast.errors.system import IoFailure as IoFailure
from holdfast.errors.system import JsonInvalid as JsonInvalid
from holdfast.errors.system import NestedRepository as NestedRepository
from holdfast.errors.system import NotDurable as NotDurable
from holdfast.errors.system import NotReadable as NotReadable
from holdfast.errors.system import NotWritable as NotWritable
from holdfast.errors.system import OutcomeUnknown as OutcomeUnknown
from holdfast.errors.system import PartialSnapshot as PartialSnapshot
from holdfast.errors.system import PathEscape as PathEscape
from holdfast.errors.system import Refused as Refused
from holdfast.errors.system import StoreAccessRefused as StoreAccessRefused
from holdfast.errors.system import StoreIncompatible as StoreIncompatible
from holdfast.errors.system import StoreMissing as StoreMissing
from holdfast.errors.system import StoreUnavailable as StoreUnavailable
from holdfast.errors.system import StoreUntrusted as StoreUntrusted
from holdfast.errors.system import TransitionRefused as TransitionRefused
from holdfast.errors.system import Unhealthy as Unhealthy

# --- The caller's words ---------------------------------------------------------------------------


class NameInvalid(UsageFailure):
    """A name has characters, a length or a form that is not allowed."""

    code = "E_NAME_INVALID"
    hint = "Use letters, digits, '.', '_' and '-', at most 128 of them, and no '..'."


class SettingInvalid(UsageFailure):
    """A setting (an option, an environment variable, a configuration value) cannot be understood."""

    code = "E_SETTING_INVALID"
    hint = "Correct the value, or remove it to get the default."

    def __init__(self, setting: str, value: str, expected: str) -> None:
        shown = repr(value if len(value) <= 200 else value[:197] + "...")
        super().__init__(
            f"{setting} is {shown}, but must be {expected}", setting=setting, value=value, expected=expected
        )


class TooLarge(UsageFailure):
    """Something is over the size limit; nothing of it was written."""

    code = "E_TOO_LARGE"
    hint = "Make it smaller, or keep the bulk in a file of its own and refer to that."

    def __init__(self, what: str, size: int, limit: int, *, unit: str = "bytes") -> None:
        super().__init__(f"{what} is {size} {unit}; the limit is {limit}", what=what, size=size, limit=limit)


class Ambiguous(UsageFailure):
    """A name that was shortened fits more than one."""

    code = "E_AMBIGUOUS"
    hint = "Give more characters of the one that you mean."

    def __init__(self, name: str, candidates: Sequence[str]) -> None:
        shown = ", ".join(candidates[:10]) + (", ..." if len(candidates) > 10 else "")
        super().__init__(
            f"{name} may mean any of {len(candidates)}: {shown}", name=name, candidates=list(candidates)
        )
        self.candidates = candidates


class IdAmbiguous(UsageFailure):
    """The beginning of an id fits several of them."""

    code = "E_ID_AMBIGUOUS"
    hint = "Write more of the id."

    def __init__(self, prefix: str, matches: Sequence[str]) -> None:
        shown = ", ".join(matches[:5]) + (", ..." if len(matches) > 5 else "")
        super().__init__(f"{prefix!r} is the beginning of {len(matches)} ids: {shown}", prefix=prefix)


# --- What is or is not there -----------------------------------------------------------------------


class NotFound(Failure):
    """What was named does not exist."""

    code = "E_NOT_FOUND"
    exit_status = ExitStatus.NOT_FOUND
    hint = "Check the spelling, and the directory that you are in."


class NotInitialised(NotFound):
    """There is no issue tracker here."""

    code = "E_NOT_INITIALISED"
    hint = "Make one with 'holdfast issue init', or name the directory that has one with --repo."


class SnapshotCollected(NotFound):
    """A garbage collection deletes the snapshot, or has deleted it while it was being read."""

    code = "E_SNAPSHOT_COLLECTED"
    retryable = True
    hint = (
        "Name another one: 'holdfast history --all' shows what is there. What you need, keep: 'holdfast pin'."
    )


class CommandNotFound(NotFound):
    """The command to run does not exist, or is not executable."""

    code = "E_COMMAND_NOT_FOUND"
    hint = "Check the spelling of the command after '--', and that it is on the PATH and executable."


class AlreadyExists(Failure):
    """What was to be created is there already; it was left as it is."""

    code = "E_ALREADY_EXISTS"
    exit_status = ExitStatus.CONFLICT
    hint = "Choose another name, or remove what is there first."


# --- Held by somebody, or changed by somebody ------------------------------------------------------


class LockConflict(Failure):
    """Somebody else holds what was asked for."""

    code = "E_LOCK_CONFLICT"
    exit_status = ExitStatus.CONFLICT
    retryable = True
    hint = "Wait until the holder has finished, or its lease has expired. --wait 5m stands in line for you."


class RepoLocked(LockConflict):
    """Another process holds the lock of this repository."""

    code = "E_REPO_LOCKED"
    hint = "Wait until the holder is done. 'holdfast repo-lock status' shows who it is."

    def __init__(self, repo_id: str, path: object, info: Mapping[str, object] | None) -> None:
        """`info` is what the lock file says about its holder, None if it could not be read."""
        who = "somebody (its content cannot be read)"
        if info is not None:
            who = f"pid {info.get('pid')}" + (f" ({info['cmd']})" if info.get("cmd") else "")
            who += f" since {info['created_at']}" if info.get("created_at") else ""
        super().__init__(
            f"the repository {repo_id} is locked by {who}", repo_id=repo_id, path=str(path), info=info
        )
        self.repo_id = repo_id
        self.path = path
        self.info = info


class Deadlock(LockConflict):
    """Everyone in a circle waits for what the next one holds; this wait was given up so that others go on."""

    code = "E_DEADLOCK"
    hint = "Release what you hold, wait a moment and ask again, if you can in the same order as the others."


class InUse(Failure):
    """Running processes work in the directory that was to be moved or deleted."""

    code = "E_IN_USE"
    exit_status = ExitStatus.CONFLICT
    retryable = True
    hint = "End these processes, or let them leave the directory; --force goes ahead in spite of them."


class LockReentry(LockConflict):
    """The calling thread holds this lock already and would wait for itself for ever."""

    code = "E_LOCK_REENTRY"
    retryable = False
    hint = "Pass the guard that you have instead of locking again, or release it first."


class LockChanged(LockConflict):
    """The lock that was to be broken is not there any more, or is another one by now."""

    code = "E_LOCK_CHANGED"
    retryable = False
    hint = "Look at the lock again: it has moved on, and what you judged is gone."


class NodeLocked(LockConflict):
    """Another agent holds the claim on this node, or waits for it and comes first."""

    code = "E_NODE_LOCKED"
    hint = "Work on another node, or wait for this one: 'holdfast claim take NODE --owner YOU --wait 5m'."


class SequenceMismatch(Failure):
    """The ledger has moved on since the caller looked at it; nothing was appended."""

    code = "E_SEQUENCE_MISMATCH"
    exit_status = ExitStatus.CONFLICT
    retryable = True
    hint = "Read the events that have come since, decide again, and append with the new sequence."

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(
            f"sequence mismatch: the ledger was to be at {expected}, but is at {found}",
            expected=expected,
            found=found,
        )
        self.expected = expected
        self.found = found


class IssueClaimed(LockConflict):
    """Somebody else is working on the issue, and its claim has not run out."""

    code = "E_ISSUE_CLAIMED"
    hint = "Take another issue ('holdfast issue claim-next'), or show the claim's exact id with --claim."


class Changed(Failure):
    """What was looked at was changed by somebody else before it could be acted upon."""

    code = "E_CHANGED"
    exit_status = ExitStatus.CONFLICT
    retryable = True
    hint = "Look again at what is there now, and try again."


class VersionMismatch(Failure):
    """A change was to be made to one version of something, and it is another one by now."""

    code = "E_VERSION_MISMATCH"
    exit_status = ExitStatus.CONFLICT
    hint = "Look at it again: somebody has changed it meanwhile."


class PlanMismatch(Failure):
    """A plan of garbage collection does not fit what is there by now; nothing of it was deleted."""

    code = "E_GC_PLAN_MISMATCH"
    exit_status = ExitStatus.CONFLICT
    hint = "Make a new plan and look at it: 'holdfast gc plan'."


class ConsistencyUnavailable(Failure):
    """The payload changed while it was being captured; nothing was published."""

    code = "E_CONSISTENCY_UNAVAILABLE"
    exit_status = ExitStatus.CONFLICT
    retryable = True
    hint = "Stop what writes into the worktree and try again, or ask for --consistency best_effort."


class LockTimeout(Failure):
    """A lock could not be had in time."""

    code = "E_LOCK_TIMEOUT"
    exit_status = ExitStatus.TIMED_OUT
    retryable = True
    hint = "Wait a few seconds and try again, or allow more time."

    def __init__(
        self,
        path: object,
        timeout: float,
        waited: str,
        *,
        holders: Sequence[Mapping[str, object]] = (),
        summary: str = "Lock timeout",
    ) -> None:
        """`waited` is the timeout as people say it; `holders` are those that can be known."""
        message = f"{summary}: could not acquire lock on {path} after {waited}"
        if holders:
            message += "; held by " + ", ".join(str(holder["shown"]) for holder in holders)
        super().__init__(message, path=str(path), timeout=timeout, holders=list(holders))
        self.path = str(path)
        self.timeout = timeout
        self.holders = holders


class TooManyRetries(Failure):
    """An operation met contention on every attempt that it was allowed."""

    code = "E_TOO_MANY_RETRIES"
    exit_status = ExitStatus.TIMED_OUT
    retryable = True
    hint = "Try again later, or allow more attempts."

    def __init__(self, attempts: int, last: Exception) -> None:
        super().__init__(
            f"Lock contention: too many retries ({attempts}); the last one failed with: {last}",
            attempts=attempts,
            last=last.as_record() if isinstance(last, Failure) else repr(last),
        )
        self.attempts = attempts
        self.last = last


# --- Fenced out -------------------------------------------------------------------------------------


class LockNotHeld(Failure):
    """The caller does not hold the lock that this needs; somebody else may."""

    code = "E_LOCK_NOT_HELD"
    exit_status = ExitStatus.FENCED
    hint = "Acquire the lock first. If it was yours, it has been released or taken over since."


class LockExpired(Failure):
    """The caller's lease has run out; what it protected may belong to somebody else now."""

    code = "E_LOCK_EXPIRED"
    exit_status = ExitStatus.FENCED
    hint = "Acquire the lock again and check what changed before you go on writing."


class FencingMismatch(Failure):
    """The caller's token is not the current one: a later holder has been let in. Nothing was published."""

    code = "E_FENCING_MISMATCH"
    exit_status = ExitStatus.FENCED
    hint = "Your lease was taken over. Acquire it again and reapply your work on the current state."


# --- Anything else ----------------------------------------------------------------------------------


class GateFailed(Failure):
    """The checker of a gate ran and did not pass."""

    code = "E_GATE_FAILED"
    hint = "Read what the checker said, correct it, and check again."


class ExtraMissing(UsageFailure):
    """What was asked for needs a package that is not installed."""

    code = "E_EXTRA_MISSING"
    hint = "Install it beside Holdfast, such as: pip install 'psycopg[binary]>=3.3'."


class Interrupted(Failure):
    """Ended by the user."""

    code = "E_INTERRUPTED"
    exit_status = ExitStatus.INTERRUPTED
    retryable = True
    hint = "Run the command again to go on."

    def __init__(self) -> None:
        super().__init__("interrupted")


def all_failures(root: type[Failure] = Failure) -> Iterator[type[Failure]]:
    """Yield every class of the tree, parents first: the reference page and the tests walk it."""
    yield root
    for child in root.__subclasses__():
        yield from all_failures(child)
