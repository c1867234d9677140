"""What is corrupt, unsafe or refused: by the system, by a server, or by us because it would do harm."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors.base import ExitStatus, Failure


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
