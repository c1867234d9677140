"""The board: issues by state. Filter and search are in the address, so that a view can be shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.fs.names import counted, shortened
from holdfast.issues import rules
from holdfast.issues.model import IssueSummary, Priority, State
from holdfast.issues.rules import IssueSet
from holdfast.issues.tracker import Query
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import SHORT, STATES, Page, PageRequest, address, empty, moment, notice
from holdfast.web.workspaces import Workspace

MOST_CARDS = 60  # in a column, unless all are asked for
COLUMNS = (State.BACKLOG, State.READY, State.IN_PROGRESS, State.GATED, State.DONE)
_LATE = (State.REJECTED, State.ARCHIVED)  # columns that exist only if they have something
_CHOSEN = (State.READY, State.IN_PROGRESS, State.DONE, *_LATE)  # a card may be dropped there; others follow from facts
_NEWEST_FIRST = (State.DONE, State.REJECTED, State.ARCHIVED)


class Filter(NamedTuple):
    """The filter in the address. `whole` is the column that is shown whole."""

    query: Query = Query()
    hide_blocked: bool = False
    whole: str = ""

    @classmethod
    def of(cls, asked: Mapping[str, str]) -> Filter:
        priority = [each for each in Priority if each.value == asked.get("priority")]
        labels = (asked["label"],) if asked.get("label") else ()
        words = tuple(asked.get("q", "").split())
        query = Query(words, (), tuple(priority), asked.get("assignee") or None, labels)
        return cls(query, asked.get("blocked") == "hide", asked.get("all", ""))


def board_page(asked: PageRequest) -> Page:
    wanted = Filter.of(asked.query)
    issues = asked.workspace.issues()
    columns: dict[State, list[IssueSummary]] = {state: [] for state in STATES}
    shown = 0
    for issue in issues:
        state = issues.state(issue)
        if wanted.query.fits(issue, state):
            shown += 1
            columns[state].append(issue)
    if wanted.hide_blocked:
        shown -= len(columns.pop(State.BACKLOG))
    used = [state for state in STATES if state in columns and (state not in _LATE or columns[state])]
    drawn = [_column(asked, issues, state, columns[state], wanted) for state in used]
    total, broken = len(issues), issues.broken
    form = _form(asked, issues, wanted)
    none: Child = None
    if not total:
        none = empty("There are no issues yet. Create the first one:", "holdfast issue create 'First piece of work'")
    elif not shown:
        none = empty("No issue matches this filter.")
    body = join(
        form,
        [notice("bad", f"{each.issue_id} cannot be read: {each.failure.message}") for each in broken],
        none,
        h("div", drawn, class_="board", id="board") if shown else None,
    )
    lead = f"{shown} of {counted(total, 'issue')}" if shown != total else counted(total, "issue")
    return Page("Board", "board", body, "holdfast issue list", lead, scripts=("board.js",))


def _form(asked: PageRequest, issues: IssueSet[IssueSummary], wanted: Filter) -> Html:
    labels = sorted({label for issue in issues for label in issue.labels})[:200]
    people = sorted({issue.assignee for issue in issues if issue.assignee})[:200]
    query = asked.query
    return h(
        "form",
        h("label", "Search ", h("input", name="q", type="search", value=query.get("q", ""), class_="wide")),
        _choice("Label", "label", labels, query.get("label", "")),
        _choice("Assignee", "assignee", people, query.get("assignee", "")),
        _choice("Priority", "priority", [each.value for each in reversed(Priority)], query.get("priority", "")),
        h(
            "label",
            h("input", type="checkbox", name="blocked", value="hide", checked=wanted.hide_blocked),
            " Hide blocked",
        ),
        h("button", "Filter"),
        h("a", "New issue", href=address(asked.workspace, "new"), class_="button") if asked.writable else None,
        action=address(asked.workspace, "board"),
        method="get",
        class_="filter",
        aria_label="Filter",
    )


def _choice(title: str, name: str, values: Sequence[str], chosen: str) -> Html | None:
    if not values and not chosen:
        return None
    options = [h("option", "any", value="")]
    options += [h("option", each, value=each, selected=each == chosen) for each in values]
    return h("label", f"{title} ", h("select", options, name=name))


def _column(
    asked: PageRequest, issues: IssueSet[IssueSummary], state: State, found: list[IssueSummary], wanted: Filter
) -> Html:
    if state in _NEWEST_FIRST:
        found.sort(key=lambda each: each.updated_at, reverse=True)
    else:
        found.sort(key=lambda each: (-each.priority.rank, each.updated_at or each.created_at))
    visible = found if wanted.whole == state.value else found[:MOST_CARDS]
    cards = [_card(asked, issues, issue, state) for issue in visible]
    more = None
    if len(found) > len(visible):
        query = {key: asked.query.get(key) for key in ("q", "label", "assignee", "priority", "blocked")}
        link = address(asked.workspace, "board", **query, all=state.value)
        more = h("p", h("a", f"Show all {len(found)}", href=link), class_="more")
    return h(
        "section",
        h(
            "h2",
            h("span", class_=f"dot {state.value}", aria_hidden="true"),
            STATES[state],
            h("span", len(found), class_="count"),
        ),
        h("div", cards, class_="cards", data_state=state.value if state in _CHOSEN else None),
        more,
        class_="column",
        id=state.value,
        aria_label=STATES[state],
    )


def _card(asked: PageRequest, issues: IssueSet[IssueSummary], issue: IssueSummary, state: State) -> Html:
    foot: list[Child] = [h("code", issue.id[:SHORT])]
    if issue.priority is not Priority.NORMAL:
        foot.append(h("span", issue.priority.value, class_=f"priority {issue.priority.value}"))
    foot += [h("span", label, class_="label") for label in issue.labels[:3]]
    if state is State.BACKLOG and (waits := len(rules.open_dependencies(issue, issues.lookup))):
        foot.append(h("span", f"waits for {waits}", class_="dim"))
    if state is State.GATED:
        foot.append(h("span", f"gates: {', '.join(issue.open_gates())}", class_="dim"))
    if issue.assignee and state not in _NEWEST_FIRST:
        foot.append(h("span", issue.assignee, class_="actor"))
    if state in _NEWEST_FIRST or state is State.IN_PROGRESS:
        foot.append(moment(issue.updated_at, asked.now))
    return h(
        "a",
        h("span", shortened(issue.title, 140), class_="title"),
        h("span", foot, class_="foot"),
        href=address(asked.workspace, "issue", issue.id),
        class_="card",
        draggable="true" if asked.writable else "false",
        data_issue=issue.id,
    )


def names_part(asked: PageRequest) -> Html:
    """Links to the open issues, for the palette."""
    open_ = [each for each in asked.workspace.issues() if each.state not in rules.FINISHED][-500:]
    return join(_palette_link(asked.workspace, each) for each in reversed(open_))


def _palette_link(workspace: Workspace, issue: IssueSummary) -> Html:
    name, title = issue.id[:SHORT], shortened(issue.title, 100)
    link = address(workspace, "issue", issue.id)
    return h("a", h("code", name), " ", title, href=link, data_words=f"{name} {title}")
