"""The store on etcd: `etcd://host:port,host:port/prefix`.

A commit is one transaction of etcd: if every document still has the revision that it was fetched with, and
every stream still ends where it did, everything is written, with the commit's id and time. Commit point:
etcd's. Reading is one transaction too, so it sees one revision; it is always a linearizable one, never a
*serializable* one, which may be old. See `served` for the protocol around it.

    <prefix>/d/<name>              a document
    <prefix>/s/<stream>/<number>   a record of a stream; the numbers have no gaps
    <prefix>/c/<id>                a commit that was made, or ruled out; forgotten after some days
    <prefix>/clock                 the time of the last commit (see `etcd_clock`)
    <prefix>/schema                the version of this layout
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any, Protocol, Self

import msgspec

from holdfast.errors import Failure, NotFound, StoreIncompatible, StoreUnavailable
from holdfast.locks.retry import CHANCE
from holdfast.store.etcd_gateway import (
    TIMEOUT,
    EtcdAddress,
    Gateway,
    GatewayError,
    Messages,
    NotSent,
    coded,
    end_of,
    plain,
)
from holdfast.store.layout import Layout
from holdfast.store.model import Family, Stream, Watched
from holdfast.store.served import (
    PATIENCE,
    AnswerLost,
    CommitPlan,
    Fate,
    Fetched,
    IdTaken,
    Named,
    ServedStore,
    StoredValue,
)

ASK_AGAIN = 20.0
"""If etcd has said nothing for this long, the watch is made anew: the line may be dead."""


class _Keys(Protocol):
    clock: bytes

    def document(self, name: str) -> bytes: ...

    def records(self, stream: str) -> bytes: ...

    def name_of(self, key: bytes) -> str: ...


class EtcdWatch:
    """A watch of one document, family or stream, on a connection of its own."""

    def __init__(self, gateway: Gateway, keys: _Keys, what: Watched) -> None:
        self._gateway = gateway
        self._keys = keys
        self._name = what.name
        if isinstance(what, Stream):
            start = keys.records(what.name)
        else:
            start = keys.document(f"{what.name}/" if isinstance(what, Family) else what.name)
        self._request: dict[str, Any] = {"key": coded(start)}
        if isinstance(what, Family | Stream):
            self._request["range_end"] = coded(end_of(start))
        self._next = 1 + self._revision()
        self._messages: Messages | None = None
        self._heard_at = 0.0

    def wait(self, timeout: float | None = None) -> frozenset[str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        trouble = 0.0
        while True:
            left = ASK_AGAIN if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                changed = self._hear(min(left, ASK_AGAIN))
                trouble = 0.0
            except (OSError, HTTPException, NotSent) as error:
                self.close()
                trouble = trouble or time.monotonic()
                if time.monotonic() - trouble > self._gateway.timeout:
                    raise StoreUnavailable(self._gateway.address.place, error) from error
                time.sleep(min(left, 0.02 + CHANCE.random() * 0.08))
                changed = set()
            if changed or (deadline is not None and time.monotonic() >= deadline):
                return frozenset(changed)

    def close(self) -> None:
        """Stop watching."""
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _hear(self, left: float) -> set[str]:
        if self._messages is None:
            create = {**self._request, "start_revision": str(self._next), "progress_notify": True}
            self._messages = Messages(self._gateway, "/v3/watch", {"create_request": create})
            self._heard_at = time.monotonic()
        changed: set[str] = set()
        for message in self._messages.wait(left):
            self._heard_at = time.monotonic()
            changed |= self._told(message)
        if time.monotonic() - self._heard_at >= ASK_AGAIN:
            self.close()
        return changed

    def _told(self, message: Any) -> set[str]:
        result = message.get("result")
        if result is None:
            raise ConnectionError(f"etcd has ended the watch: {message.get('error')}")
        if result.get("canceled"):
            return self._start_over(result)
        changed: set[str] = set()
        for event in result.get("events", []):
            self._next = max(self._next, int(event["kv"]["mod_revision"]) + 1)
            changed.add(self._keys.name_of(plain(event["kv"]["key"])))
        return changed

    def _start_over(self, result: Any) -> set[str]:
        """The revisions since we last heard are forgotten: whatever is there may have changed."""
        if not int(result.get("compact_revision", 0)):
            raise ConnectionError(f"etcd has ended the watch: {result.get('cancel_reason')}")
        self.close()
        self._next = 1 + self._revision()
        rows = self._gateway.ask("/v3/kv/range", {**self._request, "keys_only": True}).get("kvs", [])
        return {self._name} & {self._name_if_single()} | {
            self._keys.name_of(plain(row["key"])) for row in rows
        }

    def _name_if_single(self) -> str:
        """A document that was watched alone may have been removed: it is named all the same."""
        return "" if "range_end" in self._request else self._name

    def _revision(self) -> int:
        """The revision of now; what is committed later is reported."""
        answer = self._gateway.ask("/v3/kv/range", {"key": coded(self._keys.clock), "count_only": True})
        return int(answer["header"]["revision"])


SCHEMA_VERSION = 1
_FORGET_EVERY = 1000
_MOST_RANGES = 100
_FORGET_AFTER = 7 * 86400.0
_MADE, _RULED_OUT = "made", "ruled out"


class EtcdStore(ServedStore):
    """Documents and streams below one prefix of an etcd cluster."""

    def __init__(
        self,
        url: str,
        *,
        layout: Layout | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        create: bool = True,
    ) -> None:
        """`create` leaves the version of the layout there if it is not; without it, that is `NotFound`."""
        super().__init__(EtcdEngine(url, timeout=timeout, create=create), layout=layout, patience=patience)


class EtcdAttempt:
    """One try."""

    def __init__(self, engine: EtcdEngine, fetched: Fetched) -> None:
        self.fetched = fetched
        self._engine = engine

    def commit(self, plan: CommitPlan) -> bool:
        return self._engine.commit(plan)


class EtcdEngine:
    """How etcd is asked."""

    skew = 1.5

    def __init__(self, url: str, *, timeout: float = TIMEOUT, create: bool = True) -> None:
        address = EtcdAddress.parse(url)
        self._create = create
        self.place = address.place
        self.gateway = Gateway(address, timeout=timeout)
        self.keys = Keys(address.prefix)
        self._checked = False

    def fetch(self, named: Sequence[Named]) -> Fetched:
        first = [self.keys.clock] if self._checked else [self.keys.clock, self.keys.schema]
        asked = [_get(key) for key in first]
        asked += [
            _last(self.keys.records(each.name))
            if isinstance(each, Stream)
            else _get(self.keys.document(each.name))
            for each in named
        ]
        clock, *rows = self._ranges(asked)
        if len(first) > 1:
            self._check_schema(rows.pop(0))
        found = {each.name: _found(each, rows[0]) for each, rows in zip(named, rows, strict=True) if rows}
        left = float(plain(clock[0]["value"])) if clock else 0.0
        return Fetched(found, self.gateway.time.now(left))

    def _ranges(self, asked: list[dict[str, Any]]) -> list[list[Any]]:
        """The rows of several ranges, as of one revision; etcd takes only so many in one request."""
        rows: list[list[Any]] = []
        for start in range(0, len(asked), _MOST_RANGES):
            answer = self.gateway.ask("/v3/kv/txn", {"success": asked[start : start + _MOST_RANGES]})
            rows += [each["response_range"].get("kvs", []) for each in answer["responses"]]
            if start == 0:
                for each in asked[_MOST_RANGES:]:
                    each["request_range"]["revision"] = answer["header"]["revision"]
        return rows

    @contextlib.contextmanager
    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> Iterator[EtcdAttempt]:
        yield EtcdAttempt(self, self.fetch(named))

    def commit(self, plan: CommitPlan) -> bool:
        """Send the commit; whether what it rests on was still so."""
        note = {"outcome": _MADE, "at": plan.fetched.now}
        request = {
            "compare": [_is_absent(self.keys.commit(plan.id)), *self._conditions(plan)],
            "success": [
                *self._writes(plan),
                _put(self.keys.commit(plan.id), msgspec.json.encode(note)),
                _put(self.keys.clock, repr(plan.fetched.now).encode()),
            ],
            "failure": [_get(self.keys.commit(plan.id))],
        }
        answer = self._send(request)
        if not answer.get("succeeded"):
            if answer["responses"][0]["response_range"].get("kvs"):
                raise IdTaken
            return False
        if CHANCE.randrange(_FORGET_EVERY) == 0:
            with contextlib.suppress(Failure):
                self._forget(plan.fetched.now)
        return True

    def _send(self, request: object) -> Any:
        deadline = time.monotonic() + self.gateway.timeout
        while True:
            try:
                return self._send_once(request)
            except NotSent as error:  # so it may be sent again
                if time.monotonic() >= deadline:
                    raise StoreUnavailable(self.place, error) from error
                time.sleep(CHANCE.random() * 0.1)

    def _send_once(self, request: object) -> Any:
        try:
            return self.gateway.ask_once("/v3/kv/txn", request)
        except GatewayError as error:
            if error.nothing_happened:
                raise self.gateway.failure(error) from error
            raise AnswerLost(str(error)) from error
        except (OSError, HTTPException) as error:
            raise AnswerLost(str(error) or type(error).__name__) from error

    def _conditions(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        """What was fetched is still so. Records are never removed: a stream ends where it did if the next
        number is free."""
        for each in plan.named:
            found = plan.fetched.of(each.name)
            if isinstance(each, Stream):
                yield _is_absent(self.keys.record(each.name, found.position + 1))
            elif found.content is None:
                yield _is_absent(self.keys.document(each.name))
            else:
                yield _has_revision(self.keys.document(each.name), found.version)

    def _writes(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        for name, content in plan.puts.items():
            key = self.keys.document(name)
            yield _remove(key) if content is None else _put(key, content)
        for each in plan.additions:
            yield _put(self.keys.record(each.stream, each.position), each.content)

    def fate_of(self, commit_id: str) -> Fate:
        key = self.keys.commit(commit_id)
        note = {"outcome": _RULED_OUT, "at": self.gateway.time.now()}
        request = {
            "compare": [_is_absent(key)],
            "success": [_put(key, msgspec.json.encode(note))],
            "failure": [_get(key)],
        }
        answer = self.gateway.ask("/v3/kv/txn", request, patience=3 * self.gateway.timeout)
        if answer.get("succeeded"):
            return Fate.RULED_OUT_NOW
        (row,) = answer["responses"][0]["response_range"]["kvs"]
        made = msgspec.json.decode(plain(row["value"]))["outcome"] == _MADE
        return Fate.MADE if made else Fate.RULED_OUT

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        start = self.keys.document(f"{family}/")
        rows = self._range(start + after.encode() + (b"\0" if after else b""), end_of(start), limit)
        return [
            (
                plain(row["key"])[len(start) :].decode(),
                StoredValue(row["mod_revision"], plain(row.get("value", ""))),
            )
            for row in rows
        ]

    def page_of_stream(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        if limit <= 0:
            return []
        rows = self._range(self.keys.record(stream, after + 1), end_of(self.keys.records(stream)), limit)
        return [(_number(plain(row["key"])), plain(row.get("value", ""))) for row in rows]

    def _range(self, start: bytes, end: bytes, limit: int) -> list[Any]:
        request = {"key": coded(start), "range_end": coded(end), "limit": limit}
        found: list[Any] = self.gateway.ask("/v3/kv/range", request).get("kvs", [])
        return found

    def watch(self, what: Watched) -> EtcdWatch:
        return EtcdWatch(self.gateway, self.keys, what)

    def now(self) -> float:
        return self.fetch([]).now

    def close(self) -> None:
        self.gateway.close()

    def _check_schema(self, rows: Sequence[Any]) -> None:
        """Leave the version of the layout with the first one who asks, and refuse one that is not known."""
        found = plain(rows[0]["value"]).decode() if rows else None
        if found is None:
            if not self._create:
                raise NotFound(f"there is no store at {self.place} yet", store=self.place)
            request = {
                "compare": [_is_absent(self.keys.schema)],
                "success": [_put(self.keys.schema, str(SCHEMA_VERSION).encode())],
            }
            self.gateway.ask("/v3/kv/txn", request)
        elif found != str(SCHEMA_VERSION):
            raise StoreIncompatible(
                f"the store {self.place} has the schema version {found}; "
                f"this version of Holdfast knows {SCHEMA_VERSION}",
                store=self.place,
                found=found,
                known=SCHEMA_VERSION,
            )
        self._checked = True

    def _forget(self, now: float) -> None:
        """Remove the notes of commits that nobody can be in doubt about any more, oldest first."""
        start = self.keys.commit("")
        request = {
            "key": coded(start),
            "range_end": coded(end_of(start)),
            "limit": _FORGET_EVERY,
            "sort_order": "ASCEND",
            "sort_target": "MOD",
        }
        rows = self.gateway.ask("/v3/kv/range", request).get("kvs", [])
        for row in rows:
            if now - msgspec.json.decode(plain(row["value"]))["at"] > _FORGET_AFTER:
                self.gateway.ask("/v3/kv/deleterange", {"key": row["key"]})


class Keys:
    """Where things are, below the prefix of a store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self.clock = self._prefix + b"/clock"
        self.schema = self._prefix + b"/schema"

    def document(self, name: str) -> bytes:
        return self._prefix + b"/d/" + name.encode()

    def records(self, stream: str) -> bytes:
        """What all records of a stream begin with."""
        return self._prefix + b"/s/" + stream.encode() + b"/"

    def record(self, stream: str, position: int) -> bytes:
        return self.records(stream) + b"%020d" % position

    def commit(self, commit_id: str) -> bytes:
        return self._prefix + b"/c/" + commit_id.encode()

    def name_of(self, key: bytes) -> str:
        """The document or stream that a key belongs to."""
        kind, _, rest = key[len(self._prefix) + 1 :].partition(b"/")
        return (rest if kind == b"d" else rest.rpartition(b"/")[0]).decode()


def _found(what: Named, row: Any) -> StoredValue:
    content = plain(row.get("value", ""))
    if isinstance(what, Stream):
        return StoredValue(content=content, position=_number(plain(row["key"])))
    return StoredValue(row["mod_revision"], content)


def _number(key: bytes) -> int:
    return int(key.rpartition(b"/")[2])


def _get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": coded(key)}}


def _last(prefix: bytes) -> dict[str, Any]:
    return {
        "request_range": {
            "key": coded(prefix),
            "range_end": coded(end_of(prefix)),
            "limit": 1,
            "sort_order": "DESCEND",
            "sort_target": "KEY",
        }
    }


def _put(key: bytes, value: bytes) -> dict[str, Any]:
    return {"request_put": {"key": coded(key), "value": coded(value)}}


def _remove(key: bytes) -> dict[str, Any]:
    return {"request_delete_range": {"key": coded(key)}}


def _is_absent(key: bytes) -> dict[str, Any]:
    return {"key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def _has_revision(key: bytes, revision: str) -> dict[str, Any]:
    return {"key": coded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
