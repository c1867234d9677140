"""Issues that declare the paths they touch: kept by every way in and out, and not handed out beside each other."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import cast

import msgspec
import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Failure, NotFound, SettingInvalid
from holdfast.issues.creating import NewIssue
from holdfast.issues.exchange import exported, import_text, read_batch
from holdfast.issues.model import ISSUES, Issue, State
from holdfast.issues.tracker import Tracker, Update
from holdfast.repository.settings import ENFORCE_TOUCHES, Settings
from proof.effort import rounds
from tests.cli.commands import data, error, holdfast
from tests.issues.trackers import claim_id_of, tracker_at

if sys.platform == "win32":
    pytest.skip("needs POSIX", allow_module_level=True)


def create(tracker: Tracker, title: str, *touches: str, clock: ManualClock | None = None) -> Issue:
    """Create an issue, before the next one by the clock."""
    if clock is not None:
        clock.advance(1.0)
    return tracker.create_all([NewIssue(title=title, touches=touches)])[0].issue


def claim_next(tracker: Tracker, assignee: str = "agent:a", *, ignore_touches: bool = False) -> str | None:
    """The title of the next issue."""
    request = tracker.claims.request(assignee, ttl=60.0)
    claimed = tracker.claims.claim_next(request, ignore_touches=ignore_touches)
    return claimed and claimed.issue.title


@pytest.fixture
def on_files(scratch: Path) -> Tracker:
    tracker = tracker_at(scratch)
    tracker.initialise()
    return tracker


def test_an_issue_on_the_paths_of_one_in_progress_is_skipped(tracker: Tracker, clock: ManualClock) -> None:
    first = create(tracker, "first", "src/parser/**", "docs", clock=clock)
    create(tracker, "same directory", "src/parser/lexer.py", clock=clock)
    create(tracker, "another directory", "tests/**", clock=clock)
    create(tracker, "nothing declared", clock=clock)

    assert [claim_next(tracker) for _ in range(4)] == ["first", "another directory", "nothing declared", None]
    with pytest.raises(NotFound) as caught:
        tracker.claims.take_next(tracker.claims.request("agent:a"))
    assert "(same directory) touches src/parser/lexer.py and src/parser/**, like" in caught.value.message
    assert "which agent:a works on" in caught.value.message
    skipped = cast("list[dict[str, object]]", caught.value.facts["skipped"])
    assert [each["in_progress"] for each in skipped] == [first.id]
    assert "--ignore-touches" in caught.value.hint

    assert claim_next(tracker, ignore_touches=True) == "same directory"


def test_the_issue_is_handed_out_when_the_other_is_done(tracker: Tracker, clock: ManualClock) -> None:
    create(tracker, "first", "src", clock=clock)
    create(tracker, "second", "src/a", clock=clock)
    create(tracker, "third", "src/b", clock=clock)
    held = tracker.claims.claim_next(tracker.claims.request("agent:a", ttl=60.0))
    assert held is not None
    assert claim_next(tracker) is None

    tracker.update(held.issue.id, Update(state=State.DONE), claim=claim_id_of(held))
    assert [claim_next(tracker), claim_next(tracker), claim_next(tracker)] == ["second", "third", None]


def test_an_issue_can_be_claimed_by_name_whatever_it_touches(tracker: Tracker, clock: ManualClock) -> None:
    create(tracker, "first", "src", clock=clock)
    second = create(tracker, "second", "src", clock=clock)
    assert claim_next(tracker) == "first"

    tracker.claims.claim(second.id, tracker.claims.request("agent:b"))


def test_an_abandoned_issue_is_no_longer_in_the_way(tracker: Tracker, clock: ManualClock) -> None:
    create(tracker, "first", "src", clock=clock)
    create(tracker, "second", "src", clock=clock)
    clock.advance(1.0)
    assert claim_next(tracker) == "first"
    clock.advance(3600)

    assert claim_next(tracker) == "second"
    assert claim_next(tracker) is None


def test_of_agents_that_ask_at_once_only_one_gets_work_on_the_same_paths(scratch: Path) -> None:
    """Each claim names the other issues with its paths; without that, two agents would both get one."""
    for number in range(rounds(40)):
        place = scratch / f"{number}"
        place.mkdir()
        tracker = tracker_at(place)
        tracker.initialise()
        for each in range(4):
            create(tracker, f"{each}", "src/**" if each % 2 else f"src/{each}.py", "README.md")
        start = threading.Barrier(4)
        found: list[str | None] = []

        def ask(
            number: int, place: Path = place, start: threading.Barrier = start, found: list[str | None] = found
        ) -> None:
            own = tracker_at(place, f"agent:{number}")
            start.wait()
            found.append(claim_next(own, f"agent:{number}"))

        threads = [threading.Thread(target=ask, args=(each,)) for each in range(4)]
        for each_thread in threads:
            each_thread.start()
        for each_thread in threads:
            each_thread.join()
        assert sorted(each is None for each in found) == [False, True, True, True]


def test_files_of_before_and_of_other_programs_keep_their_form(on_files: Tracker, scratch: Path) -> None:
    """An issue that declares nothing is written without the field, and one that another program wrote is kept."""
    plain, scoped = create(on_files, "plain"), create(on_files, "scoped", "src", "docs/*.md")
    files = {each: json.loads((scratch / f".jit/issues/{each}.json").read_text()) for each in (plain.id, scoped.id)}
    assert "touches" not in files[plain.id]
    assert files[scoped.id]["touches"] == ["src", "docs/*.md"]

    codec = ISSUES.codec
    assert codec.decode(b'{"id": "a", "title": "t"}', "a").touches == ()
    assert codec.decode(b'{"id": "a", "title": "t", "touches": null}', "a").touches == ()
    foreign = codec.decode(b'{"id": "a", "title": "t", "touches": ["/abs/../x", ""]}', "a")
    assert json.loads(codec.encode(foreign))["touches"] == ["/abs/../x", ""]


def test_they_survive_export_and_import_and_come_with_a_batch(tracker: Tracker, scratch: Path) -> None:
    scoped = create(tracker, "scoped", "src")
    (scratch / "other").mkdir()
    other = tracker_at(scratch / "other")
    other.initialise()

    import_text(other, msgspec.json.encode(exported(tracker.transactions.snapshot(), None)), "an export")
    assert other.issue(scoped.id).touches == ("src",)
    [new] = read_batch(b'[{"title": "a", "touches": ["docs/**"]}]', "a batch")
    assert other.create_all([new])[0].issue.touches == ("docs/**",)
    with pytest.raises(Failure):
        import_text(other, b'[{"id": "x", "title": "t", "touches": ["../up"]}]', "an import")


def test_commands_set_show_and_clear_them(scratch: Path) -> None:
    holdfast("issue", "init", cwd=scratch)
    options = ("--touches", "src/*.py", "--touches", "docs/", "--json")
    issue = data(holdfast("issue", "create", "scoped", *options, cwd=scratch))
    assert issue["touches"] == ["src/*.py", "docs"]
    assert "  touches       src/*.py, docs\n" in holdfast("issue", "show", issue["id"], cwd=scratch).stdout
    holdfast("issue", "create", "another", "--touches", "docs/index.md", cwd=scratch)
    assert data(holdfast("issue", "claim-next", "--json", cwd=scratch))["id"] == issue["id"]

    refused = error(holdfast("issue", "claim-next", "--json", cwd=scratch))
    assert (refused["code"], refused["skipped"][0]["in_progress"]) == ("E_NOT_FOUND", issue["id"])
    assert data(holdfast("issue", "claim-next", "--ignore-touches", "--json", cwd=scratch))["title"] == "another"

    changed = data(holdfast("issue", "update", issue["id"], "--touches", "README.md", "--json", cwd=scratch))
    assert changed["touches"] == ["README.md"]
    cleared = data(holdfast("issue", "update", issue["id"], "--touches", "none", "--json", cwd=scratch))
    assert cleared["touches"] == []
    assert (
        error(holdfast("issue", "create", "x", "--touches", "/etc", "--json", cwd=scratch))["code"] == "E_PATH_ESCAPE"
    )


def test_the_setting_that_enforces_scopes_is_true_or_false() -> None:
    assert Settings().enforce_touches is False
    assert Settings().changed(ENFORCE_TOUCHES, ["true"]).get(ENFORCE_TOUCHES) == ["true"]
    assert Settings().changed(ENFORCE_TOUCHES, ["false"]) == Settings()
    with pytest.raises(SettingInvalid):
        Settings().changed(ENFORCE_TOUCHES, ["perhaps"])
