"""Records of the issue tracker in `.jit/`, as the specification defines them.

Unknown fields, of another program or a later version, are kept in `unknown` and written back. Missing
fields get their default. A record that cannot be understood is `Corrupt`; `reading` continues without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from holdfast.clock import BootMark, Deadline, Now, TimedRight
from holdfast.errors import Corrupt, JsonInvalid, SettingInvalid, TooLarge, UsageFailure
from holdfast.fs import strictjson
from holdfast.fs.names import LONGEST_DESCRIPTION, checked_text
from holdfast.store.model import (
    MOST_BYTES,
    Append,
    Family,
    Instant,
    Key,
    SafeName,
    Store,
    Stream,
    StructCodec,
    View,
    is_finite,
)

SCHEMA_VERSION = 2
LARGEST_INDEX = 256 << 20  # bytes: some millions of ids
UNKNOWN = "(unknown)"
ARCHIVED_FROM = "archived_from"


class State(StrEnum):
    """The state of an issue. `backlog` waits for other issues, `gated` for gates."""

    BACKLOG = "backlog"
    READY = "ready"
    IN_PROGRESS = "in_progress"
    GATED = "gated"
    DONE = "done"
    REJECTED = "rejected"
    ARCHIVED = "archived"


class Priority(StrEnum):
    """The urgency of an issue, from lowest to highest."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Higher is more urgent."""
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class GateStatus(StrEnum):
    """The status of one gate of one issue."""

    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"


class OpenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record that preserves unknown fields."""

    unknown: dict[str, Any] = msgspec.field(name=UNKNOWN, default_factory=dict)


class Index(OpenRecord, frozen=True, kw_only=True):
    """The ids of all issues, in order of creation."""

    schema_version: int = SCHEMA_VERSION
    all_ids: list[str] = []
    deleted_ids: list[str] = []


class Unlisted(OpenRecord, frozen=True, kw_only=True):
    """The ids of issues that a large index does not list yet, in order of creation."""

    ids: list[str] = []


class Issue(OpenRecord, frozen=True, kw_only=True):
    """A unit of work. `state` is the stored state; `rules.state_of` derives the effective one."""

    id: str
    title: str
    description: str = ""
    state: State = State.BACKLOG
    priority: Priority = Priority.NORMAL
    assignee: str | None = None
    dependencies: tuple[str, ...] = ()
    gates_required: tuple[str, ...] = ()
    gates_status: dict[str, Any] = {}  # ours are objects; those of other programs keep their shape
    context: dict[str, str] = {}
    documents: list[Any] = []
    labels: tuple[str, ...] = ()
    touches: tuple[str, ...] = ()  # patterns of the paths that the work changes: see `scopes`
    created_at: str = ""
    updated_at: str = ""

    @property
    def archived_from(self) -> object:
        """The state that the issue had before it was archived."""
        return self.unknown.get(ARCHIVED_FROM)

    def gate_status(self, gate: str) -> GateStatus:
        """Whether a gate is pending, passed or failed."""
        known: Any = self.gates_status.get(gate)
        status = known.get("status") if isinstance(known, dict) else known
        return next((each for each in GateStatus if each == status), GateStatus.PENDING)

    def open_gates(self) -> list[str]:
        """The required gates that have not passed."""
        return [gate for gate in self.gates_required if self.gate_status(gate) is not GateStatus.PASSED]

    def failed_gates(self) -> list[str]:
        """The required gates that have failed."""
        return [gate for gate in self.gates_required if self.gate_status(gate) is GateStatus.FAILED]


class IssueSummary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of an issue that lists and the queue need."""

    id: str
    title: str
    state: State
    priority: Priority
    assignee: str | None
    dependencies: tuple[str, ...]
    gates_required: tuple[str, ...]
    labels: tuple[str, ...]
    touches: tuple[str, ...]
    created_at: str
    updated_at: str
    archived_from: str
    waits_for: tuple[str, ...]  # gates
    failed: tuple[str, ...]  # gates

    def open_gates(self) -> list[str]:
        return list(self.waits_for)

    def failed_gates(self) -> list[str]:
        return list(self.failed)

    @classmethod
    def of(cls, issue: Issue) -> IssueSummary:
        return cls(
            issue.id,
            issue.title,
            issue.state,
            issue.priority,
            issue.assignee,
            issue.dependencies,
            issue.gates_required,
            issue.labels,
            issue.touches,
            issue.created_at,
            issue.updated_at,
            str(issue.archived_from or ""),
            tuple(issue.open_gates()),
            tuple(issue.failed_gates()),
        )


