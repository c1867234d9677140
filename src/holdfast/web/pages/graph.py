"""The graph of dependencies as a layered picture: what an issue waits for is to its left."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.fs.names import counted, shortened
from holdfast.issues import rules
from holdfast.issues.graph import Layering, layered
from holdfast.issues.model import IssueSummary, State
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import SHORT, STATES, Page, PageRequest, address, empty, notice

MOST_DRAWN = 500
WIDTH, HEIGHT, GAP_X, GAP_Y = 220, 40, 56, 10  # of a node, and between nodes


def graph_page(asked: PageRequest) -> Page:
    everything = asked.query.get("all") == "yes"
    issues = asked.workspace.issues()
    chosen = {each.id: each for each in issues if everything or each.state not in rules.FINISHED}
    linked = _linked(chosen)
    states = {name: issues.state(each) for name, each in linked.items()}
    total, loose = len(issues), len(chosen) - len(linked)
    dropped = list(linked)[MOST_DRAWN:]
    for name in dropped:
        del linked[name]
    switch = h(
        "p",
        h(
            "a",
            "Only open issues" if everything else "Include finished issues",
            class_="button plain-button",
            href=address(asked.workspace, "graph", all=None if everything else "yes"),
        ),
        " ",
        h("button", "+", type="button", data_zoom="0.8", aria_label="Zoom in"),
        h("button", "\N{MINUS SIGN}", type="button", data_zoom="1.25", aria_label="Zoom out"),
        h("button", "Fit", type="button", data_zoom="fit"),
        class_="tools",
    )
    if not linked:
        none = empty("There are no issues yet.", "holdfast issue create 'First piece of work'")
        if total:
            none = join(switch, empty("No open issue depends on another.", "holdfast dep add ID OTHER"))
        return Page("Graph", "graph", none, "holdfast graph")
    graph = {name: [on for on in each.dependencies if on in linked] for name, each in linked.items()}
    open_ones = frozenset(name for name, each in linked.items() if each.state not in rules.FINISHED)
    drawn = layered(graph, open_ones=open_ones)
    body = join(
        switch,
        notice("warn", f"Only {MOST_DRAWN} of {MOST_DRAWN + len(dropped)} issues are drawn.") if dropped else None,
        _legend(drawn),
        h("div", _picture(asked, drawn, graph, linked, states), class_="graph", id="graph"),
        h("p", f"Not drawn: {counted(loose, 'issue')} without dependencies.", class_="dim") if loose else None,
    )
    return Page("Graph", "graph", body, "holdfast graph", counted(len(linked), "issue"), scripts=("graph.js",))


def _linked(chosen: Mapping[str, IssueSummary]) -> dict[str, IssueSummary]:
    """The issues that depend on another one, or that another one depends on."""
    needed = {on for each in chosen.values() for on in each.dependencies if on in chosen}
    return {
        name: each for name, each in chosen.items() if name in needed or any(on in chosen for on in each.dependencies)
    }


def _legend(drawn: Layering) -> Html:
    marks = [
        h("span", h("span", class_=f"dot {state.value}", aria_hidden="true"), title) for state, title in STATES.items()
    ]
    critical = h(
        "span",
        h("span", class_="stroke", aria_hidden="true"),
        f"critical path: {counted(len(drawn.critical), 'issue')}",
    )
    return h("p", marks, critical if drawn.critical else None, class_="legend")


def _picture(
    asked: PageRequest,
    drawn: Layering,
    graph: Mapping[str, list[str]],
    issues: Mapping[str, IssueSummary],
    states: Mapping[str, State],
) -> Html:
    tallest = max(map(len, drawn.layers))
    places: dict[str, tuple[int, int]] = {}
    for column, layer in enumerate(drawn.layers):
        top = (tallest - len(layer)) * (HEIGHT + GAP_Y) // 2
        for row, name in enumerate(layer):
            places[name] = column * (WIDTH + GAP_X) + 8, top + row * (HEIGHT + GAP_Y) + 8
    steps = set(zip(drawn.critical, drawn.critical[1:], strict=False))
    edges = [_edge(places[on], places[name], critical=(on, name) in steps) for name in graph for on in graph[name]]
    critical = set(drawn.critical)
    nodes = [
        _node(asked, issues[name], states[name], place, critical=name in critical) for name, place in places.items()
    ]
    width = len(drawn.layers) * (WIDTH + GAP_X) - GAP_X + 16
    height = tallest * (HEIGHT + GAP_Y) - GAP_Y + 16
    return h(
        "svg",
        edges,
        nodes,
        viewBox=f"0 0 {width} {height}",
        height=min(max(height, 280), 820),
        data_width=width,
        data_height=height,
        role="group",
        aria_label="Dependencies",
        preserveAspectRatio="xMidYMid meet",
    )


def _edge(start: tuple[int, int], end: tuple[int, int], *, critical: bool) -> Html:
    x, y = start[0] + WIDTH, start[1] + HEIGHT // 2
    goal_x, goal_y = end[0], end[1] + HEIGHT // 2
    middle = (goal_x - x) // 2
    d = f"M{x} {y}C{x + middle} {y} {goal_x - middle} {goal_y} {goal_x} {goal_y}"
    return h("path", d=d, class_="edge critical" if critical else "edge")


def _node(asked: PageRequest, issue: IssueSummary, state: State, place: tuple[int, int], *, critical: bool) -> Html:
    x, y = place
    label = f"{issue.title}, {STATES[state]}"
    assignee = f" · {issue.assignee}" if issue.assignee else ""
    texts = (
        h("text", shortened(issue.title, 28), x=0, y=17),
        h("text", shortened(f"{issue.id[:SHORT]} · {STATES[state]}{assignee}", 33), x=0, y=32, class_="small"),
    )
    parts: list[Child] = [
        h("title", f"{issue.id[:SHORT]} {label}"),
        h("rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=6, class_="box"),
        h("rect", x=x, y=y, width=5, height=HEIGHT, rx=2, class_=f"fill {state.value}"),
        h("svg", *texts, x=x + 14, y=y, width=WIDTH - 20, height=HEIGHT),  # cuts off what is too long
    ]
    name = f"node {state.value} critical" if critical else f"node {state.value}"
    return h("a", parts, href=address(asked.workspace, "issue", issue.id), class_=name, aria_label=label)
