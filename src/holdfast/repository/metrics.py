"""Figures about a repository for monitoring, in Prometheus' text format.

Gauges show the records as they are. Counters count the entries of the audit trail and the events of issues, and what
processes added when they ended. A cache keeps the counts, so a call reads only new entries. Without it,
everything is counted again. At worst, a counter restarts from zero, which Prometheus expects.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Archived, Corrupt, Failure, NotFound, NotInitialised
from holdfast.fs import durable
from holdfast.fs.directory import make_directories
from holdfast.issues.model import EVENTS
from holdfast.issues.tracker import Tracker
from holdfast.ledger.log import Ledger
from holdfast.repository.context import DESCRIPTORS
from holdfast.repository.landing_records import TARGETS
from holdfast.repository.opening import tracker_of
from holdfast.repository.overview import look_around
from holdfast.repository.repository import Repository
from holdfast.store.archive import ARCHIVES, archive_of
from holdfast.store.audit import AuditEntry
from holdfast.store.model import Record, Store, Stream, StructCodec
from holdfast.store.open import address_of, check_store, open_store, saved_statistics

CACHE = "metrics.json"
ACTOR = "auto:metrics"
_MOST_NAMES = 200  # of events; a forged trail could have any number
_OTHER = "(other)"
_LANDING = "landing_"  # how events of landings begin
_MOST_BYTES = 1 << 20


class Sample(NamedTuple):
    value: float
    labels: Mapping[str, str] = {}


class Metric(NamedTuple):
    """A figure, or several that differ in their labels. `kind` is `gauge` or `counter`."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]

    def as_record(self) -> dict[str, object]:
        """The metric as JSON values."""
        samples = [{"value": each.value, "labels": dict(each.labels)} for each in self.samples]
        return {**self._asdict(), "samples": samples}


def measure(repository: Repository) -> list[Metric]:
    """The figures of a repository. One opened `to_examine` whose store cannot be used has only `holdfast_store_up`."""
    found: list[Metric] = []
    try:
        found += _of_store(repository)
        found += _of_streams(repository)
        found += _of_records(repository)
        found += _of_holdings(repository)
    except Failure as failure:
        if failure is not repository.trouble:
            raise
        return [_gauge("store_up", _UP, 0)]
    return [*found, *_of_processes(repository.root)]


def as_text(metrics: Iterable[Metric]) -> str:
    """The figures in Prometheus' text format, version 0.0.4."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_escaped(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        for value, labels in metric.samples:
            inside = ",".join(f'{name}="{_escaped(text, quoted=True)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "\n".join([*lines, ""])


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    text = text.replace('"', '\\"') if quoted else text
    return text.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(f"holdfast_{name}", "gauge", text, (Sample(value, labels),))


def _by(kind: str, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    samples = tuple(Sample(count, {label: each}) for each, count in sorted(counts.items()))
    return Metric(f"holdfast_{name}", kind, text, samples)


def _total(name: str, text: str, value: float) -> Metric:
    return Metric(f"holdfast_{name}_total", "counter", text, (Sample(value),))


# --- The store ----------------------------------------------------------------------------------------

_UP = "Whether the store can be used."


def _of_store(repository: Repository) -> Iterator[Metric]:
    store, address = repository.context.store, address_of(repository.root)
    health, kind = check_store(store, address), address.partition(":")[0]
    yield _gauge("store_up", _UP, 1)
    server = store.server
    version = "" if server is None else str(server.version or "")
    labels = {"store": kind, "server": version, "repository": repository.format.repository_id}
    yield _gauge("info", "The store of the repository; always 1.", 1, **labels)
    if server is None:
        return
    yield _gauge("store_response_seconds", "How long the store took to answer.", health.seconds)
    text = "How far the clock of the store is ahead of this machine's."
    yield _gauge("store_clock_ahead_seconds", text, health.clock_difference)
    if (space := server.space()) is not None:
        yield _gauge("store_size_bytes", "The size of the data on the server.", space.size)
        if space.limit:
            yield _gauge("store_limit_bytes", "The size at which the server refuses to write.", space.limit)
        yield _gauge("store_in_use_bytes", "The part of this size that is not free for new records.", space.in_use)
        yield _gauge("store_revision", "The revision of the last change on the server.", space.revision)
        yield _gauge("store_compacted_revision", "The last revision that was compacted.", space.compacted)
        yield _gauge("store_alarms", "The alarms that the server has raised.", len(space.alarms))


# --- Streams ------------------------------------------------------------------------------------------


class StreamCount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entries counted so far, by name. The last entry is identified by its digest; `before` is the position of
    the entry before it."""

    before: int = 0
    position: int = 0
    digest: str = ""
    counts: dict[str, int] = {}


