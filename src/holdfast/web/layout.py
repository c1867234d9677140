"""The frame of every page, and the pieces that pages share: times, states, tables, empty states, commands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple
from urllib.parse import urlencode

from holdfast import __version__
from holdfast.clock import format_duration, parse_instant
from holdfast.fs.names import shortened
from holdfast.issues.model import Issue, State
from holdfast.web.html import Child, Html, document, h, join
from holdfast.web.workspaces import REMEMBERED, Workspace

SHORT = 8
REMEMBERED_MS = int(1000 * REMEMBERED)
NOT_KNOWN = "\u2013"  # a dash in a table
PAGES = (
    ("overview", "Overview", "o"),
    ("board", "Board", "b"),
    ("graph", "Graph", "d"),
    ("landing", "Landing", "l"),
    ("worktrees", "Worktrees", "w"),
    ("timeline", "Timeline", "t"),
    ("ledger", "Ledger", "e"),
    ("audit", "Audit", "a"),
    ("doctor", "Doctor", "x"),
)
"""The pages with a place in the navigation: name in addresses, title, and the key after `g`."""
STATES = {
    State.BACKLOG: "Backlog",
    State.READY: "Ready",
    State.IN_PROGRESS: "In progress",
    State.GATED: "Gated",
    State.DONE: "Done",
    State.REJECTED: "Rejected",
    State.ARCHIVED: "Archived",
}


class PageRequest(NamedTuple):
    """A request for a page: the workspace, the rest of the address after the name of the page, the query, and the time.
    With `part`, the page is for a file, which cannot request anything later."""

    workspace: Workspace
    workspaces: Sequence[Workspace]
    query: Mapping[str, str]
    now: float
    writable: bool
    name: str = ""
    part: Callable[[str, PageRequest], Html] | None = None


class Page(NamedTuple):
    """A page: `body` goes inside the frame. `page` marks the place in the navigation; `command` shows the same in a
    terminal; `scripts` are files in `static/`. A final page never changes."""

    title: str
    page: str
    body: Child
    command: str = ""
    lead: Child = ""
    scripts: tuple[str, ...] = ()
    is_final: bool = False


@cache
def static_files() -> dict[str, bytes]:
    """Our scripts, styles and pictures by name. Nothing else is ever served as a file."""
    place = resources.files("holdfast.web") / "static"
    return {each.name: each.read_bytes() for each in place.iterdir() if "." in each.name}


@cache
def static_address(name: str) -> str:
    """The address of one of our files, which changes with its content."""
    return f"/static/{name}?v={hashlib.sha256(static_files()[name]).hexdigest()[:12]}"


def path_of(workspace: Workspace, page: str, name: str = "", /, **query: str | None) -> str:
    """The path of a page on the server. Names are safe names, or else the query has them."""
    given = {key.rstrip("_"): value for key, value in query.items() if value}
    path = f"/r/{workspace.slug}/{page}" + (f"/{name}" if name else "")
    return path + (f"?{urlencode(given)}" if given else "")


def address(
    workspace: Workspace, page: str, name: str = "", /, *, part: str | None = None, **query: str | None
) -> str | None:
    """The address for a link to a page, or to a `part` of it. In a file, it leads to a place in the file; None if the
    file does not have the page in this form."""
    if workspace.exported is None:
        return path_of(workspace, page, name, **query) + (f"#{part}" if part else "")
    place = place_of(page, name)
    return f"#{workspace.slug}-{place}" if place in workspace.exported and not any(query.values()) else None


def place_of(page: str, name: str) -> str:
    """The place of a page in a file."""
    return f"{page}-{name}" if name else page


# --- The frame -------------------------------------------------------------------------------------


def framed(asked: PageRequest, page: Page) -> Html:
    """A whole page."""
    workspace = asked.workspace
    scripts = [h("script", src=static_address("theme.js"))]  # before anything is drawn
    scripts += [h("script", type="module", src=static_address(each)) for each in ("app.js", *page.scripts)]
    head = _head(f"{page.title} · {workspace.label}", scripts)
    lead = h("div", page.lead, class_="lead") if page.lead else None
    main = h(
        "main",
        h("div", h("h1", page.title), lead, class_="heading"),
        page.body,
        id="main",
        tabindex=-1,
    )
    body = h(
        "body",
        h("a", "Skip to content", href="#main", class_="skip"),
        _top(asked, page),
        main,
        _footer(asked, page),
        _help(),
        _palette(asked),
        h("div", id="toast", role="status", aria_live="polite"),
        data_workspace=workspace.slug,
        data_final=page.is_final,
        data_made=f"{asked.now:.6f}",
        data_writable="yes" if asked.writable else None,
    )
    return h("html", head, body, lang="en")


def plain_page(title: str, body: Child) -> Html:
    """A page without a workspace: a refusal, or the list of workspaces."""
    head = _head(title, [])
    main = h("main", h("div", h("h1", title), class_="heading"), body, id="main")
    return h("html", head, h("body", h("header", h("span", "Holdfast", class_="brand"), class_="top"), main), lang="en")


def redirecting(address: str) -> bytes:
    """A file that leads a browser to an address."""
    head = h("head", h("meta", charset="utf-8"), h("meta", http_equiv="refresh", content=f"0; url={address}"))
    return document(h("html", head, h("body"), lang="en"))


def _head(title: str, scripts: Sequence[Html]) -> Html:
    return h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("link", rel="icon", type="image/svg+xml", href=static_address("icon.svg")),
        h("link", rel="stylesheet", href=static_address("style.css")),
        *scripts,
    )


def _top(asked: PageRequest, page: Page) -> Html:
    workspace = asked.workspace
    links = [
        h("a", title, href=address(workspace, name), aria_current="page" if name == page.page else None, data_key=key)
        for name, title, key in PAGES
    ]
    search = h(
        "form",
        h("label", "Search issues", for_="search", class_="unseen"),
        h("input", id="search", name="q", type="search", placeholder="Search issues", autocomplete="off"),
        h("kbd", "/", aria_hidden="true"),
        action=address(workspace, "board"),
        method="get",
        role="search",
        class_="search",
    )
    return h(
        "header",
        h("a", "Holdfast", href="/", class_="brand"),
        _switch(asked, page),
        h("nav", links, aria_label="Pages"),
        search,
        h(
            "span",
            h("span", "connecting", class_="unseen"),
            id="live",
            class_="live",
            title="connecting",
            role="status",
        ),
        h("button", "?", type="button", id="help-button", title="Keyboard help", aria_label="Keyboard help"),
        class_="top",
    )


def _switch(asked: PageRequest, page: Page) -> Html:
    """The workspace; a menu if there are several."""
    current = h("span", asked.workspace.label, class_="workspace", title=asked.workspace.where)
    if len(asked.workspaces) < 2:
        return current
    others = [
        h("a", each.label, href=address(each, page.page or "overview"), title=each.where) for each in asked.workspaces
    ]
    return h(
        "details",
        h("summary", asked.workspace.label, class_="workspace"),
        h("div", others, class_="menu"),
        class_="switch",
    )


def _footer(asked: PageRequest, page: Page) -> Html:
    command = page.command + asked.workspace.repo_option
    command_shown = join("In a terminal: ", command_line(command)) if page.command else ""
    mode = "writable" if asked.writable else "read-only"
    return h(
        "footer",
        h("span", command_shown),
        h("span", f"{asked.workspace.where} · Holdfast {__version__} · {mode}"),
    )


_KEYS = (
    ("/", "search issues"),
    ("?", "this help"),
    ("Ctrl K", "go to any page or issue"),
    ("j  k", "next and previous row or card"),
    ("Enter", "open it"),
    ("t", "switch between light and dark"),
    ("Esc", "close"),
)


def _help() -> Html:
    rows = [h("tr", h("td", h("kbd", key)), h("td", text)) for key, text in _KEYS]
    rows += [h("tr", h("td", h("kbd", f"g {key}")), h("td", f"go to {title}")) for _, title, key in PAGES]
    return h(
        "dialog",
        h("h2", "Keyboard", id="help-title"),
        h("table", h("tbody", rows)),
        h("form", h("button", "Close"), method="dialog"),
        id="help",
        aria_labelledby="help-title",
    )


def _palette(asked: PageRequest) -> Html:
    places = [
        h("a", title, href=address(asked.workspace, name), data_words=f"page {title}") for name, title, _ in PAGES
    ]
    return h(
        "dialog",
        h("label", "Go to a page or an issue", for_="palette-input", class_="unseen"),
        h("input", id="palette-input", type="text", placeholder="Go to a page or an issue", autocomplete="off"),
        h("div", places, id="palette-list"),
        id="palette",
        aria_label="Go to",
        data_src=address(asked.workspace, "names"),
    )


# --- Pieces ----------------------------------------------------------------------------------------


def moment(instant: str | None, now: float) -> Child:
    """An instant, relative to now, with the exact one as its title."""
    if not instant:
        return NOT_KNOWN
    try:
        at = parse_instant(instant)
    except ValueError:
        return instant  # written by another program
    return h("time", ago(now - at), datetime=instant, title=instant, data_at=f"{at:.3f}")


def ago(seconds: float) -> str:
    if seconds < 1:
        return "now" if seconds > -1 else f"in {coarse(-seconds)}"
    return f"{coarse(seconds)} ago"


def coarse(seconds: float) -> str:
    """A duration in one unit, as the scripts also write it."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def time_left(seconds: float | None, now: float) -> Child:
    """The rest of a lease or claim; the scripts count it down."""
    if seconds is None:
        return NOT_KNOWN
    if seconds <= 0:
        return h("span", "expired", class_="bad")
    return h("span", precise(seconds), class_="warn" if seconds < 60 else None, data_until=f"{now + seconds:.3f}")


