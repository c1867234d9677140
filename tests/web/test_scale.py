"""The pages of a large repository in a browser: 10,000 issues, 100,000 events of the ledger, 500 worktrees."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

import pytest

from holdfast.clock import format_instant
from holdfast.issues.model import Issue, State
from holdfast.repository.init import initialise
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from tests.support.browser import Browser
from tests.web.served import serving
from tests.web.visited import Pages

ISSUES, EVENTS, WORKTREES = 10_000, 100_000, 500
TOGETHER = 250

pytestmark = pytest.mark.long


def fill(root: Path) -> None:
    """Issues in chains of ten, events, and worktrees."""
    initialise(root)
    tracker = open_tracker(root, actor="human:ada")
    tracker.initialise()
    ids = [str(uuid.UUID(int=number)) for number in range(ISSUES)]
    issues = [
        Issue(
            id=name,
            title=f"Piece of work {number}",
            description="What is to be done, in some words. " * 8,
            state=State.DONE if number % 3 == 0 else State.BACKLOG if number % 10 else State.READY,
            dependencies=() if number % 10 == 0 or number % 3 == 0 else (ids[number - 1],),
            labels=(f"area:{number % 20}",),
            created_at=format_instant(1.7e9 + number),
            updated_at=format_instant(1.7e9 + number),
        )
        for number, name in enumerate(ids)
    ]
    for start in range(0, ISSUES, TOGETHER):
        tracker.adopt(issues[start : start + TOGETHER])
    with contextlib.closing(init_ledger(root)) as opened:
        for start in range(0, EVENTS, 1000):
            opened.ledger.append_many([{"type": "measured", "number": start + each} for each in range(1000)])
    with Repository(root) as repository:
        for number in range(WORKTREES):
            repository.worktrees.create(f"tree-{number}")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "fleet"
    fill(root)
    return root


def test_every_page_of_a_large_repository_loads(large: Path, browser: Browser, tmp_path: Path) -> None:
    with serving([large], tmp_path) as server:
        pages = Pages(browser, server, "fleet")
        browser.complaints()
        issue, past = uuid.UUID(int=ISSUES // 2), f"timeline?at={time.time() - 1:.0f}"
        listed = ("overview", "board", "graph", "worktrees", "timeline", "ledger", "audit", "landing", "doctor")
        for page in (*listed, f"issue/{issue}", past):
            pages.go(page)
            assert browser.complaints() == [], page
        pages.go("board")
        assert f"{ISSUES} issues" in browser.text("main")
        assert len(browser.all(".card")) < 500
        pages.go("board?all=done")
        assert browser.run("return document.querySelectorAll('#done .card').length") > ISSUES // 4
        pages.go("graph")
        assert browser.run("return document.querySelectorAll('.node').length") == 500
        scale = "return document.querySelector('#graph svg').getScreenCTM().a"
        assert browser.run(scale) > 0.75, "it can be read at first"
        browser.find("[data-zoom=fit]").click()
        assert browser.run(scale) < 0.55
        assert browser.find("#graph svg").get_attribute("class") == "far"
        pages.go("worktrees")
        assert browser.run("return document.querySelectorAll('.rows tbody tr').length") == WORKTREES + 1
        pages.go("ledger?before=50000")
        assert "50000" in browser.text("main")
