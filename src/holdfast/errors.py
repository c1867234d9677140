"""Everything that can go wrong, as one tree of failures that people and programs can both read.

Each class has a stable `code` (API: never renamed, never reused), the `exit_status` that a command
ends with, whether trying again may help (`retryable`), and a `hint` that says what to do next.
The facts of one occurrence are fields of the exception and, for programs, the mapping `facts`.

All of them are declared here and in the modules of this package, and imported from here. It imports nothing
else, so that every layer can raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum


class ExitStatus(IntEnum):
    """What the exit status of a command means. One meaning each; the table is part of the API."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    FENCED = 5
    CORRUPT = 6
    REFUSED = 7
    TIMED_OUT = 75
    INTERRUPTED = 130


class Failure(Exception):
    """Something that Holdfast could not or would not do, with a code, an exit status and a hint."""

    code = "E_UNEXPECTED"
    exit_status = ExitStatus.UNEXPECTED
    retryable = False
    hint = "This should not happen. Please report it with the command that you ran and its output."

    def __init__(self, message: str, *, hint: str | None = None, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, object] = facts
        if hint is not None:
            self.hint = hint

    def as_record(self) -> dict[str, object]:
        """Describe this failure as plain values, in the shape of the JSON envelope's `error`."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "hint": self.hint,
            **self.facts,
        }


class UsageFailure(Failure):
    """A command or call was given something that it cannot take."""

    code = "E_USAGE"
    exit_status = ExitStatus.USAGE
    hint = "See the command's --help for what it takes."


class Corrupt(Failure):
    """Stored content is not what it must be. It was neither skipped nor overwritten."""

    code = "E_CORRUPT"
    exit_status = ExitStatus.CORRUPT
    hint = "Keep the file, look at what is wrong with it, and restore or repair it before you go on."


class JsonInvalid(Corrupt):
    """A text is not the strict JSON that it must be."""

    code = "E_JSON_INVALID"
    hint = "Repair the text by hand: valid UTF-8, no NaN or Infinity, no key twice in one object."


class PartialSnapshot(Corrupt):
    """A snapshot was named that was never completed."""

    code = "E_PARTIAL_SNAPSHOT"
    hint = "Take the snapshot again; 'holdfast doctor --strict' lists and removes what an interruption left."


class AuditChainBroken(Corrupt):
    """An entry of the audit trail does not follow from the one before it."""

    code = "E_AUDIT_CHAIN_BROKEN"
    hint = "Somebody changed the trail by hand, or the disk did. Compare it with a copy from before."


class Unhealthy(Corrupt):
    """The examination of a repository found something wrong."""

    code = "E_UNHEALTHY"
    hint = "'holdfast doctor --fix' repairs what can be repaired without risk; the findings say the rest."

    def __init__(self, message: str, findings: Mapping[str, object]) -> None:
        super().__init__(message)
        self.facts = {"healthy": False, **findings}


class Refused(Failure):
    """Something that could be done, but that would put work at risk."""

    code = "E_REFUSED"
    exit_status = ExitStatus.REFUSED
    hint = "Read the message: it names the risk."


class DependencyCycle(Refused):
    """A dependency would make issues wait for each other in a circle."""

    code = "E_DEPENDENCY_CYCLE"
    hint = "Remove one of the dependencies that the message names first, if this one is right."


class Blocked(Refused):
    """The issue waits for other issues that are not done."""

    code = "E_BLOCKED"
    hint = "Finish what it waits for first, or remove the dependency: 'holdfast blocked' shows why."


class TransitionRefused(Refused):
    """The issue cannot go from the state that it is in to the one that was asked for."""

    code = "E_TRANSITION_REFUSED"
    hint = "See 'holdfast issue show' for the state that it is in."


class PathEscape(Refused):
    """A path leads out of the directory that it must stay in, or through a symbolic link."""

    code = "E_PATH_ESCAPE"
    hint = "Use a plain path without '..' and symbolic links."


class DirectoryReplaced(Refused):
    """What stands where the directory of a worktree should be is none. It is not touched."""

    code = "E_DIRECTORY_REPLACED"
    hint = (
        "Move it away. Then put the directory back, or restore a snapshot: 'holdfast restore ID --inplace'."
    )


class NestedRepository(Refused):
    """A repository was to be made inside of another one."""

    code = "E_NESTED_REPOSITORY"
    hint = "Make it elsewhere; or, if that is what you want, say --nested."


class FilesystemUnsafe(Refused):
    """This filesystem does not do what the promises rest on."""

    code = "E_FILESYSTEM_UNSAFE"
    hint = "Use a local filesystem (ext4, xfs, btrfs, APFS, NTFS), or one of the server-backed stores."


class EngineUnavailable(Refused):
    """The way of taking snapshots that was asked for does not work on this filesystem."""

    code = "E_ENGINE_UNAVAILABLE"
    hint = "Leave the choice of the engine to Holdfast, or take 'copy', which works everywhere."


class ExchangeUnavailable(Refused):
    """This filesystem cannot swap two directories in one step; nothing was changed."""

    code = "E_EXCHANGE_UNAVAILABLE"
    hint = "Use a filesystem with an atomic exchange (ext4, xfs, btrfs, APFS), or swap by two renames."


class IoFailure(Failure):
    """The operating system could not read or write. What was there before is still there."""

    code = "E_IO"
    hint = "Look at the system's own message: a full disk, missing permissions, or a failing device."

    def __init__(self, action: str, path: object, error: OSError, *, hint: str | None = None) -> None:
        reason = error.strerror or str(error)
        super().__init__(
            f"cannot {action} {path}: {reason}", hint=hint, path=str(path), errno=error.errno, reason=reason
        )


class NotWritable(IoFailure):
    """The directory or file cannot be written by this user, or is on a read-only filesystem."""

    code = "E_NOT_WRITABLE"
    hint = "Check the owner and mode of the directory, and whether it is mounted read-only."


class NotReadable(IoFailure):
    """A file or directory cannot be read by this user."""

    code = "E_NOT_READABLE"
    hint = "Check its owner and mode, or run as a user who may read it."


class NotDurable(IoFailure):
    """The change is visible, but the system could not promise that it survives a power cut."""

    code = "E_NOT_DURABLE"
    hint = "The disk reported an error while syncing. Check its health before you trust it with more."


class OutcomeUnknown(Failure):
    """A commit was on its way when the store stopped answering: it may have been made, or not."""

    code = "E_OUTCOME_UNKNOWN"
    hint = "Read back what the commit was to change before you try again: it may have been made."

    def __init__(self, commit_id: str, reason: object) -> None:
        super().__init__(
            f"it cannot be known whether the commit {commit_id} was made: {reason}", commit_id=commit_id
        )
        self.commit_id = commit_id


# --- The server that keeps the shared documents -----------------------------------------------------


class StoreUnavailable(Failure):
    """The server that keeps the shared documents does not answer. Nothing was changed by this call."""

    code = "E_STORE_UNAVAILABLE"
    exit_status = ExitStatus.TIMED_OUT
    retryable = True
    hint = "Check the address of the store, and that its server runs and can be reached; then try again."
    trouble = "cannot be reached"

    def __init__(self, place: str, reason: object, *, hint: str | None = None) -> None:
        """`place` is the address of the store, without secrets."""
        super().__init__(f"the store {place} {self.trouble}: {reason}", hint=hint, store=place)
        self.place = place


class StoreAccessRefused(StoreUnavailable):
    """The server answers, but does not let this user in, or not do what is needed. Nothing was changed."""

    code = "E_STORE_ACCESS_REFUSED"
    exit_status = ExitStatus.REFUSED
    retryable = False
    hint = (
        "Check the user, its password or certificate, and its rights. Secrets are not in the repository: "
        "they come from ~/.pgpass, PGPASSWORD, client certificates, or the whole address in HOLDFAST_STORE."
    )
    trouble = "refuses"


class StoreUntrusted(StoreUnavailable):
    """The connection to the server cannot be encrypted, or the two do not trust each other's certificates."""

    code = "E_STORE_UNTRUSTED"
    exit_status = ExitStatus.REFUSED
    retryable = False
    hint = (
        "Check what the address says of TLS (sslmode, sslrootcert, sslcert, sslkey; for etcd tls, cacert, "
        "cert, key), that the files are there, and the certificates' dates and names of hosts."
    )
    trouble = "cannot be talked to safely"


class StoreMissing(StoreUnavailable):
    """The server answers, but has no such database. Nothing was changed by this call."""

    code = "E_STORE_MISSING"
    exit_status = ExitStatus.NOT_FOUND
    retryable = False
    hint = "Check the name of the database in the address, or let its owner make it: CREATE DATABASE."
    trouble = "is not there"


class StoreIncompatible(Refused):
    """The server keeps documents in a form that this version of Holdfast does not know."""

    code = "E_STORE_INCOMPATIBLE"
    hint = "Use the version of Holdfast that wrote this store, or a later one; nothing was changed."


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
    hint = "Work on another node, or wait for this one: 'holdfast ledger claim NODE --actor YOU --wait 5m'."


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
