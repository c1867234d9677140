"""The failures of the public API: for each function and method, those that its callers should expect.

A line names a method and its failures, and indented lines continue it; `-` means none besides those that every call may
raise (`COMMON`). Attributes raise nothing of their own. A test compares the list with the API, with the docstrings and
with what the methods themselves raise.
"""

from __future__ import annotations

COMMON = """\
Every call that reads or writes may also raise `IoFailure` (a system call failed), `Corrupt` (a record cannot be read),
`StoreUnavailable` and `StoreIncompatible` (on a server), and `LockTimeout` if the files of a record are locked for more
than 5 s. Every call that changes something may raise `OutcomeUnknown` (it may have happened; never on a plain refusal).
A name that is not safe is `NameInvalid`; another invalid argument is `UsageFailure`, `SettingInvalid` or `TooLarge`.
*Raises* lists the others. A failure may be a subclass of the one listed: `IssueClaimed` and `Deadlock` are
`LockConflict`s."""

_LISTED = """
initialise: NotFound Refused NotApproved NestedRepository FilesystemUnsafe ExtraMissing AlreadyExists
find_repository: NotFound
Repository: NotFound Refused NotApproved ExtraMissing
Repository.close: -
Repository.lease: NotFound LockConflict LockTimeout Deadlock
Repository.lease_async: NotFound LockConflict LockTimeout Deadlock
Repository.file_locker: -
Repository.steal: NotFound LockConflict LockNotHeld
Repository.worktree_around: NotFound
Repository.path: NotFound LockConflict DirectoryReplaced
Repository.variables: NotFound Refused
Repository.payload: -
Repository.config: NotFound
Repository.proof: FencingMismatch
Repository.now: -
Repository.fenced: FencingMismatch
Repository.audit: AuditChainBroken
Repository.newest_audit_entries: Archived
Repository.archive_audit: AuditChainBroken AlreadyExists Changed Refused
Repository.verify_audit: AuditChainBroken
Repository.watch_audit: -
Repository.watch_landing: -
Repository.snapshot: NotFound LockNotHeld LockExpired FencingMismatch LockConflict ConsistencyUnavailable
    AlreadyExists EngineUnavailable DirectoryReplaced
Repository.restore: NotFound Ambiguous SnapshotCollected PartialSnapshot LockNotHeld LockExpired FencingMismatch
    LockConflict InUse ConsistencyUnavailable Refused
Repository.remove_worktree: NotFound LockConflict InUse ConsistencyUnavailable Refused FencingMismatch LockExpired
    NotApproved TeardownFailed
Repository.prove_files: FilesUnproven StoreRestored
Repository.adopt_files: LockConflict UsageFailure
Repository.examine: -
Repository.repair: -
Held.check: LockNotHeld LockExpired FencingMismatch
Held.renew: LockNotHeld LockExpired FencingMismatch
Held.beat: -
Held.release: -
Held.hand_on: -
Held.turn: -
HeldClaim.extend: LockNotHeld LockExpired
HeldClaim.append: LockNotHeld LockExpired
HeldRepoLock.unlock: -
HeldRepoLock.refresh: LockNotHeld
HeldLedgerLock.release: -
LeaseService.of_names: -
LeaseService.keys: -
LeaseService.request: -
LeaseService.reading: -
LeaseService.validator: -
LeaseService.acquire: NotFound LockConflict
LeaseService.join_queue: NotFound LockConflict
LeaseService.leave: -
LeaseService.steal: NotFound LockConflict LockNotHeld
LeaseService.renew: LockNotHeld LockExpired
LeaseService.release: LockNotHeld
LeaseService.state: -
LeaseService.states: -
LeaseService.wait_graph: -
LeaseService.check_deadlock: Deadlock
GarbageCollector.set_policy: -
GarbageCollector.plan: LockConflict Refused
GarbageCollector.check: NotFound PlanMismatch
GarbageCollector.run: NotFound PlanMismatch LockConflict Refused
AuditReader.read: AuditChainBroken
Worktrees.configs: -
Worktrees.states: -
Worktrees.state: NotFound
Worktrees.usage: NotFound DirectoryReplaced
Worktrees.create: AlreadyExists NotFound Ambiguous SnapshotCollected PartialSnapshot LockConflict Refused GitFailed
Worktrees.adopt: AlreadyExists NotFound LockConflict Refused
Worktrees.below: NotFound Refused
Worktrees.uncommitted: -
Worktrees.change_name: NotFound AlreadyExists LockConflict InUse Refused DirectoryReplaced
Worktrees.remove: NotFound LockConflict InUse Refused DirectoryReplaced FencingMismatch LockExpired
Worktrees.forget: NotFound LockConflict Refused
Snapshots.take: NotFound LockNotHeld LockExpired FencingMismatch LockConflict ConsistencyUnavailable AlreadyExists
    EngineUnavailable DirectoryReplaced
Snapshots.take_if_changed: NotFound LockNotHeld LockExpired FencingMismatch LockConflict ConsistencyUnavailable
    AlreadyExists EngineUnavailable DirectoryReplaced
Snapshots.named: NotFound Ambiguous SnapshotCollected PartialSnapshot
Snapshots.line: NotFound
Snapshots.everything: -
Snapshots.marks: -
Snapshots.status: NotFound ConsistencyUnavailable DirectoryReplaced SnapshotCollected PartialSnapshot
Snapshots.patches: SnapshotCollected NotFound
Snapshots.entries: NotFound
Snapshots.files_of_head: NotFound
Snapshots.compare: NotFound Ambiguous ConsistencyUnavailable DirectoryReplaced SnapshotCollected PartialSnapshot
Snapshots.verify: NotFound SnapshotCollected PartialSnapshot
Snapshots.repair: NotFound LockConflict
Snapshots.all_ids: -
Snapshots.export: NotFound AlreadyExists SnapshotCollected PartialSnapshot Refused
Snapshots.push: NotFound Ambiguous SnapshotCollected PartialSnapshot AlreadyExists Refused GitFailed
Snapshots.fetch: NotFound Refused GitFailed
Snapshots.restore: NotFound AlreadyExists SnapshotCollected PartialSnapshot LockConflict Refused
Snapshots.free_names: -
Snapshots.check_restore: NotFound Refused DirectoryReplaced
Snapshots.plan: NotFound Refused DirectoryReplaced ConsistencyUnavailable SnapshotCollected PartialSnapshot
Snapshots.restore_in_place: NotFound SnapshotCollected PartialSnapshot LockNotHeld LockExpired FencingMismatch
    LockConflict InUse ConsistencyUnavailable Refused DirectoryReplaced
Snapshots.pin: NotFound Ambiguous SnapshotCollected PartialSnapshot Refused
Snapshots.remove_pin: NotFound
Snapshots.pins: -
Snapshots.create_reference: NotFound Ambiguous AlreadyExists SnapshotCollected PartialSnapshot Refused
Snapshots.delete_reference: NotFound
Snapshots.references: -
open_tracker: NotApproved ExtraMissing
Tracker.initialise: -
Tracker.snapshot: NotInitialised
Tracker.summaries: NotInitialised
Tracker.issue: NotFound NotInitialised
Tracker.document: NotFound NotInitialised
Tracker.state: -
Tracker.dependents_of: -
Tracker.find_id: NotFound IdAmbiguous NotInitialised
Tracker.events: -
Tracker.newest_events: -
Tracker.newest_events_of: -
Tracker.create: NotFound NotInitialised DependencyCycle TooManyRetries
Tracker.create_all: NotFound NotInitialised DependencyCycle TooManyRetries
Tracker.adopt: NotFound NotInitialised AlreadyExists DependencyCycle TooManyRetries
Tracker.break_down: NotFound NotInitialised TransitionRefused TooManyRetries
Tracker.update: NotFound NotInitialised TransitionRefused Blocked IssueClaimed FencingMismatch LockExpired
    VersionMismatch TooManyRetries
Tracker.edit: NotFound NotInitialised IssueClaimed FencingMismatch LockExpired Refused TooManyRetries
Tracker.delete: NotFound NotInitialised IssueClaimed FencingMismatch LockExpired TooManyRetries
Claiming.request: -
Claiming.claim: NotFound NotInitialised IssueClaimed Blocked TransitionRefused TooManyRetries
Claiming.claim_next: NotInitialised TooManyRetries
Claiming.take_next: NotFound NotInitialised TooManyRetries
Claiming.renew: FencingMismatch LockExpired
Claiming.release: NotFound NotInitialised IssueClaimed LockNotHeld FencingMismatch LockExpired TooManyRetries
Claiming.reclaim: NotFound NotInitialised TooManyRetries
Claiming.state: -
Claiming.time_left: -
Dependencies.add: NotFound NotInitialised DependencyCycle TransitionRefused TooManyRetries
Dependencies.remove: NotFound NotInitialised TooManyRetries
Gating.all: -
Gating.define: AlreadyExists NotInitialised
Gating.require: NotFound NotInitialised TransitionRefused TooManyRetries
Gating.judge: NotFound NotInitialised TransitionRefused Refused TooManyRetries
Gating.are_approved: -
Gating.require_approved: NotApproved
Gating.approve: -
Gating.check: NotApproved NotFound NotInitialised TransitionRefused Refused TooManyRetries
Gating.runs: -
NewIssue.issue: TransitionRefused
Update.applied: -
Issue.gate_status: -
Issue.failed_gates: -
Issue.open_gates: -
Issue.failed_gates: -
take_work: NotFound IdAmbiguous IssueClaimed Blocked LockConflict LockTimeout Deadlock Refused NotApproved SetupFailed
    TooManyRetries
Assignment.check: LockNotHeld LockExpired FencingMismatch
Assignment.prompt: NotFound Corrupt
Assignment.prompt_file: NotFound Corrupt
Assignment.succeed: LockNotHeld LockExpired FencingMismatch ConsistencyUnavailable TransitionRefused DirectoryReplaced
    TooManyRetries
Assignment.land: LockNotHeld LockExpired FencingMismatch ConsistencyUnavailable Refused DirectoryReplaced TooManyRetries
Assignment.fail: LockNotHeld LockExpired FencingMismatch ConsistencyUnavailable DirectoryReplaced TooManyRetries
Assignment.put_back: LockNotHeld LockExpired FencingMismatch TooManyRetries
Assignment.remove_worktree: LockConflict InUse Refused ConsistencyUnavailable FencingMismatch LockExpired
init_ledger: AlreadyExists NotApproved ExtraMissing
find_ledger: -
open_ledger: NotFound NotApproved ExtraMissing
Ledger.sequence: -
OpenLedger.close: -
OpenLedger.break_lock: NotFound LockChanged
OpenLedger.verify: -
OpenLedger.archive: AlreadyExists Changed Refused
OpenLedger.archived: -
Ledger.append: -
Ledger.append_if_sequence: SequenceMismatch
Ledger.append_many: -
Ledger.append_decided: TooManyRetries
Ledger.events: Archived
Ledger.latest: -
Ledger.newest: Archived
Ledger.read: NotFound Archived
Ledger.find: Archived
Ledger.watch: Archived
Ledger.fold: Archived
Ledger.checkpoint: -
Ledger.save_checkpoint: -
Claims.claim: NodeLocked LockTimeout Deadlock
Claims.request: -
Claims.take: NodeLocked
Claims.join_queue: -
Claims.leave_queue: -
Claims.extend: LockNotHeld LockExpired
Claims.release: LockNotHeld
Claims.reap: -
Claims.append: LockNotHeld LockExpired
Claims.active: NotFound Archived
Claims.expired: -
Claims.waiting: -
Claims.history: -
Claims.lock_timeout: -
Claims.wait_graph: -
Claims.check_deadlock: Deadlock
approve: -
revoke: -
look_around: -
Overview.as_record: -
FileLocker: -
FileLocker.lock_exclusive: LockTimeout LockReentry NotFound Deadlock
FileLocker.lock_shared: LockTimeout LockReentry NotFound Deadlock
FileLocker.try_lock_exclusive: NotFound
FileLocker.try_lock_shared: NotFound
FileLocker.lock_exclusive_async: LockTimeout LockReentry NotFound Deadlock
FileLocker.lock_shared_async: LockTimeout LockReentry NotFound Deadlock
FileLocker.acquire: LockTimeout LockReentry NotFound Deadlock
FileLocker.try_acquire: NotFound
FileLocker.statistics: -
FileLocker.close: -
LockGuard.release: -
RepoLock.lock: RepoLocked
RepoLock.state: -
RepoLock.states: -
RepoLock.break_lock: LockChanged
LedgerLock.acquire: LockTimeout LockReentry NotFound
LedgerLock.state: NotFound
LedgerLock.close: -
LedgerLock.release_interrupted: -
LedgerLock.break_lock: LockChanged
RetryConfig.pause_after: -
RetryConfig.checked: -
retry_with_backoff: TooManyRetries
Failure.as_record: -
"""


def failures() -> dict[str, tuple[str, ...]]:
    """The failures of each function and method."""
    lines = _LISTED.replace("\n    ", " ").strip().splitlines()
    pairs = (line.split(": ", 1) for line in lines)
    return {name: () if listed == "-" else tuple(listed.split()) for name, listed in pairs}