def precise(seconds: float) -> str:
    return format_duration(float(max(0, round(seconds))))


def state_mark(state: State) -> Html:
    return h("span", STATES[state], class_=f"state {state.value}")


def issue_link(workspace: Workspace, issue: Issue, *, length: int = 120) -> Html:
    return h(
        "a",
        h("code", issue.id[:SHORT]),
        " ",
        shortened(issue.title, length),
        href=address(workspace, "issue", issue.id),
        class_="issue-link",
    )


def command_line(command: str) -> Html:
    return h("code", command, class_="command")


def empty(text: str, *commands: str) -> Html:
    """The text of a page that has nothing to show, and the commands to type next."""
    return h("div", h("p", text), [h("p", command_line(each)) for each in commands], class_="empty")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Child]], *, label: str, class_: str = "", folds: bool = False
) -> Html:
    """A table. On a narrow screen, it scrolls sideways; or it `folds`: each row becomes a few lines, one for each cell
    that has content, with the title of its column."""

    def role(name: str) -> str | None:
        return name if folds else None  # a browser may take a table with another layout for no table

    def data(title: str, cell: Child) -> Html:
        more = {"data_title": title, "class_": "none" if cell == NOT_KNOWN else None} if folds else {}
        return h("td", cell, role=role("cell"), **more)

    titles = [h("th", each, scope="col", role=role("columnheader")) for each in columns]
    head = h("thead", h("tr", titles, role=role("row")), role=role("rowgroup"))
    lines = [h("tr", [data(*each) for each in zip(columns, row, strict=True)], role=role("row")) for row in rows]
    caption = h("caption", label, class_="unseen")
    class_ = f"{class_} folds" if folds else class_
    shown = h(
        "table", caption, head, h("tbody", lines, role=role("rowgroup")), class_=class_ or None, role=role("table")
    )
    return h("div", shown, class_="scroll", tabindex=0, role="region", aria_label=label)


