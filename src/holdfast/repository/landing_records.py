"""Records of landing, and the order of a queue.

An entry is a frozen commit that is to land on a target: a branch. One document per target has the queue, and the intent
of a publish that is not finished. `docs/decisions/0014-landing.md` has the protocol.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from holdfast.fs.names import MAX_NAME, is_safe_name
from holdfast.store.model import Family, Instant, SafeName, StructCodec

CommitName = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{40}|[0-9a-f]{64})\Z")]
_LONGEST = MAX_NAME - 16  # leaves room for the names of a lease and a file that contain it


class LandingState(StrEnum):
    """The state of an entry. All but `queued` are outcomes."""

    QUEUED = "queued"
    LANDED = "landed"
    CONFLICT = "conflict"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"


class LandingStyle(StrEnum):
    """How a commit gets onto its target: as a merge of both, or as one commit with all of its changes."""

    MERGE = "merge"
    SQUASH = "squash"


class Landing(msgspec.Struct, frozen=True, kw_only=True):
    """An entry: a frozen commit, where it comes from, where it is to land, and its outcome."""

    landing_id: SafeName
    target: SafeName  # the name of the target's document
    branch: str
    commit: CommitName
    sequence: int
    queued_at: Instant
    worktree_id: SafeName | None = None
    issue_id: SafeName | None = None
    claim_id: str = ""  # the claim that is held for it; empty if the issue needed none
    title: str = ""
    style: LandingStyle = LandingStyle.MERGE
    priority: int = 0
    gates: tuple[str, ...] = ()  # the automatic gates of the issue, which are checks of this entry
    actor: str = ""
    remote: str = ""  # the remote that has the branch; empty: the branch is local
    state: LandingState = LandingState.QUEUED
    decided_at: Instant | None = None
    landed_as: CommitName | None = None  # the commit that put it on the target
    reason: str = ""
    conflicts: tuple[str, ...] = ()  # the paths that conflict
    against: CommitName | None = None  # the tip that it conflicts with, or that the checks failed on
    log: str = ""  # the id of the run that failed
    flaky: bool = False  # a check failed, and passed when it was run again

    @property
    def is_open(self) -> bool:
        return self.state is LandingState.QUEUED

    def order(self) -> tuple[int, int]:
        """Higher priority first, then first come, first served."""
        return -self.priority, self.sequence


class IntentEntry(msgspec.Struct, frozen=True):
    """An entry of a publish, and the commit that puts it on the target."""

    landing_id: SafeName
    landed_as: CommitName


class PublishIntent(msgspec.Struct, frozen=True, kw_only=True):
    """A publish that was decided: the branch moves from `old` to `new`, and then the entries have landed."""

    intent_id: SafeName
    old: CommitName
    new: CommitName
    entries: tuple[IntentEntry, ...]
    begun_at: Instant
    holder_id: str
    flaky: tuple[SafeName, ...] = ()  # entries with a check that failed and then passed

    def ids(self) -> list[str]:
        return [each.landing_id for each in self.entries]


class LandingTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target branch. `queue` has the ids of the queued entries; `void` are intents that a stopped process may still
    carry out."""

    name: SafeName
    branch: str
    sequence: int = 0
    queue: tuple[SafeName, ...] = ()
    intent: PublishIntent | None = None
    void: tuple[PublishIntent, ...] = ()
    waits_for: str = ""  # what the queue waits for, as text for people
    remote: str = ""  # the remote that has the branch; empty: the branch is local

    def without(self, ids: Collection[str]) -> tuple[str, ...]:
        return tuple(each for each in self.queue if each not in ids)

    def dropping(self, ids: Collection[str]) -> LandingTarget:
        """The target without these entries; one without any waits for nothing."""
        queue = self.without(ids)
        return msgspec.structs.replace(self, queue=queue, waits_for=self.waits_for if queue else "")


LANDINGS: Family[Landing] = Family("jvs/landings", StructCodec(Landing), id_field="landing_id")
TARGETS: Family[LandingTarget] = Family("jvs/landing-targets", StructCodec(LandingTarget), id_field="name")


def new_landing_id() -> str:
    return secrets.token_hex(6)


def target_name(branch: str, remote: str = "") -> str:
    """The safe name of a target: the branch with special characters as `_` and two hex digits; hashed if too long."""
    text = f"{remote}/{branch}" if remote else branch
    plain = "".join(
        chr(byte) if (byte < 128 and chr(byte).isalnum()) or byte in b".-" else f"_{byte:02x}"
        for byte in text.encode(errors="surrogateescape")
    )
    if len(plain) <= _LONGEST and is_safe_name(plain):
        return plain
    return f"{plain[:40].replace('..', '_')}_{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:32]}"


def lease_of(target: str) -> str:
    """The name of the landing lease of a target."""
    return f"landing-{target}"


def in_order(entries: Iterable[Landing], waits_for: Mapping[str, Collection[str]]) -> list[Landing]:
    """The entries that may land, in order: by priority and arrival, each after the entries of issues that its own issue
    depends on. `waits_for` has the open dependencies of an issue; one that is not queued holds its dependents back."""
    left = sorted(entries, key=Landing.order)
    found: list[Landing] = []
    placed: set[str] = set()
    while True:
        following = next((each for each in left if placed.issuperset(waits_for.get(each.issue_id or "", ()))), None)
        if following is None:
            return found
        left.remove(following)
        found.append(following)
        if following.issue_id is not None:
            placed.add(following.issue_id)


def landing_to_json(landing: Landing) -> dict[str, Any]:
    return {
        "id": landing.landing_id,
        "state": landing.state.value,
        "branch": landing.branch,
        "remote": landing.remote or None,
        "commit": landing.commit,
        "worktree": landing.worktree_id,
        "issue_id": landing.issue_id,
        "title": landing.title,
        "style": landing.style.value,
        "priority": landing.priority,
        "gates": list(landing.gates),
        "actor": landing.actor,
        "sequence": landing.sequence,
        "queued_at": landing.queued_at,
        "decided_at": landing.decided_at,
        "landed_as": landing.landed_as,
        "reason": landing.reason,
        "conflicts": list(landing.conflicts),
        "against": landing.against,
        "log": landing.log,
        "flaky": landing.flaky,
    }
