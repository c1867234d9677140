"""The pages in a real browser: every page, keys, live changes, several tabs, a restarted server, accessibility."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from holdfast.issues.creating import NewIssue
from holdfast.issues.tracker import Tracker, Update
from holdfast.repository.landing import Landings
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.repository.settings import CHECKS, change
from holdfast.web.contents import PAGES
from holdfast.web.layout import PAGES as IN_NAVIGATION
from holdfast.web.server import WebServer
from tests.cli.commands import holdfast
from tests.support.browser import DOWN, ENTER, ESCAPE, PATIENCE, Browser
from tests.support.homes import git
from tests.web.served import serving
from tools.sample_repository import Sample, enqueue

LOADED = """
    const waiting = (each) => !each.dataset.loaded && !each.closest("details:not([open])");
    return document.readyState === "complete" && ![...document.querySelectorAll("main [data-src]")].some(waiting);
"""
AXE = """
    const done = arguments[0];
    axe.run(document, {resultTypes: ["violations"]}).then(
        (found) => done(found.violations), (error) => done([{impact: "critical", id: String(error)}]));
"""


SHIFTS = """
    const done = arguments[0];
    let total = 0;
    const add = (found) => { for (const each of found) total += each.value; };
    const observer = new PerformanceObserver((list) => add(list.getEntries()));
    observer.observe({type: "layout-shift", buffered: true});
    setTimeout(() => { add(observer.takeRecords()); done(total); }, 100);
"""


class Pages:
    """A browser that was let in by a server."""

    def __init__(self, browser: Browser, server: WebServer, slug: str = "harbour") -> None:
        self.browser = browser
        self.base = f"http://127.0.0.1:{server.port}"
        self.slug = slug
        browser.open(server.one_time_address)

    def go(self, page: str) -> None:
        self.browser.open(f"{self.base}/r/{self.slug}/{page}")
        self.browser.wait_until(lambda: self.browser.run(LOADED), f"{page} is complete")

    def wait_until_live(self) -> None:
        self.browser.wait_until(lambda: self.browser.find("#live").get_attribute("class") == "live on", "live")


@pytest.fixture
def pages(browser: Browser, server: WebServer) -> Iterator[Pages]:
    browser.size(1360, 860)
    browser.dark(on=False)
    made = Pages(browser, server)
    browser.complaints()
    yield made
    with contextlib.suppress(Exception):
        browser.driver.execute_script("localStorage.clear()")


@pytest.fixture
def tracker(sample: Sample) -> Tracker:
    return open_tracker(sample.root, actor="human:ada")


def every_page(sample: Sample) -> list[str]:
    worktree = f"issue-{sample.issues['parser'][:8]}"
    names = {"issue": f"/{sample.issues['gate']}", "worktree": f"/{worktree}", "run": f"/{sample.runs[0]}"}
    return [each + names.get(each, "") for each in PAGES if each != "diff"] + [f"diff?worktree={worktree}&old=head~1"]


def serious_findings(browser: Browser) -> list[tuple[str, list[str]]]:
    """What axe finds in the page that would keep somebody from using it."""
    browser.run((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    browser.driver.set_script_timeout(PATIENCE)
    found: list[dict[str, Any]] = browser.driver.execute_async_script(AXE)
    return [
        (each["id"], [node["html"][:200] for node in each.get("nodes", [])][:3])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


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


def test_what_people_use_most_has_no_serious_finding_of_axe(pages: Pages, sample: Sample) -> None:
    for each in ("overview", "board", f"issue/{sample.issues['gate']}"):
        pages.go(each)
        assert serious_findings(pages.browser) == [], each


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_has_a_serious_finding_of_axe(pages: Pages, sample: Sample, dark: bool) -> None:
    pages.browser.dark(on=dark)
    for each in every_page(sample):
        pages.go(each)
        assert serious_findings(pages.browser) == [], each


def test_a_planted_fault_is_found(pages: Pages) -> None:
    pages.go("overview")
    pages.browser.run("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button>')")
    assert [name for name, _ in serious_findings(pages.browser)] == ["button-name"]
    pages.browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"https://evil.example/x.png\">')")
    pages.browser.wait_until(pages.browser.complaints, "the browser complains about the picture")


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
    browser.find("form[data-action=claim] button").click()
    browser.wait_for_text("holdfast issue claim", "#toast")
    browser.wait_for_text("human:ada", "aside")
    browser.wait_for_text("In progress", "aside")


def test_dragging_a_card_moves_its_issue(pages: Pages, tracker: Tracker) -> None:
    issue = tracker.create(NewIssue(title="Tar the hull"))
    browser = pages.browser
    pages.go("board")
    browser.run(
        """
        const card = document.querySelector(`[data-issue="${arguments[0]}"]`);
        const goal = document.querySelector("#done .cards");
        const data = new DataTransfer();
        const how = {bubbles: true, cancelable: true, dataTransfer: data};
        const fire = (target, name) => target.dispatchEvent(new DragEvent(name, how));
        fire(card, "dragstart"); fire(goal, "dragover"); fire(goal, "drop"); fire(card, "dragend");
        """,
        issue.id,
    )
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
        const svg = document.querySelector("#timeline svg"), box = svg.getBoundingClientRect();
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


def test_the_graph_is_moved_and_zoomed(pages: Pages) -> None:
    browser = pages.browser
    pages.go("graph")
    box = "return document.querySelector('#graph svg').getAttribute('viewBox')"
    before = browser.run(box)
    browser.find("[data-zoom='0.8']").click()
    assert browser.run(box) != before
    browser.find("[data-zoom=fit]").click()
    assert browser.run(box) == before
    assert len(browser.all(".edge.critical")) == 4


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


def test_an_exported_file_needs_nothing(browser: Browser, sample: Sample, tmp_path: Path) -> None:
    made = holdfast("web", "--export", tmp_path / "all.html", "--json", cwd=sample.checkout)
    assert json.loads(made.stdout)["data"]["bytes"] == (tmp_path / "all.html").stat().st_size
    browser.open(f"file://{tmp_path}/all.html")
    assert browser.complaints() == []
    for text in ("agent:maple", "The chain is intact", "Parse durations with units"):
        assert text in browser.text("body")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