def section(title: str, *children: Child, count: int | None = None, class_: str = "", id_: str | None = None) -> Html:
    number = h("span", count, class_="count") if count is not None else None
    return h("section", h("h2", title, number), *children, class_=class_ or None, id=id_)


def notice(kind: str, *children: Child) -> Html:
    """A line that stands out: `bad`, `warn` or `good`."""
    return h("p", *children, class_=f"notice {kind}")


def lazy(
    asked: PageRequest,
    part: str,
    placeholder: Child,
    *,
    name: str = "",
    tag: str = "div",
    class_: str = "",
    once: bool = False,
) -> Html:
    """A slow part: the scripts request it once the page is shown and, unless `once`, again when it changes. A file
    contains it."""
    class_ = f"lazy {class_}".strip()
    if asked.part is not None:
        return h(tag, asked.part(part, asked._replace(name=name)), class_=class_)
    source = path_of(asked.workspace, part, name)
    placeholder = asked.workspace.last_answer(f"{part} {name}") or placeholder  # so that nothing moves when it arrives
    return h(tag, placeholder, data_src=source, data_once=once, class_=class_, aria_busy="true")


def rarely(asked: PageRequest, name: str, make: Callable[[], Html]) -> Html:
    """An expensive part: many tabs and quick changes share one answer for a while. A page with an older answer asks
    again later."""
    found, is_new = asked.workspace.remembered(f"{name} {asked.name}", make)
    return found if is_new else join(found, h("span", data_again=REMEMBERED_MS, hidden=True))


def flat(record: Mapping[str, object], above: str = "") -> Html:
    """Names and values on one line; those of nested records are named like `old.lock_id`."""
    parts: list[Child] = []
    for name, value in record.items():
        if isinstance(value, dict):
            parts.append(flat(value, f"{above}{name}."))
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            parts += [flat(each, f"{above}{name}.") for each in value[:20]]
        elif value not in (None, "", []):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            parts += [h("span", f"{above}{name} ", class_="dim"), shortened(shown, 200), "  "]
    return h("span", parts, class_="flat")


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values, one pair per line."""
    return h("dl", [(h("dt", name), h("dd", value)) for name, value in pairs if value not in (None, "")])
