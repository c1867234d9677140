"""Noticing changes in etcd: its own watches, which go on at any revision after a connection was lost."""

from __future__ import annotations

import time
from http.client import HTTPException
from typing import Any, Protocol, Self

from holdfast.errors import StoreUnavailable
from holdfast.locks.retry import CHANCE
from holdfast.store.base import Watched
from holdfast.store.etcd_gateway import Gateway, Messages, NotSent, coded, end_of, plain
from holdfast.store.records import Family, Stream

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
