"""Export: the pages as one file that needs no server, no network and no script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.clock import format_instant
from holdfast.errors import Failure
from holdfast.fs import durable
from holdfast.issues import rules
from holdfast.web.contents import PAGES, PARTS
from holdfast.web.html import Child, Html, document, embedded, h
from holdfast.web.layout import PAGES as IN_NAVIGATION
from holdfast.web.layout import PageRequest, address, static_files
from holdfast.web.workspaces import Workspace

MOST_ISSUES = 1_000
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""In a file, the style is inside; scripts, pictures and requests stay impossible."""


def export_pages(workspaces: Sequence[Workspace], path: Path) -> int:
    """Write the pages of these workspaces to a file, and return its size. An earlier file is replaced at once."""
    content = document(exported(workspaces, time.time()))
    durable.replace(path, content)
    return len(content)


def exported(workspaces: Sequence[Workspace], now: float) -> Html:
    """The pages of these workspaces as one page."""
    for workspace in workspaces:
        workspace.is_exported = True
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
"""


def _part(name: str, asked: PageRequest) -> Html:
    try:
        return PARTS[name](asked)
    except Failure as failure:
        return h("p", failure.message, class_="dim")


def _links(workspace: Workspace) -> Html:
    links = [h("a", title, href=address(workspace, name)) for name, title, _ in IN_NAVIGATION]
    return h("nav", h("span", workspace.label, class_="workspace"), links, aria_label=workspace.label)


def _workspace(asked: PageRequest) -> list[Child]:
    found: list[Child] = [_section(asked, name) for name, _, _ in IN_NAVIGATION]
    try:
        issues = asked.workspace.issues()
    except Failure:
        return found
    unfinished = [each.id for each in issues if each.state not in rules.FINISHED]
    finished = [each.id for each in issues if each.state in rules.FINISHED]
    chosen = [*unfinished, *reversed(finished)][:MOST_ISSUES]
    return [*found, *(_section(asked._replace(name=each), "issue") for each in chosen)]


def _section(asked: PageRequest, name: str) -> Html:
    place = address(asked.workspace, name, asked.name).removeprefix("#")
    try:
        page = PAGES[name](asked)
    except Failure as failure:
        return h(
            "section", h("h1", name.capitalize()), h("p", failure.message, class_="dim"), class_="exported", id=place
        )
    heading = h("div", h("h1", page.title), h("div", page.lead, class_="lead") if page.lead else None, class_="heading")
    return h("section", heading, page.body, class_="exported", id=place)


def _missing(name: str, why: str, place: str) -> Html:
    return h("section", h("h1", name.capitalize()), h("p", why, class_="dim"), class_="exported", id=place)
