"""Every failure of Holdfast, as one tree of exceptions for people and programs.

Each class has a stable `code` (API: never renamed, never reused), the `exit_status` of a command that fails
with it, whether trying again may help (`retryable`), and a `hint` that says what to do. The message says what
failed and why; the facts are attributes of the exception and, for programs, the mapping `facts`.

All failures are declared here. The module imports nothing of the package, so every layer can raise them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses of commands, each with one meaning; the table is part of the API."""

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
    """An unexpected error. The base class of all failures."""

    code = "E_UNEXPECTED"
    exit_status = ExitStatus.UNEXPECTED
    retryable = False
    hint = "This is a defect. Please report it with the command that you ran and its output."

    def __init_subclass__(
        cls, *, code: str | None = None, exit_status: ExitStatus | None = None, retryable: bool | None = None
    ) -> None:
        given = {"code": code, "exit_status": exit_status, "retryable": retryable}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, hint: str | None = None, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, object] = facts
        if hint is not None:
            self.hint = hint

    def as_record(self) -> dict[str, object]:
        """The failure as JSON values: the `error` object of the output."""
        record = {name: getattr(self, name) for name in ("code", "message", "retryable", "hint")}
        return {**record, **self.facts}


def all_failures(root: type[Failure] = Failure) -> Iterator[type[Failure]]:
    """Yield every class of the tree, parents first: the reference page and the tests walk it."""
    yield root
    for child in root.__subclasses__():
        yield from all_failures(child)


