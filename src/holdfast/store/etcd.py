"""The store on etcd: `etcd://host:port,host:port/prefix`.

A commit is one etcd transaction: if every document still has the revision that was fetched, and every stream
still ends where it did, it writes everything, with the commit's id and time. Commit point: etcd's commit. A fetch
is one transaction too, so it sees one revision. It is always linearizable, never *serializable* (etcd's word for
reads that may be stale). See `served` for the protocol around these transactions.

    <prefix>/d/<name>              a document
    <prefix>/s/<stream>/<number>   a record of a stream; numbers have no gaps, but the first ones may be archived
    <prefix>/s/<stream>/~<place>   a loose record of a stream
    <prefix>/s/<stream>/~          stops clients that know only version 1 of this schema
    <prefix>/h/<stream>            the head of a stream: the number of its last record, and a copy of it unless large
    <prefix>/q/<place>             an issue that is free, in the order of the queue; its value is the assignee, if any
    <prefix>/x/<instant>/<issue>   when the claim of an issue expires
    <prefix>/c/<id>                a commit that was made or ruled out; forgotten after some days
    <prefix>/clock                 the time of the last commit (see `etcd_gateway.ServerTime`)
    <prefix>/schema                the version of this schema
    <prefix>/moved                 the address of the store that has the records now; blocks commits to this one
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import Failure, StoreMoved, StoreUnavailable, UsageFailure
from holdfast.locks.retry import CHANCE
from holdfast.store import served
from holdfast.store.addresses import EtcdAddress
from holdfast.store.etcd_gateway import (
    ALARMS,
    MISUNDERSTOOD,
    NOT_ETCD,
    Gateway,
    GatewayError,
    Messages,
    NotSent,
    decoded,
    encoded,
    end_of,
    understanding,
)
from holdfast.store.model import Family, ServerSpace, ServerVersion, Stream, Watch, Watched
from holdfast.store.served import (
    Attempt,
    CommitPlan,
    Fate,
    Fetched,
    LooseRecord,
    Named,
    Picked,
    ServedChanges,
    ServedStore,
    StoredValue,
)

SCHEMA_VERSION = 4  # has a queue; the first claim gives a store one
FIRST_WITH_HEADS, FIRST_WITH_ARCHIVES = 2, 3  # the first append, or archive, upgrades a store
_FORGET_EVERY = 1000
_FORGET_AFTER = 7 * 86400.0
_LOOK_AT = 4 * _FORGET_EVERY  # notes
_DIGITS = 20  # in the number of a record
_LARGEST_COPY = 64 << 10  # bytes of a record in the head; etcd limits the size of a commit
_MOST_RANGES = 100
_DEFAULT_OPERATIONS = 128  # in a transaction, unless etcd was started with another `--max-txn-ops`
_ENOUGH_OPERATIONS = 8192  # from here on, etcd itself may refuse
_OTHER_OPERATIONS = 8  # of a commit: its id and time, the heads of streams, the version of the schema
_MOST_STREAMS = 90  # streams whose heads are fetched, all in the first request, which is not pinned to a revision
_RECONNECT_AFTER = 20.0  # a watch that has received nothing for this long reconnects: the connection may be dead

_SPREAD = 8  # places in the queue for each of those who claim at once: so seven of eight attempts meet nobody
_LEAST, _WIDEST = 16, 512  # places
_MOST_EXPIRED = 16
_MOST_STALE = 8

_MADE, _RULED_OUT = "made", "ruled out"
_QUOTA, _COMPACTED = "etcd_server_quota_backend_bytes", "etcd_debugging_mvcc_compact_revision"  # metrics of etcd


class EtcdEngine:
    """Requests to etcd."""

    most_sealed = 40  # etcd limits the operations in a commit, and each needs two
    skew = 1.5

    def __init__(self, url: str, *, timeout: float = served.TIMEOUT, create: bool = True) -> None:
        address = EtcdAddress.parse(url)
        self._create = create
        self.address = address.display
        self.gateway = Gateway(address, timeout=timeout)
        self.keys = Keys(address.prefix)
        self._checked = False
        self._accepted, self._is_at_limit = _DEFAULT_OPERATIONS, False  # as far as it was needed to find out
        self._upgrades = False  # whether the store has the first version
        self._has_queue = False  # as far as this process knows
        self._least = _LEAST  # places that a pick reads
        self._width = _SPREAD  # candidates at the front of the queue; more after a lost attempt

    @property
    def version(self) -> ServerVersion | None:
        return self.gateway.server

    def fetch(self, named: Sequence[Named]) -> Fetched:
        first = [self.keys.clock] if self._checked else [self.keys.clock, self.keys.schema]
        streams = [each for each in named if isinstance(each, Stream)]
        ordered: list[Named] = [*streams, *(each for each in named if not isinstance(each, Stream))]
        requests = [_get(key) for key in first]
        requests += [self._end(each.name) for each in streams[:_MOST_STREAMS]]
        requests += [
            _last(self.keys.records(each.name), below=self.keys.stop(each.name)) for each in streams[_MOST_STREAMS:]
        ]
        requests += [_get(self.keys.document(each.name)) for each in ordered[len(streams) :]]
        with understanding(self.address):
            clock, *rows = self._ranges(requests)
            if len(first) > 1:
                self._check_schema(rows.pop(0))
            found = {each.name: self._found(each, rows[0]) for each, rows in zip(ordered, rows, strict=True) if rows}
            found |= self._large_records({name: each for name, each in found.items() if each.content == b""})
            last_commit_at = float(decoded(clock[0]["value"])) if clock else 0.0
        return Fetched(found, self.gateway.time.now(last_commit_at))

    def _large_records(self, ends: Mapping[str, StoredValue]) -> dict[str, StoredValue]:
        """The ends of streams whose head has no copy of the last record. A later read is safe: records never change."""
        ends = {name: each for name, each in ends.items() if each.position}
        rows = self._ranges([_get(self.keys.record(name, each.position)) for name, each in ends.items()])
        return {
            name: each._replace(content=_value(found[0]))
            for (name, each), found in zip(ends.items(), rows, strict=True)
        }

    def _end(self, stream: str) -> dict[str, Any]:
        """The request for the head of a stream or, without one, its last record (etcd then visits all records)."""
        head = self.keys.head(stream)
        last = _last(self.keys.records(stream), below=self.keys.stop(stream))
        return {"request_txn": {"compare": [_is_absent(head)], "success": [last], "failure": [_get(head)]}}

    def _found(self, what: Named, row: Any) -> StoredValue:
        """The value in a row. The end of a stream has the version of its head, or none if it has no head."""
        content = _value(row)
        if not isinstance(what, Stream):
            return StoredValue(row["mod_revision"], content)
        if _key(row) != self.keys.head(what.name):
            return StoredValue(content=content, position=_number(row))
        return StoredValue(row["mod_revision"], content[_DIGITS:], int(content[:_DIGITS]))

    def _ranges(self, requests: list[dict[str, Any]]) -> list[list[Any]]:
        """The rows of several ranges, as of one revision; etcd limits the number of ranges in a request."""
        rows: list[list[Any]] = []
        for start in range(0, len(requests), _MOST_RANGES):
            answer = self.gateway.ask("/v3/kv/txn", {"success": requests[start : start + _MOST_RANGES]})
            for each in answer["responses"]:
                inner = each["response_txn"]["responses"][0] if "response_txn" in each else each
                rows.append(inner["response_range"].get("kvs", []))
            if start == 0:
                for each in requests[_MOST_RANGES:]:
                    each["request_range"]["revision"] = answer["header"]["revision"]
        return rows

    def _check_schema(self, rows: Sequence[Any]) -> None:
        """Refuse an unknown schema version; the first client of a new store records the version."""
        row = rows[0] if rows else None
        if row is None and self._create:
            row = self._put_if_absent(self.keys.schema, str(SCHEMA_VERSION).encode())
            self._has_queue = row is None
        if row is not None or not self._create:
            found = None if row is None else decoded(row["value"]).decode()
            served.require_version(self.address, found, SCHEMA_VERSION, oldest=1)
            self._upgrades, self._has_queue = found == "1", self._has_queue or found == str(SCHEMA_VERSION)
        self._checked = True

    @contextlib.contextmanager
    def attempt(self, named: Sequence[Named], *, in_turn: bool) -> Iterator[Attempt]:
        yield Attempt(self.fetch(named), self.commit)

    @contextlib.contextmanager
    def pick(self, assignee: str, skew: float) -> Iterator[Picked | None]:
        if not self._checked:
            self.fetch([])
        if not self._has_queue:
            self._build_queue()
        with understanding(self.address):
            picked = None
            for _ in range(_MOST_STALE if self._has_queue else 0):
                with contextlib.suppress(_Stale):
                    picked = self._pick(served.as_assigned(assignee), skew)
                    break
        yield picked

    def _pick(self, own: bytes, skew: float) -> Picked | None:
        """Pick at random among the first issues of the first priority: eight for each claim in progress, whose holder
        may be about to claim another."""
        now, place = self.gateway.time.now(), CHANCE.randrange(self._width)
        queue, expiries = self.keys.queue, self.keys.expiries
        requests = [
            {
                "key": encoded(queue),
                "range_end": encoded(end_of(queue)),
                "limit": (limit := max(place + 1, self._least)),
            },
            {"key": encoded(expiries), "range_end": encoded(end_of(expiries)), "count_only": True},
            {
                "key": encoded(expiries),
                "range_end": encoded(expiries + format_instant(now - skew).encode()),
                "limit": _MOST_EXPIRED + 1,
            },
        ]
        answer = self.gateway.ask("/v3/kv/txn", {"success": [{"request_range": each} for each in requests]})
        rows, claims, expired = (each["response_range"] for each in answer["responses"])
        free = [row for row in rows.get("kvs", []) if _value(row) in (b"", own)]
        if not free and len(rows.get("kvs", ())) == limit < _WIDEST:
            self._least = _WIDEST  # many issues are assigned to others
            raise _Stale
        late = [_key(row).rpartition(b"/")[2].decode() for row in expired.get("kvs", [])]
        if not free or len(late) > _MOST_EXPIRED or _rank(free[0]) == b"0":
            return None
        front = [row for row in free if _rank(row) == _rank(free[0])]
        others = int(claims.get("count", 0))
        chosen = front[0 if not others else place if place < len(front) else CHANCE.randrange(len(front))]
        issue = _key(chosen).rpartition(b"/")[2].decode()
        names = [served.ISSUES + issue, served.CLAIMS + issue, *(served.ISSUES + each for each in late)]
        clock, *found = self._ranges([_get(self.keys.clock), *(_get(self.keys.document(each)) for each in names)])
        values = {
            name: StoredValue(row["mod_revision"], _value(row))
            for name, rows in zip(names, found, strict=True)
            for row in rows
        }
        fetched = Fetched(values, self.gateway.time.now(float(_value(clock[0])) if clock else 0.0))
        value = fetched.of(names[0])
        if self._queued(names[0], value.content) != (_key(chosen), _value(chosen)):
            self._remove_stale(chosen, names[0], value)
            raise _Stale
        for name in names[2:]:
            queued = served.queued(name, fetched.of(name).content, served.IN_PROGRESS)
            if queued is not None and self.keys.queue + queued[0] < _key(chosen):
                return None  # the client decides which is first
        self._width = min(max(_SPREAD, _SPREAD * others), _WIDEST)
        return Picked(issue, Attempt(fetched, self._commit_picked), self.fetch)

    def _commit_picked(self, plan: CommitPlan) -> bool:
        made = self.commit(plan)
        if not made:
            self._width = min(_SPREAD * self._width, _WIDEST)
        return made

    def _queued(self, name: str, content: bytes | None) -> tuple[bytes, bytes] | None:
        """The key and value that a document has in the queue, or among the expiries of claims."""
        found = served.queued(name, content)
        if found is None:
            return None
        return (self.keys.queue if name.startswith(served.ISSUES) else self.keys.expiries) + found[0], found[1]

    def _queue_changes(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        for name, content in plan.puts.items():
            before, after = self._queued(name, plan.fetched.of(name).content), self._queued(name, content)
            if before is not None and (after is None or before[0] != after[0]):
                yield {"request_delete_range": {"key": encoded(before[0])}}
            if after is not None and before != after:
                yield _put(*after)

    def _remove_stale(self, chosen: Any, name: str, value: StoredValue) -> None:
        """Remove a place that the issue no longer has: a client of an older version has changed the issue."""
        unchanged = _is_at(self.keys.document(name), value.version)
        self.gateway.ask("/v3/kv/txn", {"compare": [unchanged], "success": [_delete(_key(chosen))]})

    def _build_queue(self) -> None:
        """Give a store of an older version a queue: enter all issues and claims, each unless it changes meanwhile,
        since commits of this version change the queue of any store."""
        with understanding(self.address):
            (rows,) = self._ranges([_get(self.keys.schema)])
            version = _value(rows[0]).decode() if rows else ""
            if version in (str(FIRST_WITH_HEADS), str(FIRST_WITH_ARCHIVES)):
                for family in (served.ISSUES, served.CLAIMS):
                    self._enter_all(family)
                self.gateway.ask("/v3/kv/txn", {"success": [self._upgrade(SCHEMA_VERSION)]})
                version = str(SCHEMA_VERSION)
            self._has_queue = version == str(SCHEMA_VERSION)

    def _enter_all(self, family: str) -> None:
        last = ""
        while found := self.page(family.rstrip("/"), last, _MOST_RANGES // 2):
            queued = {name: self._queued(family + name, value.content) for name, value in found}
            entries = [
                {"compare": [_is_at(self.keys.document(family + name), value.version)], "success": [_put(*each)]}
                for name, value in found
                if (each := queued[name]) is not None
            ]
            self.gateway.ask("/v3/kv/txn", {"success": [{"request_txn": each} for each in entries]})
            last = found[-1][0]

    def commit(self, plan: CommitPlan) -> bool:
        """Send the commit; False if something it depends on has changed."""
        note = {"outcome": _MADE, "at": plan.fetched.now}
        request = {
            "compare": [_is_absent(self.keys.commit(plan.id)), *self._conditions(plan)],
            "success": [
                *self._writes(plan),
                _put(self.keys.commit(plan.id), msgspec.json.encode(note)),
                _put(self.keys.clock, repr(plan.fetched.now).encode()),
            ],
            "failure": [_get(self.keys.commit(plan.id)), _get(self.keys.moved)],
        }
        answer = self._send(request)
        if not answer.get("succeeded"):
            try:
                taken, moved = (each["response_range"].get("kvs") for each in answer["responses"])
            except MISUNDERSTOOD as error:
                raise served.AnswerLost(NOT_ETCD) from error
            if taken:
                raise served.IdTaken
            if moved:
                raise StoreMoved(self.address, _value(moved[0]).decode())
            return False
        self._upgrades = self._upgrades and not plan.additions
        if CHANCE.randrange(_FORGET_EVERY) == 0:
            with contextlib.suppress(Failure):
                self._forget(plan.fetched.now)
        return True

    def _conditions(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        """The conditions that everything fetched is unchanged. A stream ends where it did if its head is unchanged. The
        next number must be free too, because clients of version 1 write no head; alone, it does not suffice, because
        archived records are deleted. Sealing is allowed even after the store was moved: it adds nothing new."""
        if not plan.sealed:
            yield _is_absent(self.keys.moved)
        for each in plan.named:
            found = plan.fetched.of(each.name)
            key = self.keys.document(each.name)
            if isinstance(each, Stream):
                key = self.keys.head(each.name)
                yield _is_absent(self.keys.record(each.name, found.position + 1))
            if found.version:
                yield _is_at(key, found.version)
            elif not found.position:
                yield _is_absent(key)
        for loose in plan.loose:  # the place is nearly always free, but a put would replace a record there
            yield _is_absent(self.keys.loose_record(loose.stream, loose.place))

    def _writes(self, plan: CommitPlan) -> Iterator[dict[str, Any]]:
        for name, content in plan.puts.items():
            key = self.keys.document(name)
            yield _delete(key) if content is None else _put(key, content)
        yield from self._queue_changes(plan)
        for each in plan.additions:
            yield _put(self.keys.record(each.stream, each.position), each.content)
        for each in {each.stream: each for each in plan.additions}.values():
            copy = each.content if len(each.content) <= _LARGEST_COPY else b""
            yield _put(self.keys.head(each.stream), b"%0*d" % (_DIGITS, each.position) + copy)
            if not plan.fetched.of(each.stream).version:  # its first head
                yield _put(self.keys.stop(each.stream), b"This store needs a newer version of Holdfast.")
        for loose in plan.loose:
            yield _put(self.keys.loose_record(loose.stream, loose.place), loose.content)
        for loose in plan.sealed:
            yield _delete(self.keys.loose_record(loose.stream, loose.place))
        if plan.additions and self._upgrades:
            yield self._upgrade(FIRST_WITH_HEADS)

    def _send(self, request: object) -> Any:
        with self.gateway.deadline.within(self.gateway.timeout) as deadline:
            while True:
                try:
                    return self._send_once(request)
                except NotSent as error:  # so it may be sent again
                    if time.monotonic() >= deadline:
                        raise StoreUnavailable(self.address, error) from error
                    time.sleep(CHANCE.random() * 0.1)

    def _send_once(self, request: object) -> Any:
        try:
            return self.gateway.ask_once("/v3/kv/txn", request)
        except GatewayError as error:
            if error.nothing_happened:
                raise self.gateway.failure(error) from error
            raise served.AnswerLost(str(error)) from error
        except (OSError, HTTPException) as error:
            raise served.AnswerLost(str(error) or type(error).__name__) from error

    def fate_of(self, commit_id: str) -> Fate:
        note = {"outcome": _RULED_OUT, "at": self.gateway.time.now()}
        key, patience = self.keys.commit(commit_id), 3 * self.gateway.timeout
        with understanding(self.address):
            row = self._put_if_absent(key, msgspec.json.encode(note), patience=patience)
            if row is None:
                return Fate.RULED_OUT_NOW
            made = msgspec.json.decode(decoded(row["value"]))["outcome"] == _MADE
            return Fate.MADE if made else Fate.RULED_OUT

    def _put_if_absent(self, key: bytes, value: bytes, *, patience: float | None = None) -> Any:
        """Create a key and return None, or return the existing row."""
        request = {"compare": [_is_absent(key)], "success": [_put(key, value)], "failure": [_get(key)]}
        answer = self.gateway.ask("/v3/kv/txn", request, patience=patience)
        return None if answer.get("succeeded") else answer["responses"][0]["response_range"]["kvs"][0]

    def _forget(self, now: float) -> None:
        """Remove the old notes of commits in a range of ids that starts at random. Finding the oldest notes would visit
        all of them; this way, in the long run, a quarter of the notes are old ones."""
        first, end = self.keys.commit(""), end_of(self.keys.commit(""))
        middle = self.keys.commit(f"{CHANCE.randrange(1 << 32):08x}")
        notes = self._range(middle, end, _LOOK_AT)
        notes += self._range(first, middle, _LOOK_AT - len(notes)) if len(notes) < _LOOK_AT else []
        old = [row["key"] for row in notes if now - msgspec.json.decode(_value(row))["at"] > _FORGET_AFTER]
        for start in range(0, len(old), _MOST_RANGES):
            some = [{"request_delete_range": {"key": key}} for key in old[start : start + _MOST_RANGES]]
            self.gateway.ask("/v3/kv/txn", {"success": some})

    def bury(self, stream: str, position: int, tombstone: bytes) -> None:
        key = self.keys.record(stream, position)
        there = {"key": encoded(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}
        changes = [self._upgrade(FIRST_WITH_ARCHIVES), _put(key, tombstone)]
        self.gateway.ask("/v3/kv/txn", {"compare": [there], "success": changes})

    def _upgrade(self, version: int) -> dict[str, Any]:
        """The operation that gives the store this version, if it has a lower one."""
        lower = {
            "key": encoded(self.keys.schema),
            "target": "VALUE",
            "result": "LESS",
            "value": encoded(b"%d" % version),
        }
        return {"request_txn": {"compare": [lower], "success": [_put(self.keys.schema, b"%d" % version)]}}

    def drop_records(self, stream: str, first: int, last: int) -> None:
        bounds = {
            "key": encoded(self.keys.record(stream, first)),
            "range_end": encoded(self.keys.record(stream, last + 1)),
        }
        self.gateway.ask("/v3/kv/txn", {"success": [{"request_delete_range": bounds}]})

    def loose_records(self, stream: str, limit: int) -> list[LooseRecord]:
        first = self.keys.loose_record(stream, 0)
        order = {"limit": limit, "sort_order": "ASCEND", "sort_target": "CREATE"}  # that of the commits
        request = {"key": encoded(first), "range_end": encoded(end_of(self.keys.stop(stream))), **order}
        with understanding(self.address):
            rows = self.gateway.ask("/v3/kv/range", request).get("kvs", [])
            return [LooseRecord(stream, int(_key(row).rpartition(b"~")[2]), _value(row)) for row in rows]

    def set_moved(self, target: str | None) -> None:
        key = self.keys.moved
        change = _delete(key) if target is None else _put(key, target.encode())
        self.gateway.ask("/v3/kv/txn", {"success": [change]})

    def moved_to(self) -> str | None:
        with understanding(self.address):
            (rows,) = self._ranges([_get(self.keys.moved)])
            return _value(rows[0]).decode() if rows else None

    def page(self, family: str, after: str, limit: int) -> list[tuple[str, StoredValue]]:
        start = self.keys.document(f"{family}/")
        with understanding(self.address):
            rows = self._range(start + after.encode() + (b"\0" if after else b""), end_of(start), limit)
            return [(_key(row)[len(start) :].decode(), StoredValue(row["mod_revision"], _value(row))) for row in rows]

    def cursor(self) -> bytes:
        """The revision of the last commit and the time that it wrote to the clock, which differs in another history."""
        with understanding(self.address):
            (rows,) = self._ranges([_get(self.keys.clock)])
            return _cursor(rows[0]) if rows else b""

    def changes(self, family: str, cursor: bytes) -> ServedChanges | None:
        """Every commit changes the clock. If the clock is unchanged, nothing has changed; otherwise, read the history
        from the cursor up to the clock's current revision. None if etcd has compacted that history."""
        with understanding(self.address):
            (rows,) = self._ranges([_get(self.keys.clock)])
            if not rows:
                return None
            now = self.gateway.time.now(float(_value(rows[0])))
            if _cursor(rows[0]) == cursor:
                return ServedChanges(cursor, {}, now)
            first, _, _ = cursor.decode("ascii", "replace").partition(" ")
            last = int(rows[0]["mod_revision"])
            if not first.isdecimal() or int(first) >= last:
                return None
            try:
                events = self._history(int(first), last)
            except (OSError, HTTPException, NotSent):
                return None  # reading everything may still work, or tells why not
        clocks = [each["kv"] for each in events if _key(each["kv"]) == self.keys.clock]
        if not clocks or _cursor(clocks[0]) != cursor:
            return None
        start, found = self.keys.document(f"{family}/"), dict[str, StoredValue]()
        for each in events:
            row = each["kv"]
            if _key(row).startswith(start) and row["mod_revision"] != first:
                gone = each.get("type") == "DELETE"
                value = StoredValue(row["mod_revision"], None if gone else _value(row))
                found[_key(row)[len(start) :].decode()] = value
        return ServedChanges(_cursor(clocks[-1]), found, now)

    def _history(self, first: int, last: int) -> list[Any]:
        """The changes of documents and of the clock from `first` to `last` or a later revision; empty if etcd no longer
        has them. All changes of one revision come in one message."""
        events: list[Any] = []
        request = {
            "key": encoded(self.keys.clock),
            "range_end": encoded(end_of(self.keys.document(""))),
            "start_revision": str(first),
        }
        messages = Messages(self.gateway, "/v3/watch", {"create_request": request})
        deadline = time.monotonic() + self.gateway.timeout
        try:
            while not events or int(events[-1]["kv"]["mod_revision"]) < last:
                if time.monotonic() > deadline:
                    raise TimeoutError("etcd does not send the history")
                for message in messages.wait(self.gateway.timeout):
                    result = message["result"]
                    if result.get("canceled"):
                        return []
                    events += result.get("events", [])
        finally:
            messages.close()
        return events

    def page_of_stream(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        if limit <= 0:
            return []
        with understanding(self.address):
            rows = self._range(self.keys.record(stream, after + 1), self.keys.stop(stream), limit)
            return [(_number(row), _value(row)) for row in rows]

    def _range(self, start: bytes, end: bytes, limit: int) -> list[Any]:
        request = {"key": encoded(start), "range_end": encoded(end), "limit": limit}
        found: list[Any] = self.gateway.ask("/v3/kv/range", request).get("kvs", [])
        return found

    def watch(self, what: Watched) -> EtcdWatch:
        return EtcdWatch(self.gateway, self.keys, what)

    def now(self) -> float:
        return self.fetch([]).now

    def exceeded_limit(self, changes: int) -> int | None:
        while changes > (limit := self._accepted - _OTHER_OPERATIONS) and self._accepted < _ENOUGH_OPERATIONS:
            if self._is_at_limit or not self._takes(2 * self._accepted):
                self._is_at_limit = True
                return limit
            self._accepted *= 2
        return None

    def places(self, plan: CommitPlan) -> int:
        return sum(1 for _ in self._queue_changes(plan))

    def _takes(self, operations: int) -> bool:
        """Whether etcd accepts so many operations in one transaction: comparisons that do nothing."""
        try:
            self.gateway.ask("/v3/kv/txn", {"compare": [_is_absent(self.keys.clock)] * operations})
        except UsageFailure:
            return False
        return True

    def space(self) -> ServerSpace:
        with understanding(self.address):
            status = self.gateway.ask("/v3/maintenance/status", {})
            alarms = self.gateway.ask(ALARMS, {"action": "GET"}).get("alarms", [])
            quota, compacted = self.gateway.metrics(_QUOTA, _COMPACTED)
            limit = int(status.get("dbSizeQuota", 0)) or quota
            names = sorted({str(each["alarm"]) for each in alarms})
            size, in_use = int(status.get("dbSize", 0)), int(status.get("dbSizeInUse", 0))
            revision = int(status["header"]["revision"])
            return ServerSpace(size, limit, tuple(names), in_use, revision, max(0, compacted))

    def close(self) -> None:
        self.gateway.close()


class _Stale(Exception):
    """The issue no longer has its place in the queue, or more places must be read: pick again."""


class EtcdStore(ServedStore):
    """Documents and streams below one prefix of an etcd cluster."""

    def __init__(
        self, url: str, *, timeout: float = served.TIMEOUT, patience: float = served.PATIENCE, create: bool = True
    ) -> None:
        """`create` records the schema version if it is missing; without it, a missing store raises `NotFound`."""
        super().__init__(EtcdEngine(url, timeout=timeout, create=create), patience=patience)


class EtcdWatch(Watch):
    """A watch of one document, family or stream, on a separate connection."""

    def __init__(self, gateway: Gateway, keys: Keys, what: Watched) -> None:
        self._gateway = gateway
        self._keys = keys
        if isinstance(what, Stream):
            self._request = _prefix(keys.records(what.name))
        elif isinstance(what, Family):
            self._request = _prefix(keys.document(f"{what.name}/"))
        else:
            self._request = {"key": encoded(keys.document(what.name))}
        self._single = what.name if "range_end" not in self._request else None
        self._next_revision = 1 + self._revision()
        self._messages: Messages | None = None
        self._heard_at = 0.0
        self._away_since = 0.0

    def wait(self, timeout: float | None = None) -> frozenset[str]:
        self._away_since = 0.0
        return super().wait(timeout)

    def close(self) -> None:
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def _next(self, left: float | None) -> set[str]:
        left = _RECONNECT_AFTER if left is None else min(left, _RECONNECT_AFTER)
        try:
            changed = self._receive(left)
            self._away_since = 0.0
        except (OSError, HTTPException, NotSent, *MISUNDERSTOOD) as error:
            self.close()
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > self._gateway.timeout:
                raise StoreUnavailable(self._gateway.address.display, error) from error
            time.sleep(min(left, 0.02 + CHANCE.random() * 0.08))
            changed = set()
        return changed

    def _receive(self, left: float) -> set[str]:
        if self._messages is None:
            create = {**self._request, "start_revision": str(self._next_revision), "progress_notify": True}
            self._messages = Messages(self._gateway, "/v3/watch", {"create_request": create})
            self._heard_at = time.monotonic()
        changed: set[str] = set()
        for message in self._messages.wait(left):
            self._heard_at = time.monotonic()
            changed |= self._changed(message)
        if time.monotonic() - self._heard_at >= _RECONNECT_AFTER:
            self.close()
        return changed

    def _changed(self, message: Any) -> set[str]:
        result = message.get("result")
        if result is None:
            raise ConnectionError(f"etcd has ended the watch: {message.get('error')}")
        if result.get("canceled"):
            return self._start_over(result)
        changed: set[str] = set()
        for event in result.get("events", []):
            self._next_revision = max(self._next_revision, int(event["kv"]["mod_revision"]) + 1)
            changed.add(self._keys.name_of(_key(event["kv"])))
        return changed

    def _start_over(self, result: Any) -> set[str]:
        """Continue after etcd has compacted the revisions since the last message: everything may have changed."""
        if not int(result.get("compact_revision", 0)):
            raise ConnectionError(f"etcd has ended the watch: {result.get('cancel_reason')}")
        self.close()
        self._next_revision = 1 + self._revision()
        if self._single is not None:
            return {self._single}
        rows = self._gateway.ask("/v3/kv/range", {**self._request, "keys_only": True}).get("kvs", [])
        return {self._keys.name_of(_key(row)) for row in rows}

    def _revision(self) -> int:
        """The current revision; later commits are reported."""
        answer = self._gateway.ask("/v3/kv/range", {"key": encoded(self._keys.clock), "count_only": True})
        with understanding(self._gateway.address.display):
            return int(answer["header"]["revision"])


class Keys:
    """The keys of a store, below its prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self.clock = self._prefix + b"/clock"
        self.schema = self._prefix + b"/schema"
        self.moved = self._prefix + b"/moved"
        self.queue = self._prefix + b"/q/"
        self.expiries = self._prefix + b"/x/"

    def document(self, name: str) -> bytes:
        return self._prefix + b"/d/" + name.encode()

    def records(self, stream: str) -> bytes:
        """The prefix of all records of a stream."""
        return self._prefix + b"/s/" + stream.encode() + b"/"

    def stop(self, stream: str) -> bytes:
        """A key after all records, without a number: clients of version 1, which read the last record, fail here."""
        return self.records(stream) + b"~"

    def loose_record(self, stream: str, place: int) -> bytes:
        """The key of a record that is not sealed yet; follows the sealed ones, and watchers of the stream see it."""
        return self.stop(stream) + b"%0*d" % (_DIGITS, place)

    def head(self, stream: str) -> bytes:
        return self._prefix + b"/h/" + stream.encode()

    def record(self, stream: str, position: int) -> bytes:
        return self.records(stream) + b"%0*d" % (_DIGITS, position)

    def commit(self, commit_id: str) -> bytes:
        return self._prefix + b"/c/" + commit_id.encode()

    def name_of(self, key: bytes) -> str:
        """The document or stream that a key belongs to."""
        kind, _, rest = key[len(self._prefix) + 1 :].partition(b"/")
        return (rest if kind == b"d" else rest.rpartition(b"/")[0]).decode()


def _cursor(clock: Any) -> bytes:
    return f"{clock['mod_revision']} ".encode() + _value(clock)


def _key(row: Any) -> bytes:
    return decoded(row["key"])


def _value(row: Any) -> bytes:
    return decoded(row.get("value", ""))


def _number(row: Any) -> int:
    return int(_key(row).rpartition(b"/")[2])


def _prefix(prefix: bytes) -> dict[str, Any]:
    return {"key": encoded(prefix), "range_end": encoded(end_of(prefix))}


def _get(key: bytes) -> dict[str, Any]:
    return {"request_range": {"key": encoded(key)}}


def _last(start: bytes, *, below: bytes) -> dict[str, Any]:
    order = {"limit": 1, "sort_order": "DESCEND", "sort_target": "KEY"}
    return {"request_range": {"key": encoded(start), "range_end": encoded(below), **order}}


def _delete(key: bytes) -> dict[str, Any]:
    return {"request_delete_range": {"key": encoded(key)}}


def _is_at(key: bytes, revision: str) -> dict[str, Any]:
    return {"key": encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision or "0"}


def _rank(row: Any) -> bytes:
    """The rank in the place of an issue."""
    return _key(row).rsplit(b"/", 4)[1]


def _put(key: bytes, value: bytes) -> dict[str, Any]:
    return {"request_put": {"key": encoded(key), "value": encoded(value)}}


def _is_absent(key: bytes) -> dict[str, Any]:
    return {"key": encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
