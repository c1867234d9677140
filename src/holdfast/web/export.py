"""Export: the pages as one file that needs no server, no network and no script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.fs import durable
from holdfast.issues import rules
from holdfast.repository.landing_checks import check_runs
from holdfast.web.contents import PAGES, PARTS
from holdfast.web.html import Html, document, embedded, h
from holdfast.web.layout import PAGES as IN_NAVIGATION
from holdfast.web.layout import Page, PageRequest, address, place_of, static_files
from holdfast.web.pages.landing import MOST_RUNS
from holdfast.web.workspaces import Workspace

MOST_ISSUES, MOST_OTHERS = 1_000, 200  # of worktrees and of entries of queues
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The file contains its style; scripts, pictures and requests are blocked."""


def export_pages(workspaces: Sequence[Workspace], path: Path) -> int:
    """Write the pages of these workspaces to a file, and return its size. An earlier file is replaced at once."""
    content = document(exported(workspaces, time.time()))
    durable.replace(path, content)
    return len(content)


def exported(workspaces: Sequence[Workspace], now: float) -> Html:
    """The pages of these workspaces as one page."""
    title = " · ".join(["Holdfast", *(each.label for each in workspaces)])
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=POLICY),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("title", title),
        embedded("style", static_files()["style.css"].decode() + _STYLE),
    )
    at = format_instant(now)
    lead = h("p", f"As of {at[:19].replace('T', ' ')} UTC", class_="lead")
    content = [
        _workspace(PageRequest(workspace, workspaces, {}, now, writable=False, part=_part)) for workspace in workspaces
    ]
    top = h(
        "header", h("strong", "Holdfast", class_="brand"), [_links(workspace) for workspace in workspaces], class_="top"
    )
    return h("html", head, h("body", top, h("main", lead, content, id="main")), lang="en")


_STYLE = """
.filter, .compare, .tools, .snapshots input { display: none; }
.exported { padding-top: 56px; margin-top: -32px; border-bottom: 1px solid var(--line); }
.graph > svg { cursor: default; }
.timeline { cursor: default; }
.more, .button:not([href]) { display: none; }
"""


def _part(name: str, asked: PageRequest) -> Html:
    try:
        return PARTS[name](asked)
    except Failure as failure:
        return h("p", failure.message, class_="dim")


def _links(workspace: Workspace) -> Html:
    links = [h("a", title, href=address(workspace, name)) for name, title, _ in IN_NAVIGATION]
    return h("nav", h("span", workspace.label, class_="workspace"), links, aria_label=workspace.label)


def _workspace(asked: PageRequest) -> list[Html]:
    """The pages of a workspace. Their names are collected first, so that links lead only to pages in the file."""
    pages = [
        *((name, "") for name, _, _ in IN_NAVIGATION),
        *_names("issue", _issues, asked.workspace),
        *_names("worktree", _worktrees, asked.workspace),
        *_names("landing", _entries, asked.workspace),
        *_names("run", _runs, asked.workspace),
    ]
    asked.workspace.exported = frozenset(place_of(*each) for each in pages)
    return [_section(asked._replace(name=name), page) for page, name in pages]


def _names(page: str, find: Callable[[Workspace], Iterable[str]], workspace: Workspace) -> list[tuple[str, str]]:
    with contextlib.suppress(Failure):  # there is no tracker, or no queue
        return [(page, name) for name in find(workspace)]
    return []


def _issues(workspace: Workspace) -> list[str]:
    issues = workspace.issues()
    unfinished = [each.id for each in issues if each.state not in rules.FINISHED]
    finished = [each.id for each in issues if each.state in rules.FINISHED]
    return [*unfinished, *reversed(finished)][:MOST_ISSUES]


def _worktrees(workspace: Workspace) -> list[str]:
    with workspace.repository() as repository:
        return [each.config.worktree_id for each in repository.worktrees.states()][:MOST_OTHERS]


def _entries(workspace: Workspace) -> list[str]:
    with workspace.landings() as landings:
        return [each.landing_id for each in reversed(landings.all())][:MOST_OTHERS]


def _runs(workspace: Workspace) -> list[str]:
    with workspace.repository() as repository:
        return [each.run_id for each in islice(check_runs(repository.paths), MOST_RUNS)]


def _section(asked: PageRequest, name: str) -> Html:
    place = f"{asked.workspace.slug}-{place_of(name, asked.name)}"
    try:
        page = PAGES[name](asked)
    except Failure as failure:
        page = Page(name.capitalize(), name, h("p", failure.message, class_="dim"))
    heading = h("div", h("h1", page.title), h("div", page.lead, class_="lead") if page.lead else None, class_="heading")
    return h("section", heading, page.body, class_="exported", id=place)
