"""The pages in a real browser: every page, keys, live changes, several tabs, a restarted server, accessibility."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Tracker, Update
from holdfast.repository.landing import Landings
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change
from holdfast.web import security
from holdfast.web.layout import PAGES as IN_NAVIGATION
from holdfast.web.live import Live
from holdfast.web.server import WebServer
from holdfast.web.workspaces import Workspace
from tests.cli.commands import holdfast
from tests.support.browser import DOWN, ENTER, ESCAPE, PATIENCE, Browser
from tests.support.homes import git
from tests.web.served import serving
from tests.web.visited import Pages, every_page
from tools.sample_repository import Sample, enqueue

if TYPE_CHECKING:
    import pytest

SHIFTS = """
    const done = arguments[0];
    let total = 0;
    const add = (found) => { for (const each of found) total += each.value; };
    const observer = new PerformanceObserver((list) => add(list.getEntries()));
    observer.observe({type: "layout-shift", buffered: true});
    setTimeout(() => { add(observer.takeRecords()); done(total); }, 100);
"""


def test_every_page_loads_without_a_complaint_of_the_browser(pages: Pages, sample: Sample) -> None:
    for each in every_page(sample):
        pages.go(each)
        assert pages.browser.find("h1").text, each
        assert pages.browser.complaints() == [], each


def test_nothing_moves_while_a_page_loads(pages: Pages) -> None:
    pages.go("overview")  # its slow parts are known from now on
    for page in ("overview", "board", "landing", "worktrees"):
        pages.go(page)
        assert pages.browser.driver.execute_async_script(SHIFTS) < 0.1, page  # what browsers call good
    pages.browser.run("document.querySelector('main').insertAdjacentHTML('afterbegin', '<br>'.repeat(20))")
    assert pages.browser.driver.execute_async_script(SHIFTS) > 0.1  # planted


def _is_at(browser: Browser, name: str, title: str) -> bool:
    return browser.driver.current_url.endswith(f"/{name}") and browser.find("h1").text == title


def test_keys_lead_everywhere(pages: Pages) -> None:
    pages.go("overview")
    browser = pages.browser
    for name, title, key in IN_NAVIGATION:
        browser.find("body").send_keys("g", key)
        browser.wait_until(partial(_is_at, browser, name, title), name)
    browser.find("body").send_keys("/")
    browser.wait_until(lambda: browser.run("return document.activeElement.id") == "search", "the search has the focus")
    browser.press("quay", ENTER)
    browser.wait_until(lambda: "board?q=quay" in browser.driver.current_url, "the search is in the address")
    browser.find("body").send_keys("?")
    browser.wait_until(lambda: browser.find("#help").is_displayed(), "the help is open")
    assert "go to Board" in browser.text("#help")
    browser.press(ESCAPE)
    browser.wait_until(lambda: not browser.find("#help").is_displayed(), "the help is closed")


def test_the_palette_finds_pages_and_issues(pages: Pages, sample: Sample) -> None:
    pages.go("overview")
    browser = pages.browser
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'k', ctrlKey: true, bubbles: true}))")
    browser.wait_until(lambda: "Release 1.0" in browser.text("#palette-list"), "the issues are listed")
    browser.press("fence every", DOWN, ENTER)
    browser.wait_until(lambda: sample.issues["lease"] in browser.driver.current_url, "the issue is open")


def test_rows_are_reached_by_keys_and_the_theme_is_kept(pages: Pages) -> None:
    pages.go("board")
    browser = pages.browser
    browser.find("body").send_keys("j", "j")
    first = browser.run("return document.activeElement.dataset.issue")
    assert first
    browser.find("body").send_keys("t")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    pages.go("graph")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"


def test_no_change_is_missed_before_a_page_listens(
    browser: Browser, sample: Sample, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, announce, events = threading.Event(), Live._announce, Live.events

    def announced(live: Live, workspace: Workspace, topic: str) -> None:
        announce(live, workspace, topic)
        if any(each.title == "Sound the fairway" for each in workspace.issues()):
            told.set()

    async def late(live: Live) -> AsyncIterator[bytes]:
        if not told.is_set():
            tracker.create(NewIssue(title="Sound the fairway"))
            assert await asyncio.to_thread(told.wait, PATIENCE)
        async for each in events(live):
            yield each

    monkeypatch.setattr(Live, "_announce", announced)
    monkeypatch.setattr(Live, "events", late)
    with serving([sample.root], tmp_path) as server:
        Pages(browser, server).go("board")
        browser.wait_for_text("Sound the fairway")


def test_a_page_waits_for_a_server_that_has_no_place_for_it(pages: Pages, server: WebServer, tracker: Tracker) -> None:
    pages.go("board")
    pages.wait_until_live()
    path = b"/r/harbour/board"
    with contextlib.ExitStack() as stack:
        for _ in range(security.REQUESTS_EACH):
            stack.enter_context(server.access.places(path).taken("127.0.0.1"))
        tracker.create(NewIssue(title="Coil the ropes"))
        pages.browser.wait_until(lambda: any("429" in each for each in pages.browser.complaints()), "it was refused")
        assert pages.browser.find("h1").text == "Board", "it stays as it is"
    pages.browser.wait_for_text("Coil the ropes")


def test_a_claim_of_another_process_shows_in_two_tabs(pages: Pages, tracker: Tracker, sample: Sample) -> None:
    issue = tracker.create(NewIssue(title="Mend the nets"))
    browser = pages.browser
    pages.go("board")
    pages.wait_until_live()
    browser.wait_for_text("Mend the nets", "#ready")
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    try:
        pages.go("overview")
        pages.wait_until_live()
        claimed = holdfast("issue", "claim", issue.id, "--actor", "agent:willow", cwd=sample.checkout)
        assert claimed.returncode == 0, claimed.stderr
        browser.wait_for_text("agent:willow")
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(first)
    browser.wait_for_text("Mend the nets", "#in_progress")
    assert browser.complaints() == []


HOLDS = """
import sys
from holdfast.repository.repository import Repository