def _some(names: Sequence[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def format_size(size: int) -> str:
    """A number of bytes for people: `512 B`, `1.5 MiB`."""
    value, units = size / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} B" if size < 1024 else f"{value:.1f}".removesuffix(".0") + f" {units[0]}"


# --- Usage: the arguments are invalid ---------------------------------------------------------------


class UsageFailure(Failure, code="E_USAGE", exit_status=ExitStatus.USAGE):
    """A command or call has an argument that it does not accept."""

    hint = "See the command's --help."


class NameInvalid(UsageFailure, code="E_NAME_INVALID"):
    """A name has characters, a length or a form that is not allowed."""

    hint = "Use letters, digits, '.', '_' and '-', at most 128 of them, and no '..'."


class SettingInvalid(UsageFailure, code="E_SETTING_INVALID"):
    """A setting (an option, an environment variable, a configuration value) has an invalid value."""

    hint = "Correct the value, or remove it to use the default."

    def __init__(self, setting: str, value: str, expected: str) -> None:
        quoted = repr(value if len(value) <= 200 else value[:197] + "...")
        message = f"{setting} is {quoted}, but must be {expected}"
        super().__init__(message, setting=setting, value=value, expected=expected)


class TooLarge(UsageFailure, code="E_TOO_LARGE"):
    """Something exceeds its size limit; nothing was written."""

    hint = "Make it smaller, or store the bulk in a separate file and refer to it."

    def __init__(self, what: str, size: int, limit: int, *, unit: str = "bytes") -> None:
        shown = f"{limit} {unit}"
        if unit == "bytes" and limit >= 1024:
            shown = f"{format_size(limit)} ({shown})"  # a size just above it would look the same in MiB
        super().__init__(f"{what} is {size} {unit}; the limit is {shown}", what=what, size=size, limit=limit)


class Ambiguous(UsageFailure, code="E_AMBIGUOUS"):
    """A shortened name is ambiguous."""

    hint = "Give more characters of the name."

    def __init__(self, name: str, candidates: Sequence[str]) -> None:
        message = f"{name} is ambiguous: it matches {len(candidates)} names: {_some(candidates, 10)}"
        super().__init__(message, name=name, candidates=list(candidates))
        self.candidates = candidates


class IdAmbiguous(UsageFailure, code="E_ID_AMBIGUOUS"):
    """A shortened id is ambiguous."""

    hint = "Give more characters of the id."

    def __init__(self, prefix: str, matches: Sequence[str]) -> None:
        message = f"{prefix!r} is ambiguous: it matches {len(matches)} ids: {_some(matches, 5)}"
        super().__init__(message, prefix=prefix)


class ExtraMissing(UsageFailure, code="E_EXTRA_MISSING"):
    """The operation needs a package that is not installed."""

    hint = "Install it in the environment of Holdfast, for example: pip install 'psycopg[binary]>=3.3'."


# --- Absence and existence --------------------------------------------------------------------------


class NotFound(Failure, code="E_NOT_FOUND", exit_status=ExitStatus.NOT_FOUND):
    """The named thing does not exist."""

    hint = "Check the spelling and your current directory."


class NotInitialised(NotFound, code="E_NOT_INITIALISED"):
    """There is no repository, issue tracker or ledger here."""

    hint = "Create one: 'holdfast init DIR', 'holdfast issue init' or 'holdfast ledger init'. Or name one with --repo."

    def __init__(self, message: str, *, create: str | None = "holdfast issue init", **facts: object) -> None:
        """`create` is the command that creates the missing thing; None if several could."""
        super().__init__(message, hint=create and f"Create one: '{create}'. Or name one with --repo.", **facts)


class SnapshotCollected(NotFound, code="E_SNAPSHOT_COLLECTED", retryable=True):
    """Garbage collection is deleting the snapshot, or deleted it while it was being read."""

    hint = "Choose another snapshot from 'holdfast history --all'. To protect one, use 'holdfast pin'."


class SnapshotElsewhere(NotFound, code="E_SNAPSHOT_ELSEWHERE"):
    """The snapshot was taken in another clone, and its content is not here."""

    hint = "Run 'holdfast snapshot push' in that clone, and 'holdfast snapshot fetch' here."


class Archived(Failure, code="E_ARCHIVED", exit_status=ExitStatus.NOT_FOUND):
    """The beginning of the ledger or of the audit trail was archived: the message names the file."""

    hint = "Read that file: JSON lines, in order. Later events are still here: 'holdfast ledger log', 'holdfast audit'."

    def __init__(self, message: str, archive: object, last: int, **facts: str | int) -> None:
        """`archive` is the document of the stream, `last` the position of the last archived record."""
        super().__init__(message)
        self.facts = {**facts, "archived": last}
        self.archive = archive
        self.last = last


class CommandNotFound(NotFound, code="E_COMMAND_NOT_FOUND"):
    """The command to run does not exist, or is not executable."""

    hint = "Check the spelling of the command after '--', and that it is on the PATH and executable."


class AlreadyExists(Failure, code="E_ALREADY_EXISTS", exit_status=ExitStatus.CONFLICT):
    """The thing to create already exists; it was not changed."""

    hint = "Choose another name, or remove the existing one first."


# --- Contention: another process holds it, waits for it, or changed it ------------------------------


class LockConflict(Failure, code="E_LOCK_CONFLICT", exit_status=ExitStatus.CONFLICT, retryable=True):
    """Another holder has the lock or lease."""

    hint = "Wait until the holder is done or its lease expires. --wait 5m queues for it."


class RepoLocked(LockConflict, code="E_REPO_LOCKED"):
    """Another process holds the lock of this repository."""

    hint = "Wait until the holder is done. 'holdfast repo-lock status' shows the holder."

    def __init__(self, repo_id: str, path: object, info: Mapping[str, object] | None) -> None:
        """`info` is the lock file's record of its holder; None if it cannot be read."""
        holder = "an unknown holder (the lock file cannot be read)"
        if info is not None:
            holder = f"pid {info.get('pid')}" + (f" ({info['cmd']})" if info.get("cmd") else "")
            holder += f" since {info['created_at']}" if info.get("created_at") else ""
        message = f"the repository {repo_id} is locked by {holder}"
        super().__init__(message, repo_id=repo_id, path=str(path), info=info)
        self.repo_id = repo_id
        self.path = path
        self.info = info


class LockReentry(LockConflict, code="E_LOCK_REENTRY", retryable=False):
    """The calling thread already holds this lock, and would wait for itself forever."""

    hint = "Reuse the lock that this thread holds, or release it first."


class LockChanged(LockConflict, code="E_LOCK_CHANGED", retryable=False):
    """The lock to break has been released or replaced."""

    hint = "Check the lock again: it is no longer the one that you examined."


class NodeLocked(LockConflict, code="E_NODE_LOCKED"):
    """Another agent holds the claim on this node, or is ahead in its queue."""

    hint = "Work on another node, or wait for this one: 'holdfast ledger claim NODE --actor YOU --wait 5m'."


class IssueClaimed(LockConflict, code="E_ISSUE_CLAIMED"):
    """Another actor has claimed the issue, and the claim has not expired."""

    hint = "Claim another issue: 'holdfast issue claim-next'. If this claim is yours, pass its exact id with --claim."


class PathsInProgress(LockConflict, code="E_PATHS_IN_PROGRESS"):
    """The issue touches paths that an issue in progress also touches."""

    hint = "Claim another issue, or wait until that one is done. To claim it anyway: --ignore-touches."


class Deadlock(LockConflict, code="E_DEADLOCK"):
    """A cycle of waits: each waiter holds what the next one needs. This wait gave up so that others can go on."""

    hint = "Release everything that you hold, wait a little and try again. Acquire in the same order as the others."


class InUse(Failure, code="E_IN_USE", exit_status=ExitStatus.CONFLICT, retryable=True):
    """Processes use the directory to be moved or deleted."""

    hint = "Stop these processes, or have them leave the directory. --force ignores them."


class SequenceMismatch(Failure, code="E_SEQUENCE_MISMATCH", exit_status=ExitStatus.CONFLICT, retryable=True):
    """The ledger has grown since the caller read it; nothing was appended."""

    hint = "Read the new events, decide again, and append with the new sequence."

    def __init__(self, expected: int, found: int) -> None:
        message = f"sequence mismatch: expected the ledger at {expected}, but it is at {found}"
        super().__init__(message, expected=expected, found=found)
        self.expected = expected
        self.found = found


class Changed(Failure, code="E_CHANGED", exit_status=ExitStatus.CONFLICT, retryable=True):
    """Another writer made a change between the caller's read and its write."""

    hint = "Read the current state, and try again."


class VersionMismatch(Failure, code="E_VERSION_MISMATCH", exit_status=ExitStatus.CONFLICT):
    """The record no longer has the version that the change expects."""

    hint = "Another writer has changed it. Read it again."


class PlanMismatch(Failure, code="E_GC_PLAN_MISMATCH", exit_status=ExitStatus.CONFLICT):
    """A garbage collection plan no longer matches the repository; nothing was deleted."""

    hint = "Make and review a new plan: 'holdfast gc plan'."


class ConsistencyUnavailable(Failure, code="E_CONSISTENCY_UNAVAILABLE", exit_status=ExitStatus.CONFLICT):
    """The payload changed while it was being captured; nothing was published."""

    retryable = True
    hint = "Stop the writers and try again. --consistency best_effort accepts files from different instants."


class LockTimeout(Failure, code="E_LOCK_TIMEOUT", exit_status=ExitStatus.TIMED_OUT, retryable=True):
    """The lock was not acquired within the time limit."""

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
        """`waited` is the timeout as text; `holders` are the known holders."""
        message = f"{summary}: could not acquire lock on {path} after {waited}"
        if holders:
            message += "; held by " + ", ".join(str(holder["shown"]) for holder in holders)
        super().__init__(message, path=str(path), timeout=timeout, holders=list(holders))
        self.path = str(path)
        self.timeout = timeout
        self.holders = holders


class TooManyRetries(Failure, code="E_TOO_MANY_RETRIES", exit_status=ExitStatus.TIMED_OUT, retryable=True):
    """An operation met contention on every attempt."""

    hint = "Try again later, or allow more attempts."

    def __init__(self, attempts: int, last: Exception) -> None:
        message = f"Lock contention: too many retries ({attempts}); the last one failed with: {last}"
        record = last.as_record() if isinstance(last, Failure) else repr(last)
        super().__init__(message, attempts=attempts, last=record)
        self.attempts = attempts
        self.last = last


# --- Fencing: the caller is no longer the holder ----------------------------------------------------


class LockNotHeld(Failure, code="E_LOCK_NOT_HELD", exit_status=ExitStatus.FENCED):
    """The caller does not hold the lock or lease that the operation needs."""

    hint = "Acquire it first. If you held it, it has been released or stolen since."


class LockExpired(Failure, code="E_LOCK_EXPIRED", exit_status=ExitStatus.FENCED):
    """The caller's lease has expired; another holder may have it now."""

    hint = "Acquire the lease again, and check what has changed before you continue to write."


class FencingMismatch(Failure, code="E_FENCING_MISMATCH", exit_status=ExitStatus.FENCED):
    """The caller's token is outdated: a later holder has a newer one. Nothing was published."""

    hint = "Your lease was stolen. Acquire it again and reapply your work to the current state."


# --- Refusals: the operation is unsafe, or against a rule -------------------------------------------


class Refused(Failure, code="E_REFUSED", exit_status=ExitStatus.REFUSED):
    """The operation would put work at risk."""

    hint = "Avoid the risk that the message names, and try again."


class DependencyCycle(Refused, code="E_DEPENDENCY_CYCLE"):
    """The dependency would make issues wait for each other in a cycle."""

    hint = "To add this dependency, first remove one that the message names: 'holdfast dep remove'."


class Blocked(Refused, code="E_BLOCKED"):
    """The issue depends on issues that are not done."""

    hint = "Finish those first ('holdfast blocked' lists them), or remove the dependency: 'holdfast dep remove'."


class TransitionRefused(Refused, code="E_TRANSITION_REFUSED"):
    """The issue cannot change from its current state to the requested one."""

    hint = "See its current state with 'holdfast issue show'."


class GateFailed(Failure, code="E_GATE_FAILED"):
    """The checker of a gate ran and did not pass."""

    hint = "Read the checker's output, fix the problem, and check again: 'holdfast gate check'."


class CheckoutInTheWay(Refused, code="E_CHECKOUT_IN_THE_WAY", retryable=True):
    """A branch cannot move, because a checkout of it cannot follow. Nothing was changed."""

    hint = "Finish the work in progress there. To land without touching this checkout, use another branch: --into."


class LandingConflict(Failure, code="E_LANDING_CONFLICT", exit_status=ExitStatus.CONFLICT):
    """Work did not land, because it conflicts with the branch. The worktree was not changed."""

    hint = (
        "Merge the tip of the branch into the worktree, resolve the conflicts, commit, and land again: 'holdfast land'."
    )


class LandingFailed(Failure, code="E_LANDING_FAILED"):
    """Work did not land, because a check failed on the merged result. The worktree was not changed."""

    hint = "'holdfast landing log ID' shows the output of the check. Fix the work and land it again: 'holdfast land'."


class LandingWithdrawn(Failure, code="E_LANDING_WITHDRAWN", exit_status=ExitStatus.CONFLICT):
    """Work did not land, because it was withdrawn from the queue, or somebody else has claimed its issue."""

    hint = "'holdfast landing show ID' says why. To queue it again: 'holdfast landing retry ID'."


class LandingPending(Failure, code="E_LANDING_PENDING", exit_status=ExitStatus.TIMED_OUT, retryable=True):
    """The time limit passed before the work landed. It stays in the queue."""

    hint = "Wait for it again with the same command, or let another process land it: 'holdfast land --all'."


class PathEscape(Refused, code="E_PATH_ESCAPE"):
    """A path leads out of its directory, or through a symbolic link."""

    hint = "Use a path without '..' and symbolic links."


class NotApproved(Refused, code="E_NOT_APPROVED"):
    """The repository names a store or a command that this user has not approved on this machine. Nothing was contacted
    or run."""

    hint = "See the store and commands: 'holdfast trust --show'. If you trust them, approve them: 'holdfast trust'."


class SetupFailed(Failure, code="E_SETUP_FAILED"):
    """A setup command failed. A new worktree was kept, and no agent was started in it. Work whose checks need the setup
    stays queued to land."""

    what = "the setup"
    hint = (
        "Fix the command ('holdfast config get worktree.setup'). The next 'holdfast agent run' repeats it; or run it "
        "in the worktree, or remove the worktree and create it again."
    )


class TeardownFailed(Refused, code="E_TEARDOWN_FAILED"):
    """A teardown command failed, so the worktree was not removed."""

    what = "the teardown"
    hint = "Fix the command ('holdfast config get worktree.teardown'). --force removes the worktree anyway."


class DirectoryReplaced(Refused, code="E_DIRECTORY_REPLACED"):
    """The path of a worktree is not a directory; it was not changed."""

    hint = "Move it away. Then put the directory back, or restore a snapshot: 'holdfast restore ID --inplace'."


class WorktreeElsewhere(Refused, code="E_WORKTREE_ELSEWHERE"):
    """The directory of the worktree is in another clone, so the command must run there."""

    hint = "Run the command in that clone. To work on the same thing here: 'holdfast worktree create ANOTHER-NAME'."


class NestedRepository(Refused, code="E_NESTED_REPOSITORY"):
    """The new repository would be inside another one."""

    hint = "Create it elsewhere. To create it here anyway, confirm with --nested."


class FilesystemUnsafe(Refused, code="E_FILESYSTEM_UNSAFE"):
    """The filesystem lacks a feature that Holdfast's promises depend on."""

    hint = "Use a local filesystem (ext4, xfs, btrfs, APFS, NTFS), or one of the server-backed stores."


class EngineUnavailable(Refused, code="E_ENGINE_UNAVAILABLE"):
    """The requested snapshot engine does not work on this filesystem."""

    hint = "Let Holdfast choose the engine, or use 'copy', which works everywhere."


class GitUnavailable(Refused, code="E_GIT_UNAVAILABLE"):
    """The repository is in a git checkout, and git is missing, cannot be started or is too old."""

    hint = "Install git 2.38 or newer, and make sure that it is on the PATH."


class GitUntrusted(Refused, code="E_GIT_UNTRUSTED"):
    """The git repository belongs to another user. git could run the programs that its configuration names, so it
    refuses to work there."""

    hint = "If you trust it: 'git config --global --add safe.directory PATH', with the path of the checkout."


class ExchangeUnavailable(Refused, code="E_EXCHANGE_UNAVAILABLE"):
    """The filesystem cannot swap two directories atomically; nothing was changed."""

    hint = "Use a filesystem with an atomic exchange (ext4, xfs, btrfs, APFS), or swap by two renames."


class StoreIncompatible(Refused, code="E_STORE_INCOMPATIBLE"):
    """The store has a format that this version of Holdfast does not know; nothing was changed."""

    hint = "Use the version of Holdfast that wrote this store, or a later one."


# --- Corruption -------------------------------------------------------------------------------------


class Corrupt(Failure, code="E_CORRUPT", exit_status=ExitStatus.CORRUPT):
    """Stored content is invalid. It was neither skipped nor overwritten."""

    hint = "Keep the file. Find out what is wrong with it, and repair or restore it before you continue."


class CheckpointDamaged(Corrupt, code="E_CHECKPOINT_DAMAGED"):
    """A cached view of the issues is not what was written."""

    hint = "Delete the directory .holdfast/checkpoints: it has only caches."

    def __init__(self, message: str = "the checkpoint of the issues is damaged", *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


class JsonInvalid(Corrupt, code="E_JSON_INVALID"):
    """The text is not strict JSON."""

    hint = "Repair the text by hand: valid UTF-8, no NaN or Infinity, no duplicate keys."


class PartialSnapshot(Corrupt, code="E_PARTIAL_SNAPSHOT"):
    """The snapshot was never completed."""

    hint = (
        "Take the snapshot again. 'holdfast doctor' lists interrupted ones, and 'holdfast doctor --fix' removes them."
    )


class AuditChainBroken(Corrupt, code="E_AUDIT_CHAIN_BROKEN"):
    """An entry of the audit trail breaks the hash chain."""

    hint = "Someone edited the trail, or the disk damaged it. Compare it with an earlier copy."


class Unhealthy(Corrupt, code="E_UNHEALTHY"):
    """The doctor has findings."""

    hint = "'holdfast doctor --fix' repairs what is safe to repair; see the findings for the rest."

    def __init__(self, message: str, findings: Mapping[str, object]) -> None:
        super().__init__(message)
        self.facts = {"healthy": False, **findings}


# --- The operating system ---------------------------------------------------------------------------


class IoFailure(Failure, code="E_IO"):
    """The operating system could not read or write. Existing content was not changed."""

    hint = "The system's message names the cause, such as a full disk or a failing device."

    def __init__(self, action: str, path: object, error: OSError, *, hint: str | None = None) -> None:
        reason = error.strerror or str(error)
        message = f"cannot {action} {path}: {reason}"
        super().__init__(message, hint=hint, path=str(path), errno=error.errno, reason=reason)


class NotWritable(IoFailure, code="E_NOT_WRITABLE"):
    """This user may not write the file or directory, or its filesystem is read-only."""

    hint = "Check the owner and mode of the directory, and whether it is mounted read-only."


class NotReadable(IoFailure, code="E_NOT_READABLE"):
    """This user may not read the file or directory."""

    hint = "Check its owner and mode, or run as a user who may read it."


class NotDurable(IoFailure, code="E_NOT_DURABLE"):
    """The change is visible, but may not survive a power cut."""

    hint = "The disk reported an error while syncing. Check its health before you rely on it."


class GitFailed(Failure, code="E_GIT_FAILED"):
    """A git command failed."""

    output = b""  # git's standard output: some git commands give an answer there and a nonzero exit status
    hint = "git's own message says why. With --json, `command` and `stderr` have the details."


class NotApplied(UserWarning):
    """A change is committed, but not in all of its files yet. This is not a failure: Holdfast shows it as done."""

    def __init__(self, commit_id: str, error: Exception) -> None:
        super().__init__(
            f"the change is committed, but not in all of its files yet: {error}. Do not repeat it: Holdfast shows it "
            "as done, and the next command that changes one of these files completes it. Until then, other programs do "
            "not see it."
        )
        self.commit_id = commit_id


class NotEncrypted(UserWarning):
    """The connection to a store on another machine is not encrypted: others may read and change its traffic."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"the connection to {place} is not encrypted: others may read the password and change the records. "
            "Use TLS: add tls=true to the address, and cacert=FILE if the system does not trust its authority."
        )


class Interrupted(Failure, code="E_INTERRUPTED", exit_status=ExitStatus.INTERRUPTED, retryable=True):
    """The user interrupted the command."""

    hint = "Run the command again to continue."

    def __init__(self) -> None:
        super().__init__("interrupted")


# --- The server of a shared store -------------------------------------------------------------------


class OutcomeUnknown(Failure, code="E_OUTCOME_UNKNOWN"):
    """The store stopped answering during a commit, which may or may not have succeeded."""

    hint = "The commit may have succeeded: check the records that it changes before you try again."

    def __init__(self, commit_id: str, reason: object) -> None:
        message = f"the outcome of the commit {commit_id} is unknown: {reason}"
        super().__init__(message, commit_id=commit_id)
        self.commit_id = commit_id


class StoreUnavailable(Failure, code="E_STORE_UNAVAILABLE", exit_status=ExitStatus.TIMED_OUT, retryable=True):
    """The store's server does not answer. Nothing was changed by this call."""

    hint = "Check the address of the store, and that its server is running and can be reached; then try again."
    problem = "cannot be reached"

    def __init__(self, place: str, reason: object, *, hint: str | None = None) -> None:
        """`place` is the address of the store, without secrets."""
        super().__init__(f"the store {place} {self.problem}: {reason}", hint=hint, store=place)
        self.place = place


class StoreAccessRefused(StoreUnavailable, code="E_STORE_ACCESS_REFUSED", exit_status=ExitStatus.REFUSED):
    """The store's server denies this user access, or does not permit the operation. Nothing was changed."""

    retryable = False
    hint = (
        "Check the user, its password or certificate, and its privileges. The repository stores no secrets: "
        "they come from ~/.pgpass, PGPASSWORD, client certificates, or the whole address in HOLDFAST_STORE."
    )
    problem = "denies access"


class StoreUntrusted(StoreUnavailable, code="E_STORE_UNTRUSTED", exit_status=ExitStatus.REFUSED, retryable=False):
    """The connection cannot be encrypted, or client and server do not trust each other's certificates."""

    hint = (
        "Check the address's TLS options (sslmode, sslrootcert, sslcert, sslkey; for etcd tls, cacert, cert, "
        "key), that the files exist, and the dates and host names of the certificates. Without sslmode, another "
        "machine must prove its name (verify-full) with a certificate that this system, or sslrootcert, trusts."
    )
    problem = "offers no trusted connection"


class StoreUnsafe(StoreUnavailable, code="E_STORE_UNSAFE", exit_status=ExitStatus.REFUSED, retryable=False):
    """The store's server has a version that is known to lose data. Nothing was changed."""

    hint = (
        "Upgrade etcd to 3.5.6 or later or, within 3.4, to 3.4.22 or later. For a trial, add "
        "accept-unsafe-server=true to the address of the store."
    )
    problem = "is unsafe"


class ContentStoreUnsafe(
    StoreUnavailable, code="E_CONTENT_STORE_UNSAFE", exit_status=ExitStatus.REFUSED, retryable=False
):
    """The object storage ignores the condition that an object must not exist yet. Nothing was changed."""

    hint = "Use a server that supports conditional writes (If-None-Match), such as Amazon S3, or 'postgres:'."
    problem = "is unsafe"

    def __init__(self, place: str) -> None:
        super().__init__(place, "it replaced an object that was to be created only if it did not exist")


class StoreFull(StoreUnavailable, code="E_STORE_FULL", exit_status=ExitStatus.REFUSED, retryable=False):
    """The store's server has no space left on its disk or within its quota. Nothing was changed."""

    hint = "Free space on its disk. For etcd: compact and defragment it, or raise its quota; then disarm the alarm."
    problem = "is full"


class FilesUnproven(Refused, code="E_FILES_UNPROVEN", retryable=True):
    """This machine has not proved that it sees the files that the records belong to: its directory may be a copy.
    Nothing was granted or published."""

    hint = (
        "If the machines share the directory, run 'holdfast trust' on a known machine, then try again here. If the "
        "files were moved or restored, and no other machine uses them, run 'holdfast trust --files'."
    )

    def __init__(self, path: str, hosts: list[str]) -> None:
        known = f"; known to see them: {', '.join(hosts)}" if hosts else ""
        message = f"{path} is not known to be the directory that the records belong to{known}"
        super().__init__(message, path=path, machines=hosts)


class StoreRestored(Refused, code="E_STORE_RESTORED"):
    """The server was restored from an older backup, or lost commits in a failover: its records lack tokens or marks
    that are in the files of the repository. Nothing was granted."""

    hint = (
        "Compare the records with the files: 'holdfast doctor'. To continue with the records as they are, run "
        "'holdfast trust --files': new tokens are higher than every token granted here."
    )


class StoreMoved(Refused, code="E_STORE_MOVED"):
    """The records were moved to another store, and this one accepts no further commits. Nothing was changed."""

    hint = (
        "Stop the processes that still use the old store; new commands in the migrated directory use the new one. "
        "If the migration was interrupted, run it again: 'holdfast migrate --to ADDRESS'."
    )

    def __init__(self, place: str, target: str) -> None:
        super().__init__(f"the records of the store {place} were moved to {target}", store=place, moved_to=target)


class StoreMissing(StoreUnavailable, code="E_STORE_MISSING", exit_status=ExitStatus.NOT_FOUND, retryable=False):
    """The store's server has no such database. Nothing was changed by this call."""

    hint = "Check the name of the database in the address, or have an administrator create it: CREATE DATABASE."
    problem = "does not exist"
