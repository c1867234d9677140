"""Agents that claim issues and finish them, beside agents on a hand-written queue on the same server.

On PostgreSQL the queue is a table: `SELECT ... FOR UPDATE SKIP LOCKED` takes the first row, a second statement finishes
it. On etcd an agent reads the first keys, takes one of them at random by compare-and-swap, and finishes it by another.
Both sync every commit. They have no events, no commit ids, no dependencies, and no expiry.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any, ClassVar, NamedTuple

from bench.crew import Crew
from bench.report import Column, Report, Table, Value, at_least, at_most, number
from bench.servers import CONTENT, MILLI, BareEtcd, BarePostgres, coded
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.locks.retry import CHANCE, RetryConfig
from holdfast.store.served import ServedStore

RETRY = RetryConfig(max_attempts=100, initial_delay=0.001)
BATCH = 1000


class QueueSize(NamedTuple):
    """How much to measure; `span` is in seconds."""

    agents: tuple[int, ...] = (1, 8, 32, 64)
    issues: int = 10_000
    rounds: int = 5
    span: float = 3.0


FULL = QueueSize()
QUICK = QueueSize(agents=(1, 2), issues=20, rounds=1, span=0.3)


class Work(NamedTuple):
    """What agents have done: pieces of work, attempts to claim one that failed, CPU seconds, and seconds."""

    done: int = 0
    wasted: int = 0
    cpu: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        return self.done / max(1e-9, self.seconds)


class Queue(ABC):
    """A queue on a server, for one agent."""

    name: ClassVar[str]

    def __init__(self, url: str, root: Path) -> None:
        """`root` is the directory for what the agents of one machine share."""
        self.url, self.root = url, root
        self.attempts = 0  # to claim

    @abstractmethod
    def fill(self, count: int) -> None:
        """Add pieces of work."""

    @abstractmethod
    def warm_up(self, agents: int) -> None:
        """Read what an agent reads once, when it starts."""

    @abstractmethod
    def claim(self) -> object:
        """Claim the next piece of work, or return None."""

    @abstractmethod
    def finish(self, claimed: Any) -> None:
        """Finish it."""

    @abstractmethod
    def finished(self) -> int:
        """How many pieces of work are finished."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class SkipLocked(Queue):
    name = "SKIP LOCKED (floor)"

    @cached_property
    def connection(self) -> Any:
        found = BarePostgres(self.url).connection
        found.execute(
            """CREATE TABLE IF NOT EXISTS queue (id bigserial PRIMARY KEY, priority int NOT NULL,
            at timestamptz NOT NULL, state text NOT NULL, holder text, token int NOT NULL, content bytea)"""
        )
        found.execute("CREATE INDEX IF NOT EXISTS queue_ready ON queue (priority, at) WHERE state = 'ready'")
        return found

    def fill(self, count: int) -> None:
        self.connection.execute(
            """INSERT INTO queue (priority, at, state, token, content)
            SELECT 1, now(), 'ready', 0, %s FROM generate_series(1, %s)""",
            [CONTENT, count],
        )

    def warm_up(self, agents: int) -> None:
        self.connection.execute("SELECT 1")

    def claim(self) -> object:
        self.attempts += 1
        return self.connection.execute(
            """UPDATE queue SET state = 'working', holder = %s, token = token + 1, at = now() WHERE id = (
                SELECT id FROM queue WHERE state = 'ready' ORDER BY priority, at LIMIT 1 FOR UPDATE SKIP LOCKED)
            RETURNING id, token, content""",
            [str(os.getpid())],
        ).fetchone()

    def finish(self, claimed: Any) -> None:
        done = self.connection.execute(
            "UPDATE queue SET state = 'done', at = now() WHERE id = %s AND token = %s", [claimed[0], claimed[1]]
        )
        assert done.rowcount == 1

    def finished(self) -> int:
        return int(self.connection.execute("SELECT count(*) FROM queue WHERE state = 'done'").fetchone()[0])

    def close(self) -> None:
        self.connection.close()


