"""The decoders of records, with the use that commands make of what they decode."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import clock
from holdfast.errors import Failure
from holdfast.fs import names
from holdfast.issues import model as issues
from holdfast.leases import rules as leases
from holdfast.ledger import log as ledger
from holdfast.repository import context, payloads, retention
from holdfast.store import audit, intents
from holdfast.store import open as stores
from holdfast.store.layout import Layout
from holdfast.store.model import Codec

T = "2024-05-01T10:00:00.000000Z"
NOW = 1_714_557_600.0
HOLDER = "host:user:1:1"

Use = Callable[[Any], object]


class Decoder(NamedTuple):
    """A decoder, valid samples, and the exceptions that it may raise: a `Failure`, and those that it documents."""

    name: str
    decode: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    allowed: tuple[type[Exception], ...] = (Failure,)


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


# --- Records ----------------------------------------------------------------------------------------

IDENTITY = {"boot_id": "b", "machine_id": "m", "pid_namespace": "p"}
_OPERATION = {
    "operation_id": "00aa",
    "kind": "restore",
    "worktree_id": "main",
    "begun_at": T,
    "holder_id": HOLDER,
    "identity": IDENTITY,
    "counterpart": "b",
    "becomes": False,
    "inode": "1",
    "isolation": "exclusive",
    "label": "x",
    "snapshot_id": "00bb",
    "path": "src/a",
    "reason": "r",
    "keeps": True,
}
_DESCRIPTOR = {
    "snapshot_id": "00aa",
    "worktree_id": "main",
    "parent_id": "00bb",
    "created_at": T,
    "engine": "copy",
    "consistency_level": "quiesced",
    "payload_hash": "ff",
    "files": 1,
    "bytes": 2,
    "note": "n",
    "holder_id": HOLDER,
    "lock_id": "l",
    "fencing_token": 3,
    "restored_from": "00cc",
    "not_preserved": ["x"],
    "special": ["y"],
    "doomed_by": "p",
}
LEASE = {
    "lock_id": "l",
    "worktree_id": "main",
    "holder_id": HOLDER,
    "created_at": T,
    "last_renewed_at": T,
    "lease_expires_at": T,
    "fencing_token": 1,
    "ttl": 30.0,
    "purpose": "p",
    "identity": IDENTITY,
    "detached": False,
    "on_behalf_of": HOLDER,
    "boot_expires_at": ["b", 1.5],
    "actor": "agent:a",
}
_WAITER = {
    "ticket": "t",
    "holder_id": HOLDER,
    "priority": 0,
    "since": T,
    "seen_at": T,
    "purpose": "p",
    "identity": IDENTITY,
    "on_behalf_of": "",
    "boot_seen_at": ["b", 1.5],
    "above": [HOLDER],
    "actor": "a:b",
}
_PLAN = {
    "plan_id": "p",
    "created_at": T,
    "expires_at": T,
    "holder_id": HOLDER,
    "snapshots": ["00aa"],
    "bytes": 1,
    "policy": {"keep_last": 1, "keep_for": 60.0, "max_bytes": 1},
    "state": "proposed",
}
_CLAIM = {
    "claim_id": "i.1.x",
    "assignee": "a:b",
    "token": 1,
    "ttl": 60.0,
    "claimed_at": T,
    "renewed_at": T,
    "expires_at": T,
    "purpose": "p",
    "holder": {"holder_id": HOLDER},
    "boot_expires_at": ["b", 1.0],
}
ISSUE = {
    "id": "i",
    "title": "t",
    "description": "d",
    "state": "ready",
    "priority": "high",
    "assignee": "a:b",
    "dependencies": ["j"],
    "gates_required": ["g"],
    "labels": ["l"],
    "context": {"a": "b"},
    "documents": [],
    "gates_status": {"g": {"status": "passed", "updated_by": "a:b", "updated_at": T}},
    "created_at": T,
    "updated_at": T,
    "strange": {"deep": [1, {"x": None}]},
}
GATE = {"key": "g", "title": "t", "checker": {"command": "true", "timeout_seconds": 5, "env": {"A": "b"}}}
_RUN = {
    "run_id": "r",
    "gate_key": "g",
    "stage": "postcheck",
    "issue_id": "i",
    "status": "passed",
    "started_at": T,
    "completed_at": T,
    "duration_ms": 1,
    "exit_code": 0,
    "stdout": "",
    "stderr": "",
    "command": "c",
    "by": "a:b",
}
_AUDIT = {"number": 1, "at": T, "event": "e", "actor": "a", "facts": {"x": ["y"]}, "previous": "0" * 64, "hash": "f"}
_STEP = {"name": "jvs/refs/x", "operation": "put", "content": "{}", "before": "", "at": 0}


def _timed(record: Any) -> None:
    """Judge a lease or a claim."""
    now = clock.Now(NOW)
    record.time_left(now, for_others=True)
    record.is_expired(now)
    clock.format_ago(record.deadline().at, NOW)


def _use_lease(record: leases.Lease) -> None:
    _timed(record)
    record.holders()
    clock.format_ago(record.created_at, NOW)
    leases.LeaseKeys.of(record.worktree_id)


def _use_queue(record: leases.LeaseQueue) -> None:
    for each in record.waiters:
        each.unseen_for(clock.Now(NOW))
        each.identity.holder(each.holder_id)


def _use_operation(record: context.Operation) -> None:
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    for each in filter(None, (record.operation_id, record.worktree_id, record.counterpart, record.snapshot_id)):
        _inside(paths.scratch, paths.scratch / each)
    if record.path is not None:
        _inside(paths.payload("main"), paths.payload("main") / record.path)
    clock.format_ago(record.begun_at, NOW)
    context.operation_pending(record)


def _use_descriptor(record: context.Descriptor) -> None:
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    for each in filter(None, (record.snapshot_id, record.parent_id, record.restored_from, record.doomed_by)):
        _inside(paths.snapshots, paths.tree(each))
    _inside(paths.worktrees, paths.payload(record.worktree_id) if record.worktree_id != "main" else None)
    clock.parse_instant(record.created_at)


def _use_config(record: context.WorktreeConfig) -> None:
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    _inside(paths.caches, paths.stat_cache(record.worktree_id))
    if record.tip is not None:
        _inside(paths.snapshots, paths.tree(record.tip))


def _use_snapshot_name(record: context.Reference | context.Pin) -> None:
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    _inside(paths.snapshots, paths.tree(record.snapshot_id))
    if isinstance(record, context.Pin) and record.until is not None:
        clock.parse_instant(record.until)


class Escape(Exception):
    """A decoded name leads out of its directory."""


def _inside(directory: Path, path: Path | None) -> None:
    """Raise unless the path is right below the directory, or deeper."""
    if path is not None:
        normal = os.path.normpath(path)
        if not normal.startswith(f"{directory}{os.sep}") or "\0" in normal:
            raise Escape(f"{os.fspath(path)[:100]!a} is not below {directory}")


def _use_plan(record: retention.GcPlan) -> None:
    record.is_expired(NOW)
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    for each in record.snapshots:
        _inside(paths.snapshots, paths.tree(each))


def _use_scratch(record: payloads.ScratchIntent) -> None:
    paths = context.RepositoryPaths(Path("/nowhere/at/all"))
    _inside(paths.scratch, paths.scratch / record.scratch_id)
    for each in record.uses:
        _inside(paths.snapshots, paths.tree(each))
    record.identity.holder(record.holder_id)


def _use_intent(record: intents.Intent) -> None:
    layout = Layout()
    for step in record.steps:
        layout.locate(step.name)
        _ = step.document
    names.safe_name(record.id)


def _use_claim(record: issues.ClaimRecord) -> None:
    issues.CLAIMS.key(record.issue_id)
    if record.claim is not None:
        _timed(record.claim)
        issues.ClaimId.parse(record.claim.claim_id)


def _use_issue(record: issues.Issue) -> None:
    issues.ISSUES.key(record.id)
    for each in record.dependencies:
        issues.ISSUES.key(each)


def _use_registry(record: issues.Registry) -> None:
    for key, gate in record.gates.items():
        issues.gate_of(key, gate)


def _coded(name: str, codec: Codec[Any], *samples: object, use: Use = lambda record: record) -> Decoder:
    def decode(content: bytes) -> object:
        return use(codec.decode(content, "a file"))

    return Decoder(name, decode, tuple(map(as_json, samples)))


def records() -> list[Decoder]:
    trail = audit.AuditTrail().stream.codec
    return [
        _coded("the format", context.FORMAT.codec, {"version": 1, "repository_id": "x", "created_at": T}),
        _coded(
            "a worktree",
            context.WORKTREES.codec,
            {"worktree_id": "a", "isolation": "exclusive", "created_at": T, "base_snapshot_id": "00aa"}
            | {"head_snapshot_id": None, "label": "l", "snapshot_defaults": {"consistency_level": "quiesced"}},
            use=_use_config,
        ),
        _coded("an operation", context.OPERATIONS.codec, _OPERATION, use=_use_operation),
        _coded("a descriptor", context.DESCRIPTORS.codec, _DESCRIPTOR, use=_use_descriptor),
        _coded(
            "a reference",
            context.REFERENCES.codec,
            {"name": "v1", "snapshot_id": "00aa", "created_at": T, "note": "n"},
            use=_use_snapshot_name,
        ),
        _coded(
            "a pin",
            context.PINS.codec,
            {"pin_id": "p", "snapshot_id": "00aa", "created_at": T, "reason": "r", "until": T, "holder_id": HOLDER},
            use=_use_snapshot_name,
        ),
        _coded("the policy", retention.RETENTION.codec, {"keep_last": 1, "keep_for": 2.5, "max_bytes": None}),
        _coded("a plan", retention.PLANS.codec, _PLAN, use=_use_plan),
        _coded("a lease", leases.WORKTREE_LEASES.leases.codec, LEASE, use=_use_lease),
        _coded(
            "a queue",
            leases.WORKTREE_LEASES.queues.codec,
            {"worktree_id": "a", "waiters": [_WAITER, _WAITER]},
            use=_use_queue,
        ),
        _coded("a counter", leases.LeaseKeys.of("a").counter.codec, {"worktree_id": "a", "fencing_token": 1}),
        _coded(
            "a scratch",
            payloads._CODEC,  # noqa: SLF001
            {"scratch_id": "00aa", "purpose": "p", "begun_at": T, "holder_id": HOLDER, "worktree_id": "a"}
            | {"uses": ["00bb"], "identity": IDENTITY},
            use=_use_scratch,
        ),
        _coded("an intent", intents._CODEC, {"id": "x", "steps": [_STEP], "drafts": "00aa"}, use=_use_intent),  # noqa: SLF001
        _coded("the configuration", stores._CODEC, {"schema_version": 1, "store": "files"}),  # noqa: SLF001
        _coded("an audit entry", trail, _AUDIT),
        _coded("the index", issues.INDEX.codec, {"schema_version": 2, "all_ids": ["i"], "more": 1}),
        _coded("the graph", issues.GRAPH.codec, {"edges": [["i", "j"]], "version": 1, "schema_version": 1}),
        _coded("the gates", issues.GATES.codec, {"gates": {"g": GATE}}, use=_use_registry),
        _coded("a gate run", issues.GATE_RUNS.codec, _RUN),
        _coded("an issue", issues.ISSUES.codec, ISSUE, use=_use_issue),
        _coded("a claim", issues.CLAIMS.codec, {"issue_id": "i", "token": 1, "claim": _CLAIM}, use=_use_claim),
        _coded("the dependents", issues.DEPENDENTS.codec, {"issue_id": "i", "dependents": ["j"]}),
        _coded("an event of an issue", issues.EVENTS.codec, {"type": "created", "issue_id": "i", "timestamp": T}),
        _coded("an event of the ledger", ledger.CODEC, {"type": "note", "id": "x", "timestamp": T, "n": [1, {"a": 2}]}),
        _coded("the configuration of a ledger", ledger.META.codec, {"lock_timeout": "5m", "claim_files": True}),
    ]