repository = Repository(sys.argv[1], actor="agent:yew")
repository.worktrees.create("yew")
repository.leases.acquire("yew", repository.leases.request(ttl=600.0, purpose="a trial"))
print("held", flush=True)
sys.stdin.read()
"""
IS_ALIVE = """
    const rows = [...document.querySelectorAll(".agents tr")];
    return rows.find((row) => row.innerText.includes("agent:yew"))?.querySelector(".alive").innerText;
"""


def test_the_death_of_a_holder_shows_although_no_record_changes(pages: Pages, sample: Sample) -> None:
    browser, command = pages.browser, [sys.executable, "-c", HOLDS, str(sample.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        pages.go("overview")
        pages.wait_until_live()
        browser.wait_until(lambda: browser.run(IS_ALIVE) == "alive", "the holder is alive")
        process.kill()
        browser.wait_until(lambda: browser.run(IS_ALIVE) == "dead", "the holder is dead")


def test_a_page_keeps_what_somebody_types_while_it_changes(pages: Pages, tracker: Tracker, sample: Sample) -> None:
    pages.go(f"issue/{sample.issues['docs']}")
    pages.wait_until_live()
    browser = pages.browser
    browser.run("document.querySelector('aside details').open = true")
    title = browser.find("input[name=title]")
    title.clear()
    title.send_keys("Half a tit")
    tracker.update(sample.issues["docs"], Update(add_labels=("seen",)))
    browser.wait_for_text("seen", "aside dl")
    assert title.get_attribute("value") == "Half a tit"
    assert browser.run("return document.querySelector('aside details').open")


def test_an_action_says_the_command_and_changes_the_page(pages: Pages, tracker: Tracker) -> None:
    browser = pages.browser
    pages.go("new")
    browser.find("input[name=title]").send_keys("Count the gulls")
    browser.find("form.action button").click()
    browser.wait_until(lambda: "/issue/" in browser.driver.current_url, "the new issue is shown")
    browser.wait_for_text("Count the gulls", "h1")
    browser.wait_for_text("holdfast issue create -- 'Count the gulls'", "#toast")
    browser.find("form[data-action=claim] button").click()
    browser.wait_for_text("holdfast issue claim", "#toast")
    browser.wait_for_text("human:ada", "aside")
    browser.wait_for_text("In progress", "aside")


DRAG = """
    const card = document.querySelector(`[data-issue="${arguments[0]}"]`);
    const goal = document.querySelector(`#${arguments[1]} .cards`);
    const data = new DataTransfer();
    const how = {bubbles: true, cancelable: true, dataTransfer: data};
    const fire = (target, name) => target.dispatchEvent(new DragEvent(name, how));
    fire(card, "dragstart"); fire(goal, "dragover"); fire(goal, "drop"); fire(card, "dragend");
