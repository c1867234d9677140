"""Damage of every kind that the doctor knows, to be planted one at a time in a healthy repository."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.git.snapshots import create_ref
from holdfast.leases.rules import Identity, LeaseKeys, LeaseQueue, LeaseWaiter
from holdfast.repository import gc_plan
from holdfast.repository.context import (
    DESCRIPTORS,
    MAIN,
    OPERATIONS,
    PINS,
    REFERENCES,
    WORKTREES,
    Operation,
    OperationKind,
    Pin,
    Reference,
    RepositoryContext,
)
from holdfast.repository.git_home import GitHome
from holdfast.repository.retention import PLANS, PlanState
from holdfast.store.files import FileStore
from holdfast.store.intents import Intent, Step
from holdfast.store.layout import Layout, OpenDirectories
from holdfast.store.model import Change, Create, Decision, Delete, Key, Replace
from tests.repository.kept import keep, line_of, snapshots_of

Plant = Callable[[RepositoryContext], object]


class Damage(NamedTuple):
    """How to plant it, the finding that it must cause, and whether a repair fixes it."""

    plant: Plant
    code: str
    severity: str
    repaired: bool
    strict: bool = False
    also: tuple[str, ...] = ()


def prepare(context: RepositoryContext) -> None:
    """Add two snapshots, a reference, a pin, and a directory for more worktrees."""
    context.paths.worktrees.mkdir(exist_ok=True)
    first, second = line_of(context, 2)
    for key, record in (
        (REFERENCES.key("v1"), Reference(name="v1", snapshot_id=first, created_at=format_instant(0))),
        (PINS.key("p1"), Pin(pin_id="p1", snapshot_id=second, created_at=format_instant(0))),
    ):
        commit(context, Create(key, record))


def commit(context: RepositoryContext, *changes: Change) -> None:
    keys: list[Key[Any]] = [change.key for change in changes if not hasattr(change, "stream")]
    context.store.transact(keys, lambda view, now: Decision(list(changes), None))


def head_of(context: RepositoryContext) -> str:
    head = context.config(MAIN).head_snapshot_id
    assert head is not None
    return head


def change(context: RepositoryContext, key: Key[Any], **fields: object) -> None:
    document = context.store.read(key)
    assert document is not None
    commit(context, Replace(key, msgspec.structs.replace(document.record, **fields)))


# --- Leftovers of dead processes ----------------------------------------------------------------------


def _plan(context: RepositoryContext, name: str) -> str:
    return msgspec.json.encode(
        msgspec.structs.replace(gc_plan.propose(context, store=False).plan, plan_id=name)
    ).decode()


def unfinished_commit(context: RepositoryContext) -> None:
    """A commit of two documents that was decided and not carried out."""
    store = context.store
    assert isinstance(store, FileStore)
    steps = tuple(Step(f"jvs/plans/{name}", "put", _plan(context, name) + "\n") for name in ("x1", "x2"))
    with OpenDirectories(store._directories) as opened:
        store._intents.publish(Intent("dead", steps), opened)


def conflicting_commit(context: RepositoryContext) -> None:
    """A commit that was finished around a file of another program at the path of one of its documents."""
    unfinished_commit(context)
    place = context.paths.root / Layout().locate("jvs/plans/x2").path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(_plan(context, "x2"))
    files = context.store.files
    assert files is not None
    files.finish_commits(files.unfinished_commits())
    assert (context.paths.root / Layout().locate("jvs/plans/x1").path).exists()


def unfinished_operation(context: RepositoryContext) -> None:
    """A creation whose process died before the directory was in place."""
    commit(
        context,
        Create(
            OPERATIONS.key("new"),
            Operation(
                operation_id="dead",
                kind=OperationKind.CREATE,
                worktree_id="new",
                begun_at=format_instant(0),
                holder_id="h:u:1:1",
            ),
        ),
    )


def undecided_collection(context: RepositoryContext) -> None:
    parent = snapshots_of(context)[head_of(context)].parent_id
    assert parent is not None
    change(context, DESCRIPTORS.key(parent), doomed_by="gone")


def decided_collection(context: RepositoryContext) -> None:
    """A run that was killed after it deleted the tree and before it deleted the descriptor."""
    extra = keep(context, {"extra": "x"}, head=False)
    plan = gc_plan.propose(context).plan
    assert plan.snapshots == (extra,)
    change(context, PLANS.key(plan.plan_id), state=PlanState.DECIDED)
    change(context, DESCRIPTORS.key(extra), doomed_by=plan.plan_id)
    os.rename(context.paths.tree(extra), context.paths.root.parent / "elsewhere")


def expired_plan(context: RepositoryContext) -> None:
    plan = gc_plan.propose(context, store=False).plan
    old = msgspec.structs.replace(plan, expires_at=format_instant(context.store.now() - 1))
    commit(context, Create(PLANS.key(plan.plan_id), old))


def abandoned_scratch(context: RepositoryContext) -> None:
    place = context.paths.scratch / "left"
    (place / "tree" / "payload").mkdir(parents=True)
    (place / "tree" / "payload" / "file").write_text("half")


def orphaned_tree(context: RepositoryContext) -> None:
    """Leftovers of a snapshot that was killed just before its commit: its scratch and a complete tree."""
    unknown_tree(context)
    scratch = context.paths.scratch / "0123456789abcdef"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "lock").touch()


def useless_remnant(context: RepositoryContext) -> None:
    """Leftover of a collection that was killed before it looked up the directories that are still needed."""
    remnant = context.paths.remnants / "fedcba9876543210"
    (remnant / "payload" / "directory").mkdir(parents=True)
    (remnant / "payload" / "directory" / "file").write_text("of nobody")
    (remnant / ".READY").touch()


def partial_tree(context: RepositoryContext) -> None:
    (context.paths.tree("0123456789abcdef") / "payload").mkdir(parents=True)


def unknown_tree(context: RepositoryContext) -> None:
    """The content of a snapshot without a descriptor, in any home."""
    if isinstance(context.home, GitHome):
        head = context.home.commit(head_of(context))
        create_ref(context.home.git, "0123456789abcdef", head)
        return
    tree = context.paths.tree("0123456789abcdef")
    (tree / "payload").mkdir(parents=True)
    (tree / ".READY").touch()


def old_draft(context: RepositoryContext) -> None:
    draft = context.paths.root / ".jvs" / "refs" / ".v2.json-0123456789ab.tmp"
    draft.write_text("{")
    old = time.time() - 7200
    os.utime(draft, (old, old))


def old_probe(context: RepositoryContext) -> None:
    directory = context.paths.root / ".jvs" / ".holdfast-probe-0123456789ab"
    directory.mkdir()
    (directory / "a").touch()
    old = time.time() - 7200
    os.utime(directory, (old, old))


def expired_lease(context: RepositoryContext) -> None:
    lease = context.leases.acquire(MAIN, context.leases.request(ttl=60.0)).lease
    change(
        context,
        LeaseKeys.of(MAIN).lease,
        lease_expires_at=format_instant(context.store.now() - 3600),
        boot_expires_at=None,
    )
    assert lease.lock_id


def orphaned_lease(context: RepositoryContext) -> None:
    lease = context.leases.acquire(MAIN, context.leases.request(ttl=60.0)).lease
    context.leases.release(MAIN, lease.lock_id)
    commit(context, Create(LeaseKeys.of("gone").lease, msgspec.structs.replace(lease, worktree_id="gone")))


def dead_waiter(context: RepositoryContext) -> None:
    now = format_instant(context.store.now() - 600)
    waiter = LeaseWaiter(
        ticket="t", holder_id="elsewhere:u:1:1", priority=0, since=now, seen_at=now, identity=Identity()
    )
    commit(context, Create(LeaseKeys.of(MAIN).queue, LeaseQueue(MAIN, (waiter,))))


# --- Inconsistencies ----------------------------------------------------------------------------------


def lost_descriptor(context: RepositoryContext) -> None:
    extra = keep(context, {"extra": "x"}, head=False)
    commit(context, Delete(DESCRIPTORS.key(extra)))


def strange_snapshot_directory(context: RepositoryContext) -> None:
    (context.paths.snapshots / "a note to myself").write_text("mine")


def lost_tree(context: RepositoryContext) -> None:
    os.rename(context.paths.tree(head_of(context)), context.paths.root.parent / "elsewhere")


def lost_mark(context: RepositoryContext) -> None:
    (context.paths.tree(head_of(context)) / ".READY").unlink()


def lost_payload(context: RepositoryContext) -> None:
    os.rename(context.paths.tree(head_of(context)) / "payload", context.paths.root.parent / "elsewhere")


def lost_file(context: RepositoryContext) -> None:
    tree = context.paths.tree(head_of(context))
    (tree / "payload").chmod(0o700)
    (tree / "payload" / "file-1").unlink()


def changed_manifest(context: RepositoryContext) -> None:
    path = context.paths.tree(head_of(context)) / "manifest"
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def changed_file(context: RepositoryContext) -> None:
    path = context.paths.tree(head_of(context)) / "payload" / "file-1"
    path.chmod(0o600)
    status = path.stat()
    path.write_text("x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def head_behind(context: RepositoryContext) -> None:
    keep(context, {"extra": "x"}, head=False)


def head_forked(context: RepositoryContext) -> None:
    keep(context, {"extra": "x"}, head=False)
    keep(context, {"extra": "y"}, head=False)


def head_missing(context: RepositoryContext) -> None:
    change(context, WORKTREES.key(MAIN), head_snapshot_id="f" * 16)


def parent_missing(context: RepositoryContext) -> None:
    change(context, DESCRIPTORS.key(head_of(context)), parent_id="f" * 16)


def dangling_reference(context: RepositoryContext) -> None:
    change(context, REFERENCES.key("v1"), snapshot_id="f" * 16)


def dangling_pin(context: RepositoryContext) -> None:
    change(context, PINS.key("p1"), snapshot_id="f" * 16)


def missing_directory(context: RepositoryContext) -> None:
    os.rename(context.paths.payload(MAIN), context.paths.root.parent / "elsewhere")


def unknown_directory(context: RepositoryContext) -> None:
    (context.paths.worktrees / "mine").mkdir()
    (context.paths.worktrees / "mine" / "work").write_text("precious")


def control_file_in_payload(context: RepositoryContext) -> None:
    (context.paths.payload(MAIN) / ".jvs").mkdir()


def foreign_record(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs" / "worktrees" / MAIN / "head_snapshot").write_text("x")


def _trail(context: RepositoryContext) -> Path:
    return context.paths.root / ".jvs" / "audit" / "audit.jsonl"


def forged_entry(context: RepositoryContext) -> None:
    path = _trail(context)
    path.write_text(path.read_text().replace("snapshot_published", "snapshot_forgotten", 1))


def unreadable_entry(context: RepositoryContext) -> None:
    path = _trail(context)
    path.write_text("not json\n" + path.read_text())


def corrupt_document(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs" / "refs" / "v1.json").write_text("{")


def clock_set_back(context: RepositoryContext) -> None:
    later = format_instant(context.store.now() + 3600)
    change(context, DESCRIPTORS.key(head_of(context)), created_at=later)


def clock_of_a_lease(context: RepositoryContext) -> None:
    context.leases.acquire(MAIN, context.leases.request(ttl=60.0))
    later = format_instant(context.store.now() + 3600)
    change(context, LeaseKeys.of(MAIN).lease, last_renewed_at=later)


def linked_directory(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs" / "waits").symlink_to("elsewhere")


def linked_records(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs" / "quarantine").symlink_to("elsewhere")


def open_to_all(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs" / "descriptors").chmod(0o777)


def readable_to_all(context: RepositoryContext) -> None:
    (context.paths.root / ".jvs").chmod(0o755)


WARNING, ERROR, NOTE = "warning", "error", "note"
ALL: dict[str, Damage] = {
    "unfinished commit": Damage(unfinished_commit, "commit-unfinished", WARNING, True),
    "conflicting commit": Damage(conflicting_commit, "commit-conflict", WARNING, False),
    "unfinished operation": Damage(unfinished_operation, "operation-unfinished", WARNING, True),
    "undecided collection": Damage(undecided_collection, "collection-unfinished", WARNING, True),
    "decided collection": Damage(decided_collection, "collection-unfinished", WARNING, True),
    "expired plan": Damage(expired_plan, "plan-expired", NOTE, True),
    "abandoned scratch": Damage(abandoned_scratch, "scratch-abandoned", WARNING, True),
    "orphaned tree": Damage(orphaned_tree, "tree-orphaned", WARNING, True),
    "useless remnant": Damage(useless_remnant, "remnant-excessive", WARNING, True),
    "partial tree": Damage(partial_tree, "tree-orphaned", WARNING, True),
    "unknown tree": Damage(unknown_tree, "tree-unknown", WARNING, True),
    "old draft": Damage(old_draft, "draft-left", WARNING, True),
    "old probe": Damage(old_probe, "draft-left", WARNING, True),
    "expired lease": Damage(expired_lease, "lock-expired", NOTE, True),
    "lease without a worktree": Damage(orphaned_lease, "lock-orphaned", WARNING, True),
    "dead waiter": Damage(dead_waiter, "waiter-dead", NOTE, True),
    "head behind": Damage(head_behind, "head-behind", ERROR, True),
    "reference to nothing": Damage(dangling_reference, "reference-dangling", WARNING, True),
    "pin on nothing": Damage(dangling_pin, "pin-dangling", WARNING, True),
    "head with two lines behind it": Damage(head_forked, "head-behind", ERROR, False),
    "head missing": Damage(head_missing, "head-missing", ERROR, False),
    "parent missing": Damage(parent_missing, "parent-missing", ERROR, False),
    "descriptor lost": Damage(lost_descriptor, "descriptor-missing", ERROR, False),
    "strange snapshot": Damage(strange_snapshot_directory, "snapshot-directory-strange", WARNING, False),
    "tree lost": Damage(lost_tree, "snapshot-incomplete", ERROR, False),
    "mark lost": Damage(lost_mark, "snapshot-incomplete", ERROR, False),
    "payload lost": Damage(lost_payload, "snapshot-damaged", ERROR, False),
    "file at the top lost": Damage(lost_file, "snapshot-damaged", ERROR, False),
    "manifest changed": Damage(changed_manifest, "snapshot-damaged", ERROR, False),
    "file changed": Damage(changed_file, "snapshot-damaged", ERROR, False, strict=True),
    "directory missing": Damage(missing_directory, "worktree-directory-missing", ERROR, False),
    "directory unknown": Damage(unknown_directory, "worktree-directory-unknown", WARNING, False),
    "control file in the payload": Damage(control_file_in_payload, "control-file-in-payload", WARNING, False),
    "foreign file beside a record": Damage(foreign_record, "record-foreign", WARNING, False),
    "forged entry": Damage(forged_entry, "audit-broken", ERROR, False),
    "unreadable entry": Damage(unreadable_entry, "audit-broken", ERROR, False),
    "corrupt document": Damage(corrupt_document, "document-corrupt", ERROR, False),
    "clock set back": Damage(clock_set_back, "clock-behind", WARNING, False),
    "clock of a lease": Damage(clock_of_a_lease, "clock-behind", WARNING, False),
    "linked directory": Damage(linked_directory, "control-linked", ERROR, True),
    "linked records": Damage(linked_records, "control-linked", ERROR, False),
    "readable to all": Damage(readable_to_all, "permissions-readable", NOTE, True),
    "open to all": Damage(open_to_all, "permissions-open", WARNING, False),
}
