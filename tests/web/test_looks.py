"""The pages in a real browser as people see and touch them: wide, dark and narrow, by keyboard and with fingers; and
with axe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.web.layout import PAGES as IN_NAVIGATION
from tests.support.browser import TAB, Browser
from tests.web.visited import Pages, every_page, findings
from tools.sample_repository import Sample

WIDE, NARROW = (1360, 860), (390, 800)
OVERFLOW = "return document.documentElement.scrollWidth - innerWidth"
VIEW = "return document.querySelector('#graph svg').getAttribute('viewBox')"
IN_SIGHT = """
    const inner = document.querySelector(arguments[0]).getBoundingClientRect();
    const outer = document.querySelector(arguments[1]).getBoundingClientRect();
    return inner.left >= outer.left - 1 && inner.right <= outer.right + 1
        && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
"""


def test_what_people_use_most_has_no_finding_of_axe(pages: Pages, sample: Sample) -> None:
    for each in ("overview", "board", f"issue/{sample.issues['gate']}"):
        pages.go(each)
        assert findings(pages.browser) == [], each


@pytest.mark.long
@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (WIDE, True), (NARROW, False)])
def test_no_page_has_a_finding_of_axe(pages: Pages, sample: Sample, size: tuple[int, int], dark: bool) -> None:
    pages.browser.size(*size)
    pages.browser.dark(on=dark)
    for each in every_page(sample):
        pages.go(each)
        assert findings(pages.browser) == [], each


def test_a_planted_fault_is_found(pages: Pages) -> None:
    pages.go("overview")
    pages.browser.run("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button>')")
    assert [name for name, _ in findings(pages.browser)] == ["button-name"]
    pages.browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=\"https://evil.example/x.png\">')")
    pages.browser.wait_until(pages.browser.complaints, "the browser complains about the picture")


# --- Narrow ---


def test_no_page_is_wider_than_a_narrow_screen(pages: Pages, sample: Sample) -> None:
    pages.browser.size(*NARROW)
    for each in every_page(sample):
        pages.go(each)
        assert pages.browser.run(OVERFLOW) <= 0, each
    pages.browser.run("document.querySelector('main').append('x'.repeat(200))")
    assert pages.browser.run(OVERFLOW) > 0  # planted


def test_the_current_page_is_in_sight_in_a_narrow_navigation(pages: Pages) -> None:
    pages.browser.size(*NARROW)
    for name, _, _ in IN_NAVIGATION:
        pages.go(name)
        assert pages.browser.run(IN_SIGHT, "nav a[aria-current]", "nav"), name


def test_the_names_of_the_timeline_stay_in_sight(pages: Pages) -> None:
    browser = pages.browser
    browser.size(*NARROW)
    pages.go("timeline")
    for place in ("0", "100000"):
        browser.run(f"document.getElementById('timeline').scrollLeft = {place}")
        assert browser.run(IN_SIGHT, ".names text", "#timeline"), place
    assert browser.run("return document.getElementById('timeline').scrollLeft") > 0
    before = browser.driver.current_url
    browser.run(
        """
        const box = document.querySelector(".names").getBoundingClientRect();
        const at = {bubbles: true, clientX: box.left + 20, clientY: box.top + 40};
        document.querySelector(".names").dispatchEvent(new MouseEvent("click", at));
        """
    )
    assert browser.driver.current_url == before, "a name is no moment"


def test_the_labels_of_the_axis_are_inside_the_picture(pages: Pages) -> None:
    pages.go("timeline?last=1m")
    cut = """
        const box = document.querySelector(".times").getBoundingClientRect();
        const labels = [...document.querySelectorAll(".times g > text.small")];
        const boxes = labels.map((each) => each.getBoundingClientRect());
        return [boxes.length, boxes.filter((each) => each.right > box.right || each.left < box.left).length];
    """
    count, outside = pages.browser.run(cut)
    assert count > 5
    assert outside == 0


def _tree(browser: Browser) -> list[dict[str, Any]]:
    """What a screen reader gets."""
    nodes: list[dict[str, Any]] = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    return [each for each in nodes if not each.get("ignored")]


def test_folded_tables_need_no_scrolling_sideways(pages: Pages, sample: Sample) -> None:
    pages.browser.size(*NARROW)
    tables = "return [...document.querySelectorAll('main .scroll:has(> .folds)')]"
    for page in ("worktrees", "landing", "ledger", "audit", "overview", f"issue/{sample.issues['gate']}"):
        pages.go(page)
        assert pages.browser.run(f"{tables}.length") > 0, page
        assert pages.browser.run(f"{tables}.filter((each) => each.scrollWidth > each.clientWidth).length") == 0, page
    pages.browser.run("document.querySelector('.folds td').append('x'.repeat(200))")
    assert pages.browser.run(f"{tables}.filter((each) => each.scrollWidth > each.clientWidth).length") == 1  # planted


def test_a_folded_table_is_still_a_table_and_names_its_cells(pages: Pages) -> None:
    browser = pages.browser
    browser.size(*NARROW)
    pages.go("overview")
    roles = [each["role"]["value"] for each in _tree(browser)]
    rows = len(browser.all(".agents tbody tr"))
    assert rows > 3
    assert roles.count("columnheader") >= 8
    assert roles.count("row") >= rows + 1
    title = "return getComputedStyle(document.querySelector(arguments[0]), '::before').content"
    assert "Since" in browser.run(title, ".agents td:nth-child(4)")
    empty = browser.run("return [...document.querySelectorAll('.agents td')].filter((e) => e.innerText === '\\u2013')")
    assert empty
    assert not any(each.is_displayed() for each in empty)


# --- Themes ---


def test_the_theme_is_chosen_before_anything_is_drawn(pages: Pages) -> None:
    pages.go("overview")
    pages.browser.run("localStorage.setItem('holdfast-theme', 'dark')")
    script = """
        new MutationObserver((_, observer) => {
            if (!document.body) return;
            window.themeAtFirst = document.documentElement.dataset.theme;
            observer.disconnect();
        }).observe(document, {childList: true, subtree: true});
    """
    devtools = pages.browser.driver.execute_cdp_cmd
    added = devtools("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        pages.go("board")
    finally:
        devtools("Page.removeScriptToEvaluateOnNewDocument", added)
    assert pages.browser.run("return window.themeAtFirst") == "dark"


# --- The graph ---


def test_the_graph_is_moved_and_zoomed(pages: Pages) -> None:
    browser = pages.browser
    pages.go("graph")
    before = browser.run(VIEW)
    browser.find("[data-zoom='0.8']").click()
    assert browser.run(VIEW) != before
    browser.find("[data-zoom=fit]").click()
    assert browser.run(VIEW) == before
    assert len(browser.all(".edge.critical")) == 4


def test_the_view_of_the_graph_follows_the_focus(pages: Pages) -> None:
    browser = pages.browser
    pages.go("graph")
    for _ in range(5):
        browser.find("[data-zoom='0.8']").click()
    browser.find("[data-zoom=fit]").send_keys(TAB)  # to the first issue
    count = len(browser.all("#graph .node"))
    assert count > 5
    for number in range(count):
        assert browser.run("return document.activeElement.matches('#graph .node')"), number
        assert browser.run(IN_SIGHT, ".node:focus .box", "#graph svg"), number
        browser.press(TAB)


def _touch(browser: Browser, *places: list[tuple[int, int]]) -> None:
    """Put fingers on the first places, and move them to the others."""
    for number, fingers in enumerate([*places, []]):
        kind = "touchStart" if number == 0 else "touchMove" if fingers else "touchEnd"
        points = [{"x": x, "y": y, "id": each} for each, (x, y) in enumerate(fingers)]
        browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})


def test_one_finger_scrolls_the_page_and_two_zoom_the_graph(pages: Pages) -> None:
    browser = pages.browser
    devtools = browser.driver.execute_cdp_cmd
    browser.size(390, 500)
    devtools("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    try:
        pages.go("graph")
        browser.run("scrollTo(0, 0)")
        before = browser.run(VIEW)
        box = browser.run("const b = document.querySelector('#graph svg').getBoundingClientRect(); return [b.x, b.y]")
        x, y = round(box[0]) + 150, round(box[1]) + 120
        _touch(browser, *([(x, y - 10 * each)] for each in range(12)))
        browser.wait_until(lambda: browser.run("return scrollY") > 20, "the page is scrolled")
        assert browser.run(VIEW) == before
        browser.run("scrollTo(0, 0)")
        _touch(browser, *([(x - each, y), (x + each, y)] for each in (30, 60, 90)))
        left, right = (float(each.split()[2]) for each in (before, browser.run(VIEW)))
        assert right < 0.6 * left
        assert browser.run("return visualViewport.scale") == 1
        assert browser.complaints() == []
    finally:
        devtools("Emulation.setTouchEmulationEnabled", {"enabled": False})


# --- The export ---


def test_an_exported_file_fits_and_its_links_lead_somewhere(browser: Browser, sample: Sample, exported: Path) -> None:
    browser.size(*WIDE)
    browser.open(f"file://{exported}")
    dead = """
        const links = [...document.querySelectorAll("a[href]")].map((each) => each.getAttribute("href"));
        return [links.length, links.filter((each) => !document.getElementById(each.slice(1)))];
    """
    count, without = browser.run(dead)
    assert count > 100
    assert without == []
    for place in (f"landing-{sample.entries[0]}", f"run-{sample.runs[0]}", "worktree-aspen"):
        assert browser.all(f"a[href='#harbour-{place}']"), place
    middle = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return b.top + b.height / 2"
    assert abs(browser.run(middle, "nav .workspace") - browser.run(middle, "nav a")) < 2
    browser.size(*NARROW)
    assert browser.run(OVERFLOW) <= 0
    assert browser.find("nav .workspace").size["width"] > 20, "the name of the repository is not squeezed"


def test_an_exported_file_needs_nothing(browser: Browser, exported: Path) -> None:
    browser.open(f"file://{exported}")
    assert browser.complaints() == []
    for text in ("agent:maple", "The chain is intact", "Parse durations with units"):
        assert text in browser.text("body")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