"""


def test_dragging_a_card_moves_its_issue(pages: Pages, tracker: Tracker) -> None:
    issue = tracker.create(NewIssue(title="Tar the hull"))
    browser = pages.browser
    pages.go("board")
    for column in ("gated", "backlog"):  # an issue gets there by facts alone: its gates and its dependencies
        browser.run(DRAG, issue.id, column)
    browser.run(DRAG, issue.id, "in_progress")
    browser.wait_for_text("Tar the hull", "#in_progress")
    assert [each.record.type for each in tracker.events() if each.record.issue_id == issue.id][1:] == [
        "issue_state_changed"
    ]
    browser.run(DRAG, issue.id, "done")
    browser.wait_for_text("Tar the hull", "#done")
    assert tracker.issue(issue.id).state.value == "done"


def test_a_page_connects_again_when_the_server_was_restarted(
    browser: Browser, sample: Sample, tracker: Tracker, tmp_path: Path
) -> None:
    with serving([sample.root], tmp_path) as server:
        pages = Pages(browser, server)
        pages.go("board")
        pages.wait_until_live()
        port = server.port
    browser.wait_until(lambda: browser.find("#live").get_attribute("class") == "live off", "the page says so")
    first = browser.driver.current_window_handle
    with serving([sample.root], tmp_path, port=port) as server:
        browser.driver.switch_to.new_window("tab")
        browser.open(server.one_time_address)  # the token of the earlier start is worthless
        browser.driver.close()
        browser.driver.switch_to.window(first)
        pages.wait_until_live()
        tracker.create(NewIssue(title="Ring the bell"))
        browser.wait_for_text("Ring the bell")


def test_the_timeline_shows_what_was_held_at_a_moment(pages: Pages) -> None:
    browser = pages.browser
    pages.go("timeline")
    browser.run(
        """
        const svg = document.querySelector("#timeline .times"), box = svg.getBoundingClientRect();
        const at = {bubbles: true, clientX: box.right - 20, clientY: box.top + 40};
        svg.dispatchEvent(new PointerEvent("pointermove", at));
        svg.dispatchEvent(new MouseEvent("click", at));
        """
    )
    browser.wait_until(lambda: "at=" in browser.driver.current_url, "the moment is in the address")
    browser.wait_for_text("Held at")
    browser.wait_for_text("agent:maple", "#then")
    browser.wait_for_text("Parse durations with units", "#issues-then ul")
    assert "In progress" in browser.text("#issues-then .legend")


def test_a_batch_shows_how_it_was_bisected_and_its_logs(pages: Pages) -> None:
    browser = pages.browser
    pages.go("landing")
    assert "4 entries onto main" in browser.text("#batches h3")
    tested = [each.text for each in browser.all("#batches .tested")]
    assert tested == ["1 to 4 of 4"] * 2 + ["1 to 2 of 4"] + ["3 of 4"] * 2 + ["4 of 4"]
    results = [each.text for each in browser.all("#batches td:nth-child(2)")]
    assert results == ["failed", "failed", "passed", "failed", "failed", "passed"]
    assert [each.text for each in browser.all("#batches .members .state")] == ["landed", "landed", "failed", "landed"]
    browser.find("#batches tbody tr:first-child a").click()
    browser.wait_for_text("dredge-the-basin.py:1:print('leak')", "pre.log")


def test_the_log_of_a_run_grows_on_the_page(pages: Pages, sample: Sample, tmp_path: Path) -> None:
    """The check waits until the page has shown its first line."""
    browser = pages.browser
    change(sample.root, CHECKS, [f"echo be''gun; until test -e {tmp_path}/seen; do sleep 0.05; done; echo ov''er"])
    try:
        with Repository(sample.root, actor="agent:rowan") as repository:
            landings = Landings(repository, actor="agent:rowan")
            git("branch", "drift", at=sample.checkout)
            entry = enqueue(landings, repository, "sweep", "broom", branch="drift")
            pages.go(f"landing/{entry.landing_id}")
            pages.wait_until_live()
            thread = threading.Thread(target=landings.work_off, args=("drift",))
            thread.start()
            try:
                browser.wait_for_text("begun", "pre.log")
                assert "over" not in browser.text("pre.log")
            finally:
                (tmp_path / "seen").touch()
                thread.join(PATIENCE)
        browser.wait_for_text("over", "pre.log")
        browser.wait_for_text("landed", "dl")
    finally:
        change(sample.root, CHECKS, [])


def test_the_one_time_address_works_as_a_link_on_a_page_of_another_site(
    browser: Browser, server: WebServer, tmp_path: Path
) -> None:
    """As in a web terminal, a chat or a mail: a strict cookie is not sent with what such a page requests."""
    (tmp_path / "chat.html").write_text(f'<a href="{server.one_time_address}">come in</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    browser.driver.delete_all_cookies()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            browser.open(f"http://localhost:{other.server_port}/chat.html")
            browser.find("a").click()
            browser.wait_for_text("Agents")
        finally:
            other.shutdown()
            thread.join(PATIENCE)


def test_a_part_that_is_refused_stays_as_it_is(pages: Pages) -> None:
    browser = pages.browser
    pages.go("overview")
    before = browser.text(".agents")
    browser.driver.delete_all_cookies()  # as after a restart of the server
    answers = """
        const [done, fetched] = [arguments[0], window.fetch];
        const asked = [];
        window.fetch = (...words) => { const answer = fetched(...words); asked.push(answer); return answer; };
        document.dispatchEvent(new Event("visibilitychange"));
        for (const each of document.querySelectorAll("[data-src]")) delete each.dataset.loaded;
        import(document.querySelector("script[src*='app.js']").src + "&again").then(async () => {
            const found = (await Promise.all(asked)).map((each) => each.status);
            setTimeout(() => done(found), 0);
        });
    """
    assert set(browser.driver.execute_async_script(answers)) == {401}
    assert browser.text(".agents") == before
    assert "Refused" not in browser.text()


def test_a_diff_of_two_snapshots_is_not_made_again(pages: Pages, tracker: Tracker, sample: Sample) -> None:
    browser = pages.browser
    worktree = f"issue-{sample.issues['parser'][:8]}"
    pages.go(f"worktree/{worktree}")
    browser.find(".snapshots li a").click()
    browser.wait_for_text("units.md")
    pages.wait_until_live()
    browser.run(
        """
        window.asked = [];
        const fetched = window.fetch;
        window.fetch = (...words) => { asked.push(String(words[0])); return fetched(...words); };
        new BroadcastChannel("holdfast").onmessage = ({data}) => { window.heard ||= Boolean(data.change); };
        """
    )
    tracker.create(NewIssue(title="Count the waves"))
    browser.wait_until(lambda: browser.run("return window.heard"), "the tab heard of the change")
    assert browser.run("return window.asked") == []
