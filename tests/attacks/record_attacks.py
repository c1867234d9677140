"""Attacks by records: operations, configurations, descriptors, plans, intents and scratches with hostile names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from proof.hostile.victim import TRAPPED, Victim, now, read_json, write
from tests.attacks.planting import Attack, change_record, head_of, plant_operation, pretty

SETTLING = ("doctor --fix", "worktree list", "snapshot -m x", "worktree create made")
READING = ("info", "history --all", "worktree list", "who", "doctor", "gc plan --dry-run")

Hostile = Callable[[Victim], str]

NAMES: dict[str, Hostile] = {
    "an absolute path": lambda victim: str(victim.home / "docs"),
    "a path upwards": lambda victim: f"{victim.upwards}../../../home/docs",
    "a path upwards to a trap": lambda victim: f"{victim.upwards}../../../home/trap/{TRAPPED}",
    "two dots": lambda victim: "..",
    "a dot": lambda victim: ".",
    "nothing": lambda victim: "",
    "a NUL": lambda victim: "a\0b",
    "a lone surrogate": lambda victim: "a\ud800b",
    "a very long name": lambda victim: "x" * 5000,
    "an option": lambda victim: "-rf",
}
"""Names that no record may have."""

_PATHS: dict[str, Hostile] = {
    "an absolute path": lambda victim: str(victim.planted),
    "a login script": lambda victim: str(victim.home / ".bash_login"),
    "a path upwards": lambda victim: f"{victim.upwards}../../home/planted",
    "a path through a directory upwards": lambda victim: "src/../../../home/planted",
    "an empty part": lambda victim: "src//deep",
    "a NUL": lambda victim: "src/a\0b",
}


def operations() -> Iterator[Attack]:
    for kind in ("create", "remove", "restore", "rename"):
        for what, hostile in NAMES.items():
            yield Attack(f"{kind} whose operation id is {what}", _with_id(kind, hostile), SETTLING)
    for what, hostile in NAMES.items():
        yield Attack(f"remove of the worktree {what}", _of_worktree("remove", hostile), SETTLING)
        yield Attack(f"rename to {what}", _renamed_to(hostile), SETTLING)
        yield Attack(f"create from the snapshot {what}", _from_snapshot("create", hostile), SETTLING)
    for what, hostile in _PATHS.items():
        yield Attack(f"restore of {what}", _restoring(hostile), SETTLING)
        yield Attack(f"restore of {what}, by its inode", _restoring(hostile, with_inode=True), SETTLING)


def _with_id(kind: str, hostile: Hostile) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        under = "new" if kind == "create" else "spare"
        fields: dict[str, Any] = {"counterpart": "other"} if kind == "rename" else {}
        plant_operation(victim, under, kind=kind, worktree_id=under, operation_id=hostile(victim), **fields)

    return plant


def _of_worktree(kind: str, hostile: Hostile) -> Callable[[Victim], None]:
    return lambda victim: plant_operation(victim, "spare", kind=kind, worktree_id=hostile(victim))


def _renamed_to(hostile: Hostile) -> Callable[[Victim], None]:
    return lambda victim: plant_operation(
        victim, "spare", kind="rename", worktree_id="spare", counterpart=hostile(victim)
    )


def _from_snapshot(kind: str, hostile: Hostile) -> Callable[[Victim], None]:
    return lambda victim: plant_operation(
        victim, "new", kind=kind, worktree_id="new", snapshot_id=hostile(victim), isolation="exclusive"
    )


def _restoring(hostile: Hostile, *, with_inode: bool = False) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        new = write(victim.root / ".jvs/tmp/00000000000000bb/payload", "touch ~/pwned\n")
        inode = str(new.stat().st_ino) if with_inode else None
        plant_operation(victim, "main", kind="restore", path=hostile(victim), inode=inode, snapshot_id=head_of(victim))

    return plant


# --- Other records ----------------------------------------------------------------------------------


def records() -> Iterator[Attack]:
    """Each field of a record that becomes a path or a key, with each hostile name."""
    for name, hostile in NAMES.items():
        for what, plant, aims in _FIELDS:
            yield Attack(f"{what} is {name}", _planted(plant, hostile), aims)


def _planted(plant: Callable[[Victim, str], None], hostile: Hostile) -> Callable[[Victim], None]:
    return lambda victim: plant(victim, hostile(victim))


def _config(victim: Victim) -> Path:
    return victim.root / ".jvs/worktrees/spare/config.json"


def _descriptor(victim: Victim) -> Path:
    return victim.root / f".jvs/descriptors/{head_of(victim)}.json"


def _decided_plan(victim: Victim, snapshot_id: str) -> None:
    path = next((victim.root / ".jvs/plans").glob("*.json"))
    change_record(path, state="decided", snapshots=[snapshot_id])
    change_record(_descriptor(victim), doomed_by=path.stem)


def _doomed(victim: Victim, plan_id: str) -> None:
    change_record(_descriptor(victim), doomed_by=plan_id)


def _scratch(victim: Victim, used: str) -> None:
    path = victim.root / ".jvs/tmp/00000000000000aa/intent.json"
    change_record(path, uses=[used], worktree_id=used, scratch_id=used)


def _lease(victim: Victim, name: str) -> None:
    change_record(victim.root / ".jvs/locks/side.json", worktree_id=name, lock_id=name, holder_id=name)


def _issue(victim: Victim, name: str) -> None:
    path = next((victim.root / ".jit/issues").glob("*.json"))
    change_record(path, id=name, dependencies=[name], gates_required=[name])


def _claim(victim: Victim, name: str) -> None:
    path = next((victim.root / ".jit/claims").glob("*.json"))
    change_record(path, issue_id=name)


_WORKTREE = ("worktree list", "worktree show spare", "worktree remove spare", "doctor --fix", "gc plan")
_HISTORY = ("history --all", "show head", "restore head restored", "verify --all", "gc plan", "doctor --fix")
_FIELDS: list[tuple[str, Callable[[Victim, str], None], tuple[str, ...]]] = [
    ("the id in a worktree's record", lambda victim, name: change_record(_config(victim), worktree_id=name), _WORKTREE),
    ("the head in a worktree's record", lambda v, name: change_record(_config(v), head_snapshot_id=name), _WORKTREE),
    ("the id in a descriptor", lambda v, name: change_record(_descriptor(v), snapshot_id=name), _HISTORY),
    ("the parent in a descriptor", lambda v, name: change_record(_descriptor(v), parent_id=name), _HISTORY),
    ("the snapshot of a decided plan", _decided_plan, ("gc plan", "doctor --fix", "gc run --plan {plan}")),
    ("the plan that dooms a snapshot", _doomed, ("doctor --fix", "gc plan", "restore head restored")),
    ("the use of a scratch", _scratch, ("doctor --fix", "gc plan", "snapshot -m x")),
    (
        "the names in a lease",
        _lease,
        ("who", "lease steal --worktree side", "doctor --fix", "guard worktrees/side/mine"),
    ),
    ("the names in an issue", _issue, ("issue list", "issue validate --fix", "issue show {issue}", "ready", "graph")),
    ("the issue of a claim", _claim, ("issue locks", "who", "issue validate --fix", "issue claim-next")),
]


# --- Single records ---------------------------------------------------------------------------------


def _intent(victim: Victim, name: str, operation: str, content: str = "{}", intent_id: str = "00aa") -> None:
    step = {"name": name, "operation": operation, "content": content, "before": "", "at": 0}
    record = {"id": intent_id, "steps": [step]}
    write(victim.root / ".holdfast/intents/00aa.json", json.dumps(record, separators=(",", ":")))


def _intent_removing(victim: Victim) -> None:
    """A removal whose digest fits the sentinel, were it reached."""
    content = (victim.home / "docs/letter").read_bytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    step = {
        "name": "jvs/refs/../../../home/docs/letter",
        "operation": "remove",
        "content": "",
        "before": digest,
        "at": 0,
    }
    write(victim.root / ".holdfast/intents/00aa.json", json.dumps({"id": "00aa", "steps": [step]}))


def _strange_worktree(name: str) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        record = {**read_json(_config(victim)), "worktree_id": name}
        write(victim.root / ".jvs/worktrees" / name / "config.json", pretty(record))
        (victim.root / "worktrees" / name).mkdir(parents=True, exist_ok=True)

    return plant


def _wait_note(**fields: Any) -> Callable[[Victim], None]:
    return lambda victim: change_record(victim.root / ".jvs/waits/00aa.json", **fields)


def _times(victim: Victim) -> None:
    """Times that are none, in every record that has one."""
    for path in sorted(victim.root.glob(".j*/**/*.json")):
        record = read_json(path)
        timed = {name: "not a time" for name in record if name.endswith("_at") or name in ("since", "until")}
        if timed:
            change_record(path, **timed)


def _times_far_away(victim: Victim) -> None:
    for path in sorted(victim.root.glob(".j*/**/*.json")):
        record = read_json(path)
        timed = {name: "9999-12-31T23:59:59-23:59" for name in record if name.endswith("_at")}
        if timed:
            change_record(path, **timed)


def _cycle_of_parents(victim: Victim) -> None:
    change_record(_descriptor(victim), parent_id=head_of(victim))


def _queue(victim: Victim) -> None:
    waiter = {"ticket": "t", "holder_id": "x", "priority": 10**400, "since": "x", "seen_at": now()}
    write(victim.root / ".jvs/queues/side.json", pretty({"worktree_id": "side", "waiters": [waiter] * 3}))


def _token(victim: Victim) -> None:
    change_record(victim.root / ".jvs/tokens/main.json", fencing_token=10**300)


def _newer_format(victim: Victim) -> None:
    change_record(victim.root / ".jvs/format.json", version=10**30)


SINGLE = [
    Attack(
        "an intent that puts a key upwards", lambda v: _intent(v, "jvs/refs/../../../home/planted", "put"), SETTLING
    ),
    Attack("an intent that puts an absolute key", lambda v: _intent(v, str(v.planted), "put"), SETTLING),
    Attack("an intent that puts an unknown key", lambda v: _intent(v, "jvs/nothing/x", "put"), SETTLING),
    Attack("an intent that removes a sentinel", _intent_removing, SETTLING),
    Attack("an intent whose id is a path", lambda v: _intent(v, "jvs/refs/x", "put", intent_id="../../x"), SETTLING),
    Attack("an intent that appends at a negative place", lambda v: _intent(v, "jvs/audit", "append"), SETTLING),
    *(
        Attack(f"a worktree called {name}", _strange_worktree(name), (*_WORKTREE, f"worktree remove -- {name}"))
        for name in (".jvs", ".jit", ".git", ".holdfast", "-rf", "a b", "$(touch pwned)", "\x1b[2J", "a\nb")
    ),
    Attack(
        "a wait note whose ticket is a path", _wait_note(ticket="../../../home/docs/letter"), ("who", "top --limit 1")
    ),
    Attack(
        "a wait note with nested ancestors",
        _wait_note(above=[[["x"]]], agent="x"),
        ("who", "lease steal --worktree side"),
    ),
    Attack("times that are none", _times, (*READING, "doctor --fix", "issue list", "issue locks", "gc plan")),
    Attack("times at the end of all time", _times_far_away, (*READING, "doctor --fix", "issue locks", "gc plan")),
    Attack(
        "a snapshot that is its own parent", _cycle_of_parents, (*READING, "history --graph", "gc plan", "doctor --fix")
    ),
    Attack("a queue of waiters with absurd numbers", _queue, (*READING, "lease acquire --worktree side --wait 1ms")),
    Attack("a token beyond all numbers", _token, ("lease acquire --ttl 5m", "snapshot -m x", "doctor --fix")),
    Attack("a format beyond all numbers", _newer_format, READING),
]

ATTACKS = [*operations(), *records(), *SINGLE]
