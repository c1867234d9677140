"""Pictures of every page: light, dark and narrow. `--docs` writes the six of the documentation.

They show the sample repository, so they differ only in ids and times from run to run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.browser import Browser, started_browser
from tests.web.served import serving
from tools.sample_repository import Sample, many_issues, sample_repository

ROOT = Path(__file__).parents[1]
COMPLETE = "return !document.querySelector('main [aria-busy]:not(details:not([open]) *)')"
FITTED = "graph-500-fitted"
WIDE, NARROW = (1280, 800), (390, 800)


class Look(NamedTuple):
    """How a page is looked at."""

    name: str
    size: tuple[int, int]
    dark: bool


LOOKS = (Look("light", WIDE, False), Look("dark", WIDE, True), Look("narrow", NARROW, False))
IN_DOCS = {
    "overview-light": "overview",
    "board-light": "board",
    "graph-dark": "graph",
    "timeline-light": "timeline",
    "diff-dark": "diff",
    "overview-narrow": "narrow",
}
"""The pictures of the documentation, with their names there."""


def addresses(sample: Sample) -> dict[str, str]:
    worktree = f"issue-{sample.issues['parser'][:8]}"
    names = ("overview", "board", "graph", "landing", "worktrees", "ledger", "audit", "doctor", "new")
    return {
        **{name: f"harbour/{name}" for name in names},
        "issue": f"harbour/issue/{sample.issues['gate']}",
        "run": f"harbour/run/{sample.runs[0]}",
        "worktree": f"harbour/worktree/{worktree}",
        "diff": f"harbour/diff?worktree={worktree}&old=head~1&new=head",
        "graph-500": "fleet/graph?all=yes",
        FITTED: "fleet/graph?all=yes",
        "timeline": f"harbour/timeline?last=1m&at={time.time():.0f}",
    }


def take(browser: Browser, target: Path, base: str, sample: Sample, *, docs: bool) -> None:
    for name, address in addresses(sample).items():
        for look in LOOKS:
            if docs and f"{name}-{look.name}" not in IN_DOCS:
                continue
            browser.size(*look.size)
            browser.dark(on=look.dark)
            browser.open(f"{base}/r/{address}")
            browser.wait_until(lambda: browser.run(COMPLETE), f"{name} is complete")
            if name == FITTED:
                browser.find("[data-zoom=fit]").click()
            browser.wait_until(lambda: browser.find("#live").get_attribute("class") == "live on", "live")
            browser.driver.save_screenshot(str(target / f"{name}-{look.name}.png"))


@contextlib.contextmanager
def in_home(place: Path) -> Iterator[Sample]:
    """The sample in a home directory of its own, so that the pages name it `~/harbour`."""
    os.environ.update(HOME=str(place), XDG_DATA_HOME=str(place / "data"))
    with sample_repository(place) as sample:
        yield sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write docs/images instead")
    docs = parser.parse_args().docs
    target = Path(tempfile.mkdtemp()) if docs else ROOT / "build/screenshots"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, in_home(Path(place)) as sample:
        roots = [sample.root, many_issues(Path(place), 500)]
        with serving(roots, Path(place) / "data", home=Path(place)) as server, started_browser() as browser:
            browser.open(server.one_time_address)
            time.sleep(20 if docs else 0)  # so that the timeline has something to show
            take(browser, target, f"http://127.0.0.1:{server.port}", sample, docs=docs)
    if docs:
        (ROOT / "docs/images").mkdir(exist_ok=True)
        for made, name in IN_DOCS.items():
            shutil.copy(target / f"{made}.png", ROOT / f"docs/images/web-{name}.png")
    print(ROOT / "docs/images" if docs else target)


if __name__ == "__main__":
    main()
