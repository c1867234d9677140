"""Fifty processes on ten documents, killed at random: every acknowledged commit survives, exactly once."""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import count
from pathlib import Path

import msgspec

from holdfast.store.files import FileStore
from holdfast.store.model import (
    Append,
    Change,
    Create,
    Decision,
    Family,
    Key,
    Replace,
    Stream,
    StructCodec,
    View,
)
from holdfast.testing.backend import PATIENCE, apply
from proof.effort import rounds
from tests.store.storm import IsOver, Life, storm

PROCESSES = rounds(50, least=6)
TRANSACTIONS = rounds(200, least=20)
DOCUMENTS = 10
KILLS = rounds(120, least=12)


class Ids(msgspec.Struct, frozen=True):
    """The ids of all commits that changed a document."""

    ids: tuple[str, ...]


class Noted(msgspec.Struct, frozen=True):
    """The entry in the stream for a commit of two documents."""

    id: str


_IDS: StructCodec[Ids] = StructCodec(Ids)
ISSUES = Family("jit/issues", _IDS)
EVENTS = Stream("jit/events", StructCodec(Noted, pretty=False))
KEYS = [ISSUES.key(f"d{each}") for each in range(DOCUMENTS)]


def add(store: FileStore, keys: list[Key[Ids]], commit_id: str) -> None:
    """Add an id to each document. If there are two, also append it to the stream."""

    def decide(view: View, now: float) -> Decision[None]:
        changes: list[Change] = [Append(EVENTS, Noted(commit_id))] if len(keys) > 1 else []
        for key in keys:
            there = view.get(key)
            assert there is not None
            changes.append(Replace(key, Ids((*there.ids, commit_id))))
        return Decision(changes, None)

    store.transact([*keys, EVENTS] if len(keys) > 1 else keys, decide)


class Log:
    """The ids that were acknowledged in one place, each synced before the next commit."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.acknowledged = path.read_text().count("\n")

    def acknowledge(self, commit_id: str, keys: list[Key[Ids]]) -> None:
        os.write(self._fd, f"{commit_id} {' '.join(key.name for key in keys)}\n".encode())
        os.fsync(self._fd)
        self.acknowledged += 1


def test_no_acknowledged_commit_is_lost_and_none_is_made_twice(scratch: Path) -> None:
    logs = scratch / "logs"
    logs.mkdir()
    with FileStore(scratch / "store") as store:
        apply(store, *(Create(key, Ids(())) for key in KEYS))

    def live(life: Life, is_over: IsOver) -> None:
        log = Log(logs / str(life.place))
        with FileStore(scratch / "store", timeout=PATIENCE) as store:
            for number in count():
                if log.acknowledged >= TRANSACTIONS and is_over():
                    return
                keys = random.sample(KEYS, random.choice([1, 1, 1, 2]))
                commit_id = f"{life.name}.{number}"
                add(store, keys, commit_id)
                log.acknowledge(commit_id, keys)

    killed = storm(PROCESSES, live, kills=KILLS, pause=0.05)

    with FileStore(scratch / "store", timeout=PATIENCE) as store:
        judge(store, [log.read_text() for log in logs.iterdir()], killed)


def judge(store: FileStore, logs: list[str], killed: int) -> None:
    acknowledged = {line.split()[0]: line.split()[1:] for log in logs for line in log.splitlines()}
    assert len(acknowledged) >= PROCESSES * TRANSACTIONS
    assert killed == KILLS

    view = store.read_together(KEYS)  # finishes unfinished commits
    there = {key.name: found.ids for key in KEYS if (found := view.get(key)) is not None}
    noted = [each.record.id for each in store.entries(EVENTS)]

    assert all(len(set(ids)) == len(ids) for ids in there.values()), "a commit was made twice"
    assert len(set(noted)) == len(noted)
    for commit_id, names in acknowledged.items():
        assert all(commit_id in there[name] for name in names), "an acknowledged commit is lost"
        assert (commit_id in noted) is (len(names) == 2)

    times = Counter(commit_id for ids in there.values() for commit_id in ids)
    assert {each for each in times if times[each] == 2} == set(noted), "a commit was applied only in part"
    assert set(times.values()) == {1, 2}
    unknown = set(times) - set(acknowledged)
    assert len(unknown) <= killed
    assert len({each.rpartition(".")[0] for each in unknown}) == len(unknown), "more than one unknown commit per death"
    assert list((store.path / ".holdfast/intents").glob("*.json")) == []
