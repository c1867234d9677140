"""A store in memory: the model that the other stores are tested against, simple enough to verify by reading."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from holdfast.clock import SKEW, SYSTEM_CLOCK, Clock
from holdfast.errors import StoreMoved, UsageFailure
from holdfast.store import model
from holdfast.store.model import Decide, Document, Family, Key, Record, Result, Stream, View


class MemoryStore:
    """Documents and streams of one process, behind one lock. Records are stored encoded, as in other stores."""

    files = None
    skew = SKEW
    trouble = None
    server = None

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # reentrant: a decide function may read
        self._documents: dict[str, tuple[bytes, int]] = {}
        self._streams: dict[str, list[bytes]] = {}
        self._versions = 0
        self._id = uuid.uuid4().hex  # recognises cursors of other stores
        self._log: list[str] = []
        self._deciding = model.Deciding()
        self._moved_to: str | None = None

    def read(self, key: Key[Record]) -> Document[Record] | None:
        with self._changed:
            found = self._documents.get(key.name)
            return None if found is None else Document(key.codec.decode(found[0], key.name), str(found[1]))

    def read_together(self, keys: Sequence[Key[Any]]) -> View:
        with self._changed:
            return View({key: self.read(key) for key in keys})

    read_each = read_together

    def changes(self, family: Family[Record], cursor: bytes = b"") -> model.Changes[Record]:
        prefix = family.name + "/"
        store_id, _, seen = cursor.decode("ascii", "replace").partition(" ")
        with self._changed:
            is_whole = store_id != self._id
            names = list(self._documents) if is_whole else self._log[int(seen) :]
            members = sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
            found = {name: document for name in members if (document := self.read(family.key(name))) is not None}
            cursor = f"{self._id} {len(self._log)}".encode()
            return model.Changes(cursor, found, frozenset(members).difference(found), is_whole, self.now())

    def scan(self, family: Family[Record], *, after: str = "") -> Iterator[tuple[str, Document[Record]]]:
        prefix = family.name + "/"
        with self._changed:
            names = sorted(name.removeprefix(prefix) for name in self._documents if name.startswith(prefix))
        for name in (each for each in names if each > after):
            document = self.read(family.key(name))
            if document is not None:
                yield name, document

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[model.Entry[Record]]:
        if after < 0:
            raise UsageFailure(f"{after} is not a position of {stream.name}", stream=stream.name)
        with self._changed:
            lines = list(enumerate(self._streams.get(stream.name, [])[after:], start=after + 1))
        for position, line in lines:
            yield model.Entry(position, stream.codec.decode(line, f"{stream.name}#{position}"))

    def transact(
        self, keys: Iterable[Key[Any] | Stream[Any]], decide: Decide[Result], *, commit_id: str | None = None
    ) -> model.Commit[Result]:
        named = model.with_heads(keys)
        commit_id = model.checked_commit_id(commit_id)
        self._deciding.refuse_nesting()
        with self._changed:
            view = View.of(named, self.read, self._tail)
            now = self._clock.wall()
            with self._deciding:
                decision = decide(view, now)
            changes = model.with_head_changes(view, decision.changes)
            model.check_changes(named, view, changes)
            if changes and self._moved_to is not None:
                raise StoreMoved("memory", self._moved_to)
            encoded = [
                (change, b"" if isinstance(change, model.Delete) else _codec(change).encode(change.record))
                for change in changes
            ]
            positions: list[int] = []
            for change, content in encoded:
                if isinstance(change, model.Append):
                    name = change.stream.name
                    lines = self._streams.setdefault(name, [])
                    lines.append(content)
                    positions.append(len(lines))
                else:
                    name = change.key.name
                    if isinstance(change, model.Delete):
                        del self._documents[name]
                    else:
                        self._versions += 1
                        self._documents[name] = content, self._versions
                self._log.append(name)
            self._changed.notify_all()
        return model.Commit(commit_id, now, tuple(positions), decision.result)

    def set_moved(self, target: str | None) -> None:
        with self._changed:
            self._moved_to = target

    def watch(self, what: model.Watched) -> MemoryWatch:
        return MemoryWatch(self._changed, self._log, what)

    def now(self) -> float:
        return self._clock.wall()

    def close(self) -> None:
        pass

    def _tail(self, stream: Stream[Any]) -> model.Tail:
        lines = self._streams.get(stream.name, [])
        return model.Tail(len(lines), lines[-1] if lines else b"", f"{stream.name}#{len(lines)}")


def _codec(change: Any) -> Any:
    return change.stream.codec if isinstance(change, model.Append) else change.key.codec


class MemoryWatch(model.Watch):
    """Reads the log of changed names from where it ended when the watch was created."""

    def __init__(self, changed: threading.Condition, log: list[str], what: model.Watched) -> None:
        self._changed = changed
        self._log = log
        self._seen = len(log)
        self._prefix = what.name + "/" if isinstance(what, Family) else ""
        self._name = what.name

    def _next(self, left: float | None) -> list[str]:
        with self._changed:
            found = self._new()
            if not found and self._changed.wait(left):
                found = self._new()
            return found

    def _new(self) -> list[str]:
        new = self._log[self._seen :]
        self._seen += len(new)
        return [name for name in new if self._matches(name)]

    def _matches(self, name: str) -> bool:
        return name.startswith(self._prefix) if self._prefix else name == self._name