AnyIssue = Issue | IssueSummary
Listed = TypeVar("Listed", bound=AnyIssue)
SHORT = 8  # characters of an id, for people


def issue_summary_to_json(issue: AnyIssue, state: State) -> dict[str, Any]:
    """An issue as lists show it; `state` is derived from its dependencies, whatever is stored."""
    return {
        "id": issue.id,
        "short_id": issue.id[:SHORT],
        "title": issue.title,
        "state": state.value,
        "priority": issue.priority.value,
        "assignee": issue.assignee,
        "labels": list(issue.labels),
        "touches": list(issue.touches),
        "dependencies": list(issue.dependencies),
        "gates_required": list(issue.gates_required),
        "created_at": issue.created_at,
        "updated_at": issue.updated_at,
    }


def searched_text(issue: Issue) -> str:
    """The text in which words are searched."""
    context = (f"{name}={value}" for name, value in issue.context.items())
    return "\n".join((issue.title, issue.description, issue.assignee or "", *issue.labels, *context)).casefold()


class Registry(OpenRecord, frozen=True, kw_only=True):
    """All defined gates by key, as stored in `gates.json`."""

    gates: dict[str, dict[str, Any]] = {}


class IssueEvent(OpenRecord, frozen=True, kw_only=True):
    """An event; the fields that depend on its type are in `unknown`."""

    type: str = "unknown"
    id: str = ""
    issue_id: str = ""
    timestamp: str = ""


class Graph(OpenRecord, frozen=True, kw_only=True):
    """Lets dependencies be added without locking all issues.

    `epoch` counts all additions; `recent` holds the last of them as `[issue, depends_on]`.
    `dependents_complete` says that the dependents documents contain every edge.
    """

    epoch: int = 0
    recent: list[tuple[str, str]] = []
    dependents_complete: bool = False


class Dependents(OpenRecord, frozen=True, kw_only=True):
    """The issues that depend on one: the reverse edges."""

    issue_id: str
    dependents: tuple[str, ...] = ()


Open = TypeVar("Open", bound=OpenRecord)


class OpenCodec(Generic[Open]):
    """Encodes records with unknown fields as indented JSON, or as one line for streams."""

    def __init__(self, kind: type[Open], *, pretty: bool = True, limit: int = MOST_BYTES) -> None:
        self._kind = kind
        self._pretty = pretty
        self._limit = limit
        self._known = frozenset(kind.__struct_encode_fields__) - {UNKNOWN}

    def encode(self, record: Open) -> bytes:
        """Known fields first, in their order, then the unknown ones."""
        what = f"a record of the type {self._kind.__name__}"
        try:
            value = self._fields(record)
            value |= {name: each for name, each in value.pop(UNKNOWN).items() if name not in self._known}
            content = _encoded_fast(value)
            if content is None:
                content = strictjson.encode(value, what=what, limit=self._limit, string_keys=True)
            msgspec.convert(msgspec.json.decode(content), self._kind)
        except (JsonInvalid, msgspec.MsgspecError, TypeError, UnicodeError) as error:
            raise UsageFailure(f"{what} cannot be stored: {error}", problem=str(error)) from None
        if self._pretty:
            content = msgspec.json.format(content, indent=2)
        if len(content) > self._limit:
            raise TooLarge(what, len(content), self._limit)
        return content

    def _fields(self, record: Open) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(record, str_keys=True)
        return value

    def decode(self, content: bytes, source: str) -> Open:
        try:
            value = _strict(content.removesuffix(b"\n"), source, self._limit)
            if not isinstance(value, dict):
                raise Corrupt(f"{source} is not a JSON object", source=source)
            record = self._converted(value)
        except (JsonInvalid, TooLarge, msgspec.ValidationError) as error:
            raise _not_understood(content, source, str(error).removeprefix(f"{source} is ")) from None
        if value.keys() <= self._known:
            return record
        unknown = {name: each for name, each in value.items() if name not in self._known}
        return msgspec.structs.replace(record, unknown=unknown)

    def _converted(self, value: dict[str, Any]) -> Open:
        try:
            return msgspec.convert(value, self._kind)
        except msgspec.ValidationError:
            return msgspec.convert(self._lenient(value), self._kind)

    def _lenient(self, value: dict[str, Any]) -> dict[str, Any]:
        """The value, with the variants of other programs normalized."""
        return {name: each for name, each in value.items() if name != UNKNOWN}