class CompareAndSwap(Queue):
    name = "compare-and-swap on etcd (floor)"

    @cached_property
    def server(self) -> BareEtcd:
        return BareEtcd(self.url)

    def fill(self, count: int) -> None:
        for first in range(0, count, 100):
            puts = [
                {"request_put": {"key": coded(f"ready/{os.urandom(8).hex()}"), "value": coded(CONTENT.decode())}}
                for _ in range(first, min(count, first + 100))
            ]
            self.server.ask("/v3/kv/txn", {"success": puts})

    def warm_up(self, agents: int) -> None:
        self.width = 8 * (agents - 1) + 1

    def claim(self) -> object:
        while True:
            request = {"key": coded("ready/"), "range_end": coded("ready0"), "limit": self.width}
            rows = self.server.ask("/v3/kv/range", {**request, "keys_only": True}).get("kvs")
            if not rows:
                return None
            self.attempts += 1
            row = rows[CHANCE.randrange(len(rows))]
            compare = {"key": row["key"], "target": "MOD", "mod_revision": row["mod_revision"]}
            name = coded(f"working/{os.getpid()}")
            puts = [{"request_delete_range": {"key": row["key"]}}, {"request_put": {"key": name, "value": row["key"]}}]
            if self.server.ask("/v3/kv/txn", {"compare": [compare], "success": puts}).get("succeeded"):
                return name, row["key"]

    def finish(self, claimed: Any) -> None:
        name, key = claimed
        compare = {"key": name, "target": "VALUE", "value": key}
        puts = [{"request_delete_range": {"key": name}}, {"request_put": {"key": coded(f"done/{key}"), "value": key}}]
        assert self.server.ask("/v3/kv/txn", {"compare": [compare], "success": puts})["succeeded"]

    def finished(self) -> int:
        request = {"key": coded("done/"), "range_end": coded("done0"), "count_only": True}
        return int(self.server.ask("/v3/kv/range", request).get("count", 0))

    def close(self) -> None:
        self.server.connection.close()


class Issues(Queue):
    """Our tracker."""

    @abstractmethod
    def open(self) -> ServedStore:
        """Open the store."""

    @cached_property
    def tracker(self) -> Tracker:
        store: Any = self.open()
        transact, transact_once = store.transact, store.transact_once

        def counted(decide: Any) -> Any:
            def decide_and_count(view: Any, now: float) -> Any:
                self.attempts += 1
                return decide(view, now)

            return decide_and_count

        store.transact = lambda keys, decide: transact(keys, counted(decide))
        store.transact_once = lambda work: transact_once(work._replace(decide=counted(work.decide)))
        tracker = Tracker(store, actor=f"agent:{os.getpid()}", root=self.root, retry=RETRY)
        tracker.initialise()
        return tracker

    def fill(self, count: int) -> None:
        for first in range(0, count, BATCH):
            some = range(first, min(count, first + BATCH))
            self.tracker.create_all([NewIssue(title=f"issue {each}", description=CONTENT.decode()) for each in some])

    def warm_up(self, agents: int) -> None:
        self.tracker.summaries(finished=False)

    def claim(self) -> object:
        return self.tracker.claims.claim_next(self.tracker.claims.request())

    def finish(self, claimed: Any) -> None:
        self.tracker.update(claimed.issue.id, Update(state=State.DONE), claim=ClaimId.parse(claimed.claim.claim_id))

    def finished(self) -> int:
        return sum(each.state is State.DONE for each in self.tracker.summaries())

    def close(self) -> None:
        self.tracker.store.close()


class IssuesOnPostgres(Issues):
    name = "holdfast on PostgreSQL"

    def open(self) -> ServedStore:
        from holdfast.store.postgres import PostgresStore

        return PostgresStore(self.url)


class IssuesOnEtcd(Issues):
    name = "holdfast on etcd"

    def open(self) -> ServedStore:
        from holdfast.store.etcd import EtcdStore

        return EtcdStore(self.url)


QUEUES: dict[str, tuple[type[Queue], type[Queue]]] = {
    "PostgreSQL": (SkipLocked, IssuesOnPostgres),
    "etcd": (CompareAndSwap, IssuesOnEtcd),
}


