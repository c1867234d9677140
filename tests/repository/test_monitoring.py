"""Figures for monitoring: what they count, what a call reads, and that Prometheus' own parser understands them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Tracker
from holdfast.repository import metrics
from holdfast.repository.context import RepositoryContext
from holdfast.repository.metrics import CACHE, Metric, Sample, as_text, measure
from holdfast.repository.repository import Repository
from holdfast.store.files import FileStore
from holdfast.store.model import Create, Decision, Entry, Record, Replace, Stream, View
from holdfast.store.open import configure_store
from holdfast.store.postgres import PostgresStore
from holdfast.testing.backend import INDEX, Item
from tests.cli.commands import data, holdfast
from tests.repository.stages import expire, make_repository

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the servers are started on POSIX systems")
ACTOR = "agent:tester"

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Figures:
    """The samples of a text, as Prometheus' own parser reads them; each name has a type and a help."""
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def figure(figures: Figures, name: str, **labels: str) -> float | None:
    return figures.get((f"holdfast_{name}", tuple(sorted(labels.items()))))


@pytest.fixture
def repository(scratch: Path) -> Repository:
    made = make_repository(scratch)
    Tracker(made.context.store, actor=ACTOR, root=made.root).initialise()
    return made


def test_the_figures_are_those_of_the_records(repository: Repository) -> None:
    tracker = Tracker(repository.context.store, actor=ACTOR, root=repository.root)
    first = tracker.create(NewIssue(title="first"))
    tracker.create(NewIssue(title="second", depends_on=(first.id,)))
    tracker.claims.claim(first.id, tracker.claims.request(ACTOR, ttl=60.0))
    repository.worktrees.create("other")
    with repository.lease() as lease:
        (repository.path() / "file").write_text("1")
        repository.snapshot(lease=lease)
        found = parsed(as_text(measure(repository)))
    assert figure(found, "store_up") == 1
    assert figure(found, "worktrees", clone="main") == 2
    assert figure(found, "snapshots") == figure(found, "snapshots_taken_total") == 1
    assert figure(found, "issues", state="in_progress") == figure(found, "issues", state="backlog") == 1
    assert figure(found, "issues_ready") == 0
    assert figure(found, "issue_events_total", type="issue_created") == 2
    assert figure(found, "held", kind="lease") == figure(found, "held", kind="issue") == 1
    assert figure(found, "audit_entries_total", event="lock_acquired") == 1
    assert figure(found, "lease_expiries_total") == 0


def test_an_expired_lease_is_counted_when_it_is_taken_over(repository: Repository) -> None:
    repository.lease().hand_on()
    expire(repository)
    assert figure(parsed(as_text(measure(repository))), "expired", kind="lease") == 1
    repository.steal()
    assert figure(parsed(as_text(measure(repository))), "lease_expiries_total") == 1


class _Counting(FileStore):
    """Counts the entries that it reads."""

    read_entries = 0

    def entries(self, stream: Stream[Record], *, after: int = 0) -> Iterator[Entry[Record]]:
        for each in super().entries(stream, after=after):
            self.read_entries += 1
            yield each


def test_a_call_reads_only_what_is_new(repository: Repository) -> None:
    for _ in range(20):
        repository.lease().release()
    before = {each.name: each for each in measure(repository)}
    repository.lease().release()
    store = _Counting(repository.root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository, "context", repository.context._replace(store=store))
        after = {each.name: each for each in measure(repository)}
    assert store.read_entries <= 2 + 2 + 2  # the last known and the new ones of the trail, of issues, of the ledger
    name = "holdfast_audit_entries_total"
    assert sum(each.value for each in after[name].samples) == 2 + sum(each.value for each in before[name].samples)


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"repository_id": "another"}', b"\xff"])
def test_without_its_cache_everything_is_counted_again(repository: Repository, content: bytes | None) -> None:
    repository.lease().release()
    before = measure(repository)
    path = repository.context.paths.caches / CACHE
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert _counters(measure(repository)) == _counters(before)


def test_a_trail_that_is_not_the_one_that_was_counted_is_counted_anew(repository: Repository) -> None:
    repository.lease().release()
    measure(repository)
    path = repository.context.paths.caches / CACHE
    path.write_bytes(path.read_bytes().replace(b'"lock_released":1', b'"lock_released":9'))
    assert figure(parsed(as_text(measure(repository))), "audit_entries_total", event="lock_released") == 9
    path.write_bytes(path.read_bytes().replace(b'"digest":"', b'"digest":"0'))
    assert figure(parsed(as_text(measure(repository))), "audit_entries_total", event="lock_released") == 1


def _recorded(context: RepositoryContext, event: str, view: View, now: float) -> Decision[None]:
    return Decision([context.audit(view, now, event)], None)


def _counters(found: list[Metric]) -> list[Metric]:
    return [each for each in found if each.kind == "counter" and "process" not in each.name]


def test_hostile_names_are_escaped_and_bounded(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    context = repository.context
    monkeypatch.setattr(metrics, "_MOST_NAMES", 10)
    hostile = ['"} 1\nholdfast_store_up 0', "back\\slash", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")]

    for name in [*hostile, *(f"event-{number}" for number in range(16))]:
        decided = partial(_recorded, context, name)
        context.store.transact([context.trail.stream], decided)
    text = as_text(measure(repository))
    found = parsed(text)
    assert figure(found, "store_up") == 1
    for name in hostile:
        assert figure(found, "audit_entries_total", event=name) == 1
    events = [labels for name, labels in found if name == "holdfast_audit_entries_total"]
    assert len(events) == 11
    assert sum(value for (name, _), value in found.items() if name == "holdfast_audit_entries_total") == 20
    assert as_text([Metric("x", "gauge", "h", (Sample(float("nan")), Sample(float("inf"), {"a": "b"})))])


def test_the_command_prints_them_and_answers_without_the_store(
    repository: Repository, postgres_url: str, tmp_path: Path
) -> None:
    here = parsed(holdfast("metrics", "--repo", repository.root).stdout)
    assert figure(here, "info", store="files", server="", repository=repository.format.repository_id) == 1
    listed = data(holdfast("metrics", "--repo", repository.root, "--json"))["metrics"]
    assert {each["name"] for each in listed} >= {"holdfast_store_up", "holdfast_issues_ready"}
    assert holdfast("migrate", repository.root, "--to", postgres_url).returncode == 0
    there = parsed(holdfast("metrics", "--repo", repository.root).stdout)
    assert figure(there, "store_size_bytes") or figure(there, "store_response_seconds")
    configure_store(repository.root, postgres_url.replace("/postgres?", "/gone?"), check=False)
    away = holdfast("metrics", "--repo", repository.root)
    assert (away.returncode, parsed(away.stdout)) == (0, {("holdfast_store_up", ()): 0.0})


def test_a_process_counts_its_commits_and_conflicts(postgres_url: str) -> None:
    with PostgresStore(postgres_url) as store, PostgresStore(postgres_url) as other:
        store.transact([INDEX], lambda view, now: Decision([Create(INDEX, Item(1))], None))
        interfering = iter([True, False])

        def decide(view: View, now: float) -> Decision[None]:
            if next(interfering):
                other.transact([INDEX], lambda view, now: Decision([Replace(INDEX, Item(2))], None))
            return Decision([Replace(INDEX, Item(3))], None)

        store.transact([INDEX], decide)
        assert store.statistics()[:2] == (2, 1)
        assert other.statistics()[:2] == (1, 0)