def _encoded_fast(value: dict[str, Any]) -> bytes | None:
    """The value as JSON, if that is certainly valid; the strict encoder reports what is not."""
    try:
        content = msgspec.json.encode(value)
        is_shallow = content.count(b"[") + content.count(b"{") <= strictjson.MAX_DEPTH
        return content if is_shallow and is_finite(value, content) else None
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def _not_understood(content: bytes, source: str, problem: str) -> Corrupt:
    hint = None
    if re.search(rb"^<<<<<<< ", content, re.MULTILINE):
        problem, hint = "it contains a merge conflict", "Resolve the merge conflict in the file by hand."
    return Corrupt(f"{source} cannot be understood: {problem}", hint=hint, source=source, problem=problem)


def _strict(content: bytes, source: str, limit: int) -> Any:
    """The JSON value. `msgspec` is fast but accepts duplicate keys, so its result counts only if it encodes to the same
    bytes; otherwise the strict decoder decides."""
    if len(content) > limit:
        raise TooLarge(source, len(content), limit)
    try:
        value = msgspec.json.decode(content)
        again = msgspec.json.encode(value)
        if again == content or msgspec.json.format(again, indent=2) == content:
            return value
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        pass
    return strictjson.decode(content, source=source, limit=limit)


_OLD_STATES = {"open": "backlog", "inprogress": "in_progress"}
_NULLS = ("description", "dependencies", "gates_required", "gates_status", "context", "documents", "labels", "touches")


class IssueCodec(OpenCodec[Issue]):
    """Encodes issues; also reads those of earlier versions of the `jit` tool."""

    def __init__(self) -> None:
        super().__init__(Issue)

    def _fields(self, record: Issue) -> dict[str, Any]:
        """An issue that declares no scope is written as other programs write it, which do not know the field."""
        return {name: each for name, each in super()._fields(record).items() if name != "touches" or each}

    def _lenient(self, value: dict[str, Any]) -> dict[str, Any]:
        value = super()._lenient(value)
        state = value.get("state")
        if isinstance(state, str) and state in _OLD_STATES:
            value["state"] = _OLD_STATES[state]
        return {name: each for name, each in value.items() if each is not None or name not in _NULLS}


class IssueEventCodec(OpenCodec[IssueEvent]):
    """Encodes events. A line that is not an event becomes an unreadable one and does not end the log."""

    UNREADABLE = "unreadable"

    def __init__(self) -> None:
        super().__init__(IssueEvent, pretty=False)

    def decode(self, content: bytes, source: str) -> IssueEvent:
        try:
            return super().decode(content, source)
        except Corrupt as failure:
            text = content.decode("utf-8", "backslashreplace")
            return IssueEvent(type=self.UNREADABLE, unknown={"line": text, "problem": failure.message})


class Checker(NamedTuple):
    """A command that decides a gate: it passes if the command exits with 0 in time."""

    command: str
    timeout: float
    working_dir: str | None
    env: dict[str, str]

    def as_text(self) -> str:
        """Everything that decides what runs, as one text for a user to approve."""
        return msgspec.json.encode([self.command, self.working_dir, sorted(self.env.items())]).decode()


class Gate(NamedTuple):
    """A gate of the registry."""

    key: str
    title: str
    description: str
    stage: str
    mode: str
    checker: Checker | None


DEFAULT_CHECK_SECONDS = 300.0


def gate_of(key: str, record: dict[str, Any]) -> Gate:
    checker = record.get("checker")
    return Gate(
        key=key,
        title=str(record.get("title") or key),
        description=str(record.get("description") or ""),
        stage=str(record.get("stage") or "postcheck"),
        mode=str(record.get("mode") or ("auto" if checker else "manual")),
        checker=_checker_of(checker) if isinstance(checker, dict) else None,
    )


def _checker_of(record: dict[str, Any]) -> Checker | None:
    if not isinstance(record.get("command"), str):
        return None
    env, timeout = record.get("env"), record.get("timeout_seconds")
    return Checker(
        command=record["command"],
        timeout=float(min(timeout, 1e9)) if isinstance(timeout, int | float) and timeout > 0 else DEFAULT_CHECK_SECONDS,
        working_dir=record.get("working_dir") if isinstance(record.get("working_dir"), str) else None,
        env={str(name): str(value) for name, value in env.items()} if isinstance(env, dict) else {},
    )


class GateRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one checker run, with its output."""

    schema_version: int = 1
    run_id: str
    gate_key: str
    stage: str
    issue_id: str
    status: str
    started_at: str
    completed_at: str
    duration_ms: int
    exit_code: int | None
    stdout: str
    stderr: str
    command: str
    by: str
    message: str | None = None


def checked_title(text: str) -> str:
    title = text.strip()
    if not title or "\n" in title:
        raise SettingInvalid("title", text, "a single line of text")
    return checked_text(title, what="title")


def checked_description(text: str) -> str:
    return checked_text(text, what="description", limit=LONGEST_DESCRIPTION)


def checked_labels(labels: Iterable[str]) -> tuple[str, ...]:
    return without_repeats(checked_text(each, what="label") for each in labels)


def checked_context(context: Mapping[str, str]) -> dict[str, str]:
    for key, value in context.items():
        checked_text(key, what="key in the context")
        checked_text(value, what=f"context {key}", limit=LONGEST_DESCRIPTION)
    return dict(context)


def without_repeats(values: Iterable[str]) -> tuple[str, ...]:
    """The values in their order, without duplicates."""
    return tuple(dict.fromkeys(values))


class IssueClaim(TimedRight, msgspec.Struct, frozen=True, kw_only=True):
    """A timed reservation of an issue. `claim_id` is `<issue>.<token>.<random>` and is never reused.

    The claim expires at `expires_at` by the store's clock; on the same boot of one machine at `boot_expires_at`, which
    setting a clock cannot move. While it is held for a landing, it does not expire.
    """

    claim_id: str
    assignee: str
    token: int
    ttl: float
    claimed_at: Instant
    renewed_at: Instant
    expires_at: Instant
    purpose: str = ""
    holder: dict[str, str] = msgspec.field(default_factory=dict)  # if known; see `locks.identity.described`
    boot_expires_at: BootMark | None = None
    held_for: SafeName | msgspec.UnsetType = msgspec.UNSET  # the landing that the finished work is queued for

    def deadline(self) -> Deadline:
        return Deadline(self.expires_at, self.boot_expires_at)

    def time_left(self, now: Now | float, *, for_others: bool) -> float:
        return super().time_left(now, for_others=for_others) if self.held_for is msgspec.UNSET else self.ttl


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The claim of an issue, if any. The token outlives the claim and only grows."""

    issue_id: str
    token: int
    claim: IssueClaim | None = None
    returned_by: SafeName | msgspec.UnsetType = msgspec.UNSET  # the last landing that gave the issue back


class ClaimId(NamedTuple):
    issue_id: str
    token: int
    text: str

    @classmethod
    def parse(cls, text: str) -> ClaimId:
        issue_id, token, secret = ["", "", *text.strip().rsplit(".", 2)][-3:]
        if not (issue_id and secret and token.isascii() and token.isdigit() and len(token) < 16):
            raise SettingInvalid("the claim", text, "a claim id, as 'holdfast issue claim' prints it")
        return cls(issue_id, int(token), text.strip())


class _RawCodec:
    """The bytes of a document that is too large to be decoded for one question."""

    def encode(self, record: bytes) -> bytes:
        return record

    def decode(self, content: bytes, source: str) -> bytes:
        return content


def has_index(store: Store) -> bool:
    """Whether the store keeps an index: a file for other programs."""
    return store.files is not None


INDEX = Key("jit/index", OpenCodec(Index, limit=LARGEST_INDEX))
RAW_INDEX = Key(INDEX.name, _RawCodec())
UNLISTED = Key("jit/unlisted", OpenCodec(Unlisted))
GRAPH = Key("jit/graph", OpenCodec(Graph))
GATES = Key("jit/gates", OpenCodec(Registry))
GATE_RUNS = Family("jit/gate-runs", StructCodec(GateRun), id_field="run_id")
ISSUES = Family("jit/issues", IssueCodec(), id_field="id")
CLAIMS = Family("jit/claims", StructCodec(ClaimRecord), id_field="issue_id")
DEPENDENTS = Family("jit/dependents", OpenCodec(Dependents), id_field="issue_id")


def _sealed(view: View, loose: Sequence[IssueEvent]) -> list[Append]:
    return [Append(EVENTS, each) for each in loose]


EVENTS = Stream("jit/events", IssueEventCodec(), chain=_sealed)