def agents(server: str, url: str, directory: Path, size: QueueSize, report: Report) -> None:
    """More and more agents claim and finish work; each number of them has as much work before it."""
    floor, ours = QUEUES[server]
    titles = ("done/s", "wasted", "CPU ms")
    columns = [Column(f"{count}: {title}", number(".2f")) for count in size.agents for title in titles]
    table = Table(f"{server}: agents that claim and finish {size.issues:,} issues; attempts wasted per claim", columns)
    table.rows = {floor.name: [], ours.name: []}
    speeds: dict[tuple[str, int], float] = {}
    ratios: dict[int, float] = {}
    missing: dict[type[Queue], int] = dict.fromkeys((floor, ours), size.issues)
    for count in size.agents:
        print(f"servers: {server}, {count} agents ...", file=sys.stderr, flush=True)
        found = _measured(missing, count, url, directory, size, report)
        for name, works in found.items():
            work = _total(works)
            speeds[name, count] = work.speed
            each = max(1, work.done)
            row: list[Value] = [speeds[name, count], work.wasted / each, MILLI * work.cpu / each]
            table.rows[name] += row
        pairs = zip(found[ours.name], found[floor.name], strict=True)
        ratios[count] = median(mine.speed / max(1e-9, other.speed) for mine, other in pairs)
        wasted = _total(found[ours.name])
        text = f"{server}: attempts that {count} agents waste per claim ≤ 0.3"
        report.targets.append(at_most(0.3, text, wasted.wasted / max(1, wasted.done)))
        text = f"{server}: {count} agents claim and finish ≥ 0.7 x as many issues as on a bare queue"
        report.targets.append(at_least(0.7, text, ratios[count]))
    report.tables.append(table)
    few, many = size.agents[1], size.agents[-1]
    text = f"{server}: {many} agents claim and finish ≥ as many issues as {few}"
    report.targets.append(at_least(1.0, text, speeds[ours.name, many] / max(1e-9, speeds[ours.name, few])))


def _measured(
    missing: dict[type[Queue], int], count: int, url: str, root: Path, size: QueueSize, report: Report
) -> dict[str, list[Work]]:
    """What all agents together have done, for each queue and round. The queues take turns. `missing` is what is added
    to each before."""
    queues = {kind: kind(url, root) for kind in missing}
    found: dict[str, list[Work]] = {kind.name: [] for kind in missing}
    finished = {kind: queue.finished() for kind, queue in queues.items()}
    with ExitStack() as opened, Crew(count) as crew:
        for queue in queues.values():
            opened.callback(queue.close)
        for _ in range(size.rounds):
            for kind, queue in queues.items():
                queue.fill(missing[kind])
                works = crew.all_do(_prepare, kind, url, root, count, seconds=size.span)
                found[kind.name].append(_together(works))
                missing[kind] = found[kind.name][-1].done
        for kind, queue in queues.items():
            done, known = queue.finished() - finished[kind], _total(found[kind.name]).done
            if done != known:
                report.notes.append(f"{kind.name}: {known} pieces of work were reported, and {done} are finished")
    return found


def _total(works: list[Work]) -> Work:
    """The work of several rounds."""
    return Work(
        sum(each.done for each in works),
        sum(each.wasted for each in works),
        sum(each.cpu for each in works),
        sum(each.seconds for each in works),
    )


def _together(works: list[Work]) -> Work:
    """The work of several agents at the same time."""
    return _total(works)._replace(seconds=max(each.seconds for each in works))


_agent = cache(lambda kind, url, root: kind(url, root))
"""The queue of this process: the agent goes on with it in each round."""


def _prepare(kind: type[Queue], url: str, root: Path, agents: int) -> Callable[[float], Work]:
    queue = _agent(kind, url, root)
    queue.warm_up(agents)

    def work(end_at: float) -> Work:
        done, wasted, started, began = 0, 0, process_time(), monotonic()
        while monotonic() < end_at:
            before = queue.attempts
            claimed = queue.claim()
            if claimed is None:
                break
            wasted += queue.attempts - before - 1
            queue.finish(claimed)
            done += 1
        return Work(done, wasted, process_time() - started, monotonic() - began)

    return work
