"""Reading a stream from its end: every entry, in the reverse order, and no more of them than are used."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.entry import run
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import EVENTS as ISSUE_EVENTS
from holdfast.issues.model import IssueEvent
from holdfast.issues.prompt import Ending, issue_prompt
from holdfast.repository.init import initialise
from holdfast.repository.ledgers import init_ledger, open_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.timeline import HeldSpan
from holdfast.store import model
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Append, Decision, Store, Stream, newest_first
from holdfast.store.open import open_address
from holdfast.testing.backend import EVENTS, Event
from holdfast.web.contents import PAGES
from holdfast.web.layout import PageRequest
from holdfast.web.pages import timeline
from holdfast.web.workspaces import Workspace, WorkspaceSettings, workspaces_of
from tests.issues.trackers import claim_id_of

MANY, FEW = 3000, 800  # the entries of a stream, and the most that may be read to show one
IGNORED = IssueEvent(type="issue_updated", id="x", issue_id="other", timestamp="2020-01-01T00:00:00Z")


def append_many(store: Store, stream: Stream[Any], records: list[Any], *, together: int = 50) -> None:
    for start in range(0, len(records), together):
        some = [Append(stream, each) for each in records[start : start + together]]
        store.transact([stream], lambda view, now, some=some: Decision(some, None))  # type: ignore[misc]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of the entries that were read."""
    found: list[int] = []
    original = model.Entry

    def noting(position: int, record: Any) -> Any:
        found.append(position)
        return original(position, record)

    monkeypatch.setattr(model, "Entry", noting)
    return found


@pytest.fixture(params=["memory", "files", "postgres", "etcd"])
def store(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    url = "files" if request.param == "files" else request.getfixturevalue(f"{request.param}_url")
    with contextlib.closing(open_address(scratch, url)) as opened:
        yield opened


def test_it_yields_every_entry_of_a_stream_in_the_reverse_order(store: Store) -> None:
    chance = random.Random(5)
    append_many(store, EVENTS, [Event(each, "x" * chance.choice((0, 9, 900))) for each in range(400)])
    append_many(store, EVENTS, [Event(400, "y" * 70_000)], together=1)  # a record that is longer than a block
    append_many(store, EVENTS, [Event(each) for each in range(401, 500)])
    forwards = list(store.entries(EVENTS))
    assert [each.record.number for each in forwards] == list(range(500))
    assert list(newest_first(store, EVENTS)) == forwards[::-1]
    for count in (0, 1, 99, 100, 499):
        assert list(newest_first(store, EVENTS, end=forwards[count].position)) == forwards[count::-1]


def test_entries_that_are_appended_meanwhile_are_left_out(store: Store) -> None:
    append_many(store, EVENTS, [Event(each) for each in range(300)])
    newest = newest_first(store, EVENTS)
    first = next(newest)
    append_many(store, EVENTS, [Event(999)])
    assert [first.record.number, *(each.record.number for each in newest)] == list(range(299, -1, -1))


def test_an_empty_stream_has_no_entries(store: Store) -> None:
    assert list(newest_first(store, EVENTS)) == []


def test_a_few_of_the_last_entries_cost_a_few_reads(scratch: Path, postgres_url: str, read: list[int]) -> None:
    for opened in (FileStore(scratch), open_address(scratch, postgres_url)):
        with contextlib.closing(opened) as store:
            append_many(store, EVENTS, [Event(each) for each in range(MANY)])
            store.now()
            read.clear()
            found = [each.record.number for each in islice(newest_first(store, EVENTS), 5)]
            assert found == list(range(MANY - 1, MANY - 6, -1))
            assert len(read) <= FEW


# --- What shows a part of a stream -----------------------------------------------------------------


@pytest.fixture
def root(scratch: Path) -> Path:
    """A repository with many events of issues and of the ledger."""
    root = scratch / "fleet"
    initialise(root)
    tracker = open_tracker(root, actor="human:ada")
    tracker.initialise()
    append_many(tracker.store, ISSUE_EVENTS, [IGNORED] * MANY, together=1000)
    with contextlib.closing(init_ledger(root)) as opened:
        opened.ledger.append_many([{"type": "measured"}] * MANY)
    return root


def output(*words: str | Path) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert run([str(each) for each in words]) == 0
    return out.getvalue()


def shown_events(root: Path) -> None:
    assert output("events", "--limit", "7", "--repo", root).count("issue_updated") == 7


def shown_event_of_the_ledger(root: Path) -> None:
    with contextlib.closing(open_ledger(root)) as opened:
        made = opened.ledger.append({"type": "one"})
    assert f"event {made.sequence}" in output("ledger", "show", str(made.event["id"]), "--repo", root)


def shown_prompt(root: Path) -> None:
    tracker = open_tracker(root, actor="human:ada")
    issue = tracker.create(NewIssue(title="Mend the sail")).id
    for reason in ("no thread", "no needle"):
        claimed = tracker.claims.claim(issue, tracker.claims.request())
        tracker.claims.release(issue, claim_id_of(claimed), reason=reason)
    prompt = issue_prompt(tracker, issue, ending=Ending.SESSION).text
    assert prompt.index("no thread") < prompt.index("no needle")


def shown_page_of_an_issue(root: Path) -> None:
    tracker = open_tracker(root, actor="human:ada")
    issue = tracker.create(NewIssue(title="Mend the sail"))
    assert "<strong>created</strong>" in page(root, "issue", issue.id)


def page(root: Path, name: str, subject: str = "") -> str:
    workspaces = workspaces_of([root], WorkspaceSettings("human:ada", None, root.parent))
    asked = PageRequest(workspaces[0], workspaces, {}, 2e9, writable=False, name=subject)
    return str(PAGES[name](asked).body)


@pytest.mark.parametrize("act", [shown_events, shown_event_of_the_ledger, shown_prompt, shown_page_of_an_issue])
def test_what_shows_a_few_records_reads_a_few(act: Callable[[Path], None], root: Path, read: list[int]) -> None:
    act(root)
    assert len(read) <= FEW


def test_the_timeline_reads_the_last_events_unless_an_instant_is_chosen(
    root: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.web.pages.timeline.RECENT", 50)
    page(root, "timeline")
    assert 100 <= len(read) <= 2 * FEW


@pytest.mark.parametrize("spans", [timeline._of_issues, timeline._of_nodes])
def test_to_show_an_instant_the_timeline_keeps_no_events(
    scratch: Path, read: list[int], spans: Callable[[Workspace, float | None], Iterator[HeldSpan]]
) -> None:
    """It has the first span before it has read more than a few of them."""
    initialise(scratch)
    tracker = open_tracker(scratch, actor="human:ada")
    tracker.initialise()
    claimed = tracker.claims.claim(
        tracker.create(NewIssue(title="Mend the sail")).id, tracker.claims.request("agent:a")
    )
    tracker.claims.release(claimed.issue.id, claim_id_of(claimed))
    append_many(tracker.store, ISSUE_EVENTS, [IGNORED] * MANY, together=1000)
    with contextlib.closing(init_ledger(scratch)) as opened:
        with opened.claims.claim("1.2", "agent:a"):
            pass
        opened.ledger.append_many([{"type": "measured"}] * MANY)
    (workspace,) = workspaces_of([scratch], WorkspaceSettings("human:ada", None, scratch))
    read.clear()
    found = spans(workspace, None)
    assert (next(found).who, len(read) <= FEW) == ("agent:a", True)
