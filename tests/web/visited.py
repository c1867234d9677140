"""Pages as a browser visits them, and what axe says about them."""

from __future__ import annotations

from importlib import resources
from typing import Any

from holdfast.web.contents import PAGES
from holdfast.web.server import WebServer
from tests.support.browser import PATIENCE, Browser
from tools.sample_repository import Sample

LOADED = """
    const waiting = (each) => !each.dataset.loaded && !each.closest("details:not([open])");
    return document.readyState === "complete" && ![...document.querySelectorAll("main [data-src]")].some(waiting);
"""
AXE = """
    const done = arguments[0];
    axe.run(document, {resultTypes: ["violations"]}).then(
        (found) => done(found.violations), (error) => done([{impact: "critical", id: String(error)}]));
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


def every_page(sample: Sample) -> list[str]:
    worktree = f"issue-{sample.issues['parser'][:8]}"
    names = {"issue": f"/{sample.issues['gate']}", "worktree": f"/{worktree}", "run": f"/{sample.runs[0]}"}
    listed = [each + names.get(each, "") for each in PAGES if each != "diff"]
    return [*listed, f"landing/{sample.entries[0]}", f"diff?worktree={worktree}&old=head~1"]


def findings(browser: Browser) -> list[tuple[str, list[str]]]:
    """What axe finds in the page that keeps somebody from using it, or makes it hard."""
    browser.run((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    browser.driver.set_script_timeout(PATIENCE)
    found: list[dict[str, Any]] = browser.driver.execute_async_script(AXE)
    return [(each["id"], [node["html"][:200] for node in each.get("nodes", [])][:3]) for each in found]