class CountedStreams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the cache."""

    repository_id: str
    streams: dict[str, StreamCount] = {}


_CODEC = StructCodec(CountedStreams, pretty=False, limit=_MOST_BYTES)


def _of_streams(repository: Repository) -> Iterator[Metric]:
    store, trail = repository.context.store, repository.context.trail.stream
    path, repository_id = repository.context.paths.caches / CACHE, repository.format.repository_id
    known = CountedStreams(repository_id=repository_id)
    with contextlib.suppress(NotFound, Corrupt):
        read = _CODEC.decode(durable.read(path, limit=_MOST_BYTES), CACHE)
        known = read if read.repository_id == repository_id else known
    audit = _counted(store, trail, _names_of_entry, known.streams.get(trail.name))
    issues = _counted(store, EVENTS, lambda event: [event.type], known.streams.get(EVENTS.name))
    streams = {trail.name: audit, EVENTS.name: issues}
    if streams != known.streams:
        with contextlib.suppress(Failure):  # then it is counted again
            make_directories(path.parent)
            durable.replace(path, _CODEC.encode(CountedStreams(repository_id=repository_id, streams=streams)))
    commits = {name: count for name, count in audit.counts.items() if not name.startswith(_LANDING)}
    landings = {name.removeprefix(_LANDING): count for name, count in audit.counts.items() if name not in commits}
    yield _by("counter", "audit_entries_total", "Entries of the audit trail: commits, by event.", "event", commits)
    yield _by("counter", "landings_total", "Entries of landing queues, by outcome.", "outcome", landings)
    yield _total("snapshots_taken", "Snapshots that were published.", commits.get("snapshot_published", 0))
    yield _total("lease_expiries", "Leases that expired and were taken over.", commits.get("lock_stolen", 0))
    yield _by("counter", "issue_events_total", "Events of issues, by type.", "type", issues.counts)
    yield _total("ledger_events", "Events of the ledger.", Ledger(store).sequence)


def _names_of_entry(entry: AuditEntry) -> list[str]:
    """The event, once for each entry of a landing queue that it is about."""
    entries = entry.facts.get("entries") if entry.event.startswith(_LANDING) else None
    return [entry.event] * (len(entries) if isinstance(entries, list) else 1)


def _counted(
    store: Store, stream: Stream[Record], names_of: Callable[[Record], list[str]], known: StreamCount | None
) -> StreamCount:
    """Count the entries that are new, or all that are not archived if the last known one is not where it was."""
    if known is None or not known.digest:
        archive = archive_of(store, stream.name) if stream.name in ARCHIVES else None
        start = archive.last if archive else 0
        known = StreamCount(before=start, position=start)
    entries = store.entries(stream, after=known.before)
    if known.digest:
        found = None
        with contextlib.suppress(Corrupt, Archived):
            found = next(entries, None)
        if found is None or (found.position, _digest(found.record)) != (known.position, known.digest):
            return _counted(store, stream, names_of, None)
    counts, before, position, last = Counter(known.counts), known.before, known.position, None
    for entry in entries:
        for name in names_of(entry.record):
            counts[name if name in counts or len(counts) < _MOST_NAMES else _OTHER] += 1
        before, position, last = position, entry.position, entry.record
    if last is None:
        return known
    return StreamCount(before=before, position=position, digest=_digest(last), counts=dict(counts))


def _digest(record: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()


# --- Records ------------------------------------------------------------------------------------------


def _of_records(repository: Repository) -> Iterator[Metric]:
    store = repository.context.store
    clones = Counter(each.clone for each in repository.worktrees.configs())
    yield _by("gauge", "worktrees", "Worktrees, by the clone that has the directory.", "clone", clones)
    yield _gauge("snapshots", "Snapshots that are kept.", sum(1 for _ in store.scan(DESCRIPTORS)))
    queues = {name: len(document.record.queue) for name, document in store.scan(TARGETS)}
    yield _by("gauge", "landing_queue", "Work waiting to land, by target.", "target", queues)
    try:
        place = tracker_of(repository.root)
        issues = Tracker(store if place == repository.root else open_store(place), actor=ACTOR, root=place).summaries()
    except NotInitialised:
        return
    states = Counter(issues.state(each).value for each in issues)
    yield _by("gauge", "issues", "Issues, by state.", "state", states)
    yield _gauge("issues_ready", "Issues that can be claimed now: the length of the queue.", len(issues.ready()))


def _of_holdings(repository: Repository) -> Iterator[Metric]:
    held, expired, waiting = Counter[str](), Counter[str](), Counter[str]()
    for each in look_around(repository.root).holdings:
        is_expired = each.time_left is not None and each.time_left <= 0
        (expired if is_expired else held)[each.kind] += 1
        waiting[each.kind] += len(each.waiting)
    yield _by("gauge", "held", "Leases, claims and locks that are held now.", "kind", held)
    yield _by(
        "gauge",
        "expired",
        "Leases and claims that have expired and were neither taken over nor released.",
        "kind",
        expired,
    )
    yield _by("gauge", "waiting", "Waiting processes, by the kind of thing that they wait for.", "kind", waiting)


# --- Processes ----------------------------------------------------------------------------------------


def _of_processes(root: Path) -> Iterator[Metric]:
    """The figures that processes added to the records of their machines when they ended."""
    found, place = saved_statistics(root), root
    with contextlib.suppress(NotInitialised):
        place = tracker_of(root)
    if place != root:
        found = found.plus(saved_statistics(place))
    text = "Commits of all processes, counted when each is done, on the machines that share this directory."
    yield _total("commits", text, found.commits)
    yield _total("conflicts", "Attempts to commit that conflicted with another commit.", found.conflicts)
    yield _total("lock_waits", "Document locks for which a process had to wait.", found.waits)
    yield _total("lock_wait_seconds", "How long processes waited for document locks.", found.seconds_waited)
