"""The timeline: one lane per worktree, issue and node, with its holders, and what was held at a chosen instant.

To show an instant, however old, all events are folded; only what the page shows is kept in memory. Without one,
only the last events are: those of the time shown, but at least `RECENT` of each kind.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from holdfast.clock import format_duration, format_instant, parse_instant
from holdfast.errors import Failure
from holdfast.fs.names import shortened
from holdfast.issues.model import IssueSummary, State
from holdfast.ledger.log import Recorded
from holdfast.repository.timeline import ISSUE, HeldSpan, issue_spans, lease_spans, node_spans, states_at
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import SHORT, STATES, Page, PageRequest, address, empty, moment, section, table
from holdfast.web.workspaces import Workspace

WINDOWS = (
    ("1m", 60.0),
    ("10m", 600.0),
    ("1h", 3600.0),
    ("6h", 6 * 3600.0),
    ("24h", 86400.0),
    ("7d", 7 * 86400.0),
    ("30d", 30 * 86400.0),
)
_DAY = WINDOWS[4][1]
MOST_LANES, MOST_SPANS = 120, 4_000
RECENT, MOST_READ = 2_000, 4 * MOST_SPANS  # events that are read of each kind if no instant is chosen
LEFT, WIDTH, LANE, TOP = 210, 1400, 24, 26  # pixels of the picture: labels, whole width, height of a lane, the axis
HALF = 34  # pixels: half of the widest label of the axis
_COLOURS = 8
_LOCAL = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?")  # what the field of a form sends, without a zone
Event = TypeVar("Event")
Place = Callable[[float], float]
"""Maps an instant to a distance from the left edge."""


def timeline_page(asked: PageRequest) -> Page:
    cursor, chosen = _instant(asked.query.get("at", ""), asked.now), dict(WINDOWS).get(asked.query.get("last", ""))
    begin, end = _window(asked.now, cursor, chosen or _DAY)
    seen, then = _seen(asked.workspace, begin, end, cursor)
    length = chosen or _fitting(seen, asked.now)
    begin, end = _window(asked.now, cursor, length)
    seen = [each for each in seen if each.is_between(begin, end)][-MOST_SPANS:]
    titles = _titles(asked.workspace, [*seen, *then])
    drawn = (
        h(
            "div",
            h("div", _picture(asked, seen, titles, begin, end, cursor), class_="picture"),
            class_="timeline",
            id="timeline",
            tabindex=0,
            role="region",
            aria_label="Who held what",
            data_begin=f"{begin:.3f}",
            data_end=f"{end:.3f}",
            data_left=LEFT,
            data_width=WIDTH,
        )
        if seen
        else empty("Nothing was held during this time. The audit trail has every change:", "holdfast audit")
    )
    body = join(
        _tools(asked, length, cursor),
        drawn,
        join(_at(asked, then, titles, cursor), _states(asked, cursor)) if cursor is not None else None,
    )
    return Page("Timeline", "timeline", body, "holdfast audit --since 24h", scripts=("timeline.js",))


def _window(now: float, cursor: float | None, length: float) -> tuple[float, float]:
    """The time shown: the latest, or around the cursor if that is earlier."""
    end = now if cursor is None or cursor > now - length else min(now, cursor + length / 2)
    return end - length, end


def _tools(asked: PageRequest, length: float, cursor: float | None) -> Html:
    """The lengths to choose from, and the instant."""
    switch = [
        h(
            "a",
            name,
            href=address(asked.workspace, "timeline", last=name),
            aria_current="true" if seconds == length else None,
        )
        for name, seconds in WINDOWS
    ]
    value = format_instant(cursor)[:19] if cursor is not None else None
    last = asked.query.get("last")
    form = h(
        "form",
        h("input", type="hidden", name="last", value=last) if last else None,
        h("label", "Held at (UTC) ", h("input", name="at", type="datetime-local", step=1, required=True, value=value)),
        h("button", "Show"),
        h("span", "or click in the timeline.", class_="dim"),
        action=address(asked.workspace, "timeline"),
        method="get",
        class_="filter",
        aria_label="Choose a moment",
    )
    return join(h("p", "Last ", switch, class_="tools windows"), form)


def _fitting(spans: Sequence[HeldSpan], now: float) -> float:
    """The shortest window that has everything, a day at most."""
    first = min((each.begin for each in spans), default=now)
    return next((length for _, length in WINDOWS if now - first < length < _DAY), _DAY)


def _seen(
    workspace: Workspace, begin: float, end: float, cursor: float | None
) -> tuple[list[HeldSpan], list[HeldSpan]]:
    """The last spans of this time, and all those at the cursor."""
    seen: list[HeldSpan] = []
    then: list[HeldSpan] = []
    since = begin if cursor is None else None
    for spans in (_of_issues(workspace, since), _of_leases(workspace, since), _of_nodes(workspace, since)):
        last = deque[HeldSpan](maxlen=MOST_SPANS)
        for each in spans:
            if each.is_between(begin, end):
                last.append(each)
            if cursor is not None and each.is_at(cursor):
                then.append(each)
        seen += last
    return sorted(seen, key=lambda each: each.begin), sorted(then, key=lambda each: (each.kind, each.begin))


def _of_issues(workspace: Workspace, since: float | None) -> Iterator[HeldSpan]:
    with contextlib.suppress(Failure), workspace.tracker() as tracker:
        newest = tracker.newest_events()
        found = tracker.events() if since is None else _recent(newest, since, lambda each: each.record.timestamp)
        yield from issue_spans(each.record for each in found)


def _of_leases(workspace: Workspace, since: float | None) -> Iterator[HeldSpan]:
    with contextlib.suppress(Failure), workspace.repository() as repository:
        newest = repository.newest_audit_entries()
        found = repository.audit().read() if since is None else _recent(newest, since, lambda each: each.at)
        yield from lease_spans(found)


def _of_nodes(workspace: Workspace, since: float | None) -> Iterator[HeldSpan]:
    with contextlib.suppress(Failure), workspace.ledger() as opened:
        ledger = opened.ledger
        yield from node_spans(ledger.latest() if since is None else _recent(ledger.newest(), since, _when))


def _recent(newest: Iterator[Event], since: float, at: Callable[[Event], str]) -> list[Event]:
    """The last events that the page needs, the oldest first."""
    found: list[Event] = []
    with contextlib.suppress(Failure):
        for each in newest:
            found.append(each)
            if len(found) >= RECENT and (_is_before(since, at(each)) or len(found) == MOST_READ):
                break
    return found[::-1]


def _when(recorded: Recorded) -> str:
    return str(recorded.event.get("timestamp", ""))


def _is_before(instant: float, text: str) -> bool:
    try:
        return parse_instant(text) < instant
    except ValueError:  # another program wrote it
        return False


def _titles(workspace: Workspace, spans: Iterable[HeldSpan]) -> dict[str, str]:
    wanted = {each.what for each in spans if each.kind == ISSUE}
    with contextlib.suppress(Failure):
        return {each.id: each.title for each in workspace.issues() if each.id in wanted}
    return {}


def _name(span: HeldSpan, titles: dict[str, str]) -> str:
    return f"{span.what[:8]} {titles.get(span.what, '')}" if span.kind == ISSUE else f"{span.kind} {span.what}"


def _picture(
    asked: PageRequest,
    spans: Sequence[HeldSpan],
    titles: dict[str, str],
    begin: float,
    end: float,
    cursor: float | None,
) -> Html:
    lanes = list(dict.fromkeys((each.kind, each.what) for each in sorted(spans, key=lambda s: (s.kind, s.begin))))
    shown, height = lanes[:MOST_LANES], TOP + LANE * min(len(lanes), MOST_LANES) + 4
    people = {who: number % _COLOURS for number, who in enumerate(dict.fromkeys(each.who for each in spans))}
    rows = {lane: number for number, lane in enumerate(shown)}
    scale = (WIDTH - LEFT - 8) / (end - begin)

    def x(instant: float) -> float:
        return round(LEFT + (min(max(instant, begin), end) - begin) * scale, 1)

    names: list[Child] = []
    parts: list[Child] = [_axis(begin, end, height, x)]
    for number, lane in enumerate(shown):
        first = next(each for each in spans if (each.kind, each.what) == lane)
        y = TOP + LANE * number
        parts.append(h("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="rule"))
        names.append(h("line", x1=0, x2=LEFT, y1=y, y2=y, class_="rule"))
        names.append(h("text", shortened(_name(first, titles), 30), x=4, y=y + 16))
    for each in spans:
        row = rows.get((each.kind, each.what))
        if row is not None:
            parts.append(_span(each, people[each.who], x, TOP + LANE * row, end, titles))
    if cursor is not None:
        parts.append(h("line", x1=x(cursor), x2=x(cursor), y1=0, y2=height, class_="cursor"))
    parts.append(h("line", x1=-9, x2=-9, y1=0, y2=height, class_="pointer", id="pointer"))
    label = f"{len(spans)} leases and claims in {len(lanes)} lanes"
    return join(  # two pictures side by side: on a narrow screen, the names stay while the rest scrolls
        h("svg", names, viewBox=f"0 0 {LEFT} {height}", class_="names", aria_hidden="true"),
        h("svg", parts, viewBox=f"{LEFT} 0 {WIDTH - LEFT} {height}", class_="times", role="img", aria_label=label),
    )


def _axis(begin: float, end: float, height: int, x: Place) -> Html:
    step = next(each for each in (5, 60, 300, 900, 3600, 4 * 3600, 86400, 5 * 86400) if (end - begin) / each <= 12)
    marks: list[Child] = []
    tick = begin - begin % step + step
    while tick < end:
        place = x(tick)
        marks.append(h("line", x1=place, x2=place, y1=18, y2=height, class_="grid"))
        if LEFT + HALF < place < WIDTH - HALF:  # the label fits
            marks.append(h("text", _tick(tick, step), x=place, y=13, class_="small", text_anchor="middle"))
        tick += step
    return h("g", marks)


def _tick(instant: float, step: float) -> str:
    text = format_instant(instant)
    return text[5:10] if step >= _DAY else text[11:16] if step >= 60 else text[11:19]


def _span(span: HeldSpan, colour: int, x: Place, y: int, now: float, titles: dict[str, str]) -> Html:
    start, stop = x(span.begin), x(now if span.end is None else span.end)
    length = format_duration(round((now if span.end is None else span.end) - span.begin))
    ending = span.how or "still held, or expired and not taken over"
    text = f"{span.who}: {_name(span, titles)}, {length}, {ending}"
    width = max(3.0, round(stop - start, 1))
    mark = h("rect", x=start, y=y + 4, width=width, height=LANE - 8, rx=3, class_=f"span c{colour}")
    label = (
        h("text", shortened(span.who, int(width // 7)), x=start + 5, y=y + 16, class_="inside") if width > 60 else None
    )
    lost = h("circle", cx=start + width, cy=y + LANE // 2, r=4, class_="lost") if "expired" in span.how else None
    return h("g", h("title", text), mark, label, lost)


def _at(asked: PageRequest, spans: Iterable[HeldSpan], titles: dict[str, str], cursor: float) -> Html:
    """The holdings at the moment of the cursor."""
    then = format_instant(cursor)
    rows: list[list[Child]] = []
    for each in spans:
        what: Child = _name(each, titles)
        if each.kind == ISSUE:
            what = h("a", what, href=address(asked.workspace, "issue", each.what))
        rows.append([what, each.who, moment(format_instant(each.begin), asked.now), each.how or "no end is recorded"])
    title = join("Held at ", h("time", then[:19].replace("T", " ") + " UTC", datetime=then))
    found = (
        table(("What", "By", "Since", "How it ended"), rows, label="Held then", folds=True)
        if rows
        else empty("Nothing was held then.")
    )
    return h("section", h("h2", title, h("span", len(rows), class_="count")), found, id="then")


def _states(asked: PageRequest, cursor: float) -> Html | None:
    """How many issues were in each state at the moment of the cursor, and those in progress."""
    issues: dict[str, IssueSummary] = {}
    states: dict[str, State] = {}
    with contextlib.suppress(Failure), asked.workspace.tracker() as tracker:
        issues = {each.id: each for each in asked.workspace.issues()}
        states = states_at((each.record for each in tracker.events()), cursor, issues.values())
    counts = Counter(states.values())
    legend = [
        h("span", h("span", class_=f"dot {state.value}", aria_hidden="true"), f"{title} ", h("strong", counts[state]))
        for state, title in {**STATES, State.BACKLOG: "Backlog or ready"}.items()
        if counts[state]
    ]
    working = [name for name, state in states.items() if state is State.IN_PROGRESS]
    links = [
        h(
            "li",
            h(
                "a",
                h("code", name[:SHORT]),
                " ",
                issues[name].title if name in issues else "",
                href=address(asked.workspace, "issue", name),
            ),
        )
        for name in working[:MOST_LANES]
    ]
    if not states:
        return None
    listed = (h("h3", "In progress"), h("ul", links)) if links else None
    return section("Issues then", h("p", legend, class_="legend"), listed, count=len(states), id_="issues-then")


def _instant(text: str, now: float) -> float | None:
    """A past instant: seconds since 1970, or a date and time."""
    try:
        is_number = text.replace(".", "", 1).isdigit()
        return min(now, float(text) if is_number else parse_instant(f"{text}Z" if _LOCAL.fullmatch(text) else text))
    except ValueError:
        return None
