"""`holdfast top`: the overview, the queue of issues and the landing queues, live on the screen of a terminal."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli import options
from holdfast.cli.output import STYLES, Output, printable
from holdfast.cli.overview_view import AGENT_COLUMNS, agent_cells, attention_line, detail_lines, nobody, overview_lines
from holdfast.cli.styled import Column, Span, StyledLine, as_text, cut_line, has_colour, table
from holdfast.cli.who import read_overview
from holdfast.clock import SYSTEM_CLOCK, format_ago

if TYPE_CHECKING:
    from holdfast.issues.model import AnyIssue
    from holdfast.issues.rules import IssueSet
    from holdfast.repository.agent_rows import AgentRow
    from holdfast.repository.attention import Situation
    from holdfast.repository.landing_records import Landing
    from holdfast.repository.live import LiveView
    from holdfast.repository.overview import Overview

SHORT = 8
_LANDED_SHOWN = 50
_STATES = ("in_progress", "gated", "ready", "backlog")
_LANDING_STYLES = {"queued": "yellow", "landed": "green", "conflict": "bold red", "failed": "bold red"}

KEYS = "q quit   Enter details   / filter   1 2 3 pages   r refresh   ? help"
KEYS_OF_DETAILS = "q quit   Esc back   ↑ ↓ scroll"
HELP = """\
1 2 3       overview, queue, landing; also Tab, ← and →
↑ ↓ j k     select a row; Page Up, Page Down, Home, End
Enter       show the details of the selected row; Esc goes back
/           show only rows that contain what you type; Enter keeps the filter, Esc clears it
r           read everything again, including file locks of other programs, which report no changes
?           this help
q           quit; so does Ctrl-C"""


@click.command(short_help="Show who does what, live in the terminal.")
@options.repo_option
@options.data_dir_option
@options.duration_option("--every", "How often to print, without a terminal.", default="1s")
@options.limit_option("Print N overviews and exit.  [default: no limit; on a terminal, a live view]")
@options.with_output
def top(output: Output, *, repo: str | None, data_dir: str | None, every: float, limit: int | None) -> None:
    """Show the agents of 'who', the queue of issues and the landing queues, live until q or Ctrl-C.

    Enter shows the details of a row, / filters, 1 2 3 switch between the pages, and ? lists the keys. While nothing
    changes, nothing is read. Without a terminal, with --json or with --limit, it prints one overview after another;
    with --json, one JSON object per line.

    \b
    Examples:
      holdfast top
      holdfast top --json --every 10s
    """
    try:
        if limit is None and not output.as_json and _is_terminal():
            _show_live(repo, data_dir)
            return
        for number in itertools.count() if limit is None else range(limit):
            if number:
                time.sleep(every)
            overview = read_overview(repo, data_dir)
            output.result(overview.as_record(), [*overview_lines(overview), ""])
    except KeyboardInterrupt:
        return  # the usual way to quit


def _is_terminal() -> bool:
    streams = (sys.stdin, sys.stdout)
    return sys.platform != "win32" and all(each is not None and each.isatty() for each in streams)


def _show_live(repo: str | None, data_dir: str | None) -> None:
    from holdfast.cli.screen import Screen
    from holdfast.repository.live import LiveOverview

    read_overview(repo, data_dir)  # an initial failure is an error of the command, not a line on the screen
    with Screen() as screen:
        address = options.store_address(os.environ)
        live = LiveOverview(lambda: read_overview(repo, data_dir), screen.wake, address=address)
        live.start()
        try:
            state, size = TopState(colour=has_colour(sys.stdout)), screen.size
            while True:
                if screen.size != size:
                    size = screen.size
                    screen.forget()
                screen.draw(state.frame(live.view, size), size)
                for key in screen.wait(1.0 - time.time() % 1.0):  # the times on the screen change every second
                    if key == "r":
                        live.refresh()
                    if state.press(key):
                        return
        except EOFError:
            return
        finally:
            live.close()


# --- Pages ------------------------------------------------------------------------------------------------


class PageRow(NamedTuple):
    """A row of a page: a key that identifies it, its cells, and a function that returns its details."""

    key: str
    cells: Sequence[Span]
    details: Callable[[int], Sequence[str]]


class TopPage(NamedTuple):
    """A page: its columns, a function that yields its rows, and the text to show if there are none."""

    title: str
    columns: Sequence[Column]
    rows: Callable[[Situation, float], Iterator[PageRow]]
    empty: str


def _agents(situation: Situation, age: float) -> Iterator[PageRow]:
    now, overview = SYSTEM_CLOCK.wall(), situation.overview

    for number, row in enumerate(overview.agents):
        key = f"{row.actor} {row.worktree or row.issue_id or number}"
        yield PageRow(key, agent_cells(row, now, age), partial(_agent_details, overview, row))


def _agent_details(overview: Overview, row: AgentRow, width: int) -> list[str]:
    held = detail_lines(overview, row.holdings, min(width, 100)) if row.holdings else ["It holds nothing."]
    return [printable(f"{row.actor}: {row.work or 'no purpose given'}"), "", *held]


def _queue(situation: Situation, age: float) -> Iterator[PageRow]:
    issues = situation.issues
    if issues is None:
        return
    states = {each.id: issues.state(each).value for each in issues}
    open_ones = [each for each in issues if states[each.id] in _STATES]
    for issue in sorted(open_ones, key=lambda each: (_STATES.index(states[each.id]), -each.priority.rank)):
        state = states[issue.id]
        cells = [
            Span(issue.id[:SHORT], "bold"),
            Span(state, STYLES.get(state, "")),
            Span(issue.priority.value, STYLES.get(issue.priority.value, "")),
            Span(printable(issue.assignee or "")),
            Span(printable(issue.title)),
            Span(_open_dependencies(issues, issue), "yellow"),
        ]
        yield PageRow(issue.id, cells, partial(_issue_details, issues, issue))


def _open_dependencies(issues: IssueSet[Any], issue: AnyIssue) -> str:
    from holdfast.issues.rules import open_dependencies

    return ", ".join(each[:SHORT] for each in open_dependencies(issue, issues.lookup))


def _issue_details(issues: IssueSet[Any], issue: AnyIssue, width: int) -> list[str]:
    from holdfast.issues.model import Issue, issue_summary_to_json

    record = issue_summary_to_json(issue, issues.state(issue))
    lines = [issue.title, "", *(f"{name:14}  {_shown(value)}" for name, value in record.items() if value)]
    if isinstance(issue, Issue) and issue.description:
        lines += ["", *issue.description.splitlines()]
    return [printable(each) for each in (*lines, "", f"holdfast issue show {issue.id[:SHORT]}")]


def _landing(situation: Situation, age: float) -> Iterator[PageRow]:
    queues = situation.landings
    decided = [each for each in queues.entries if not each.is_open]
    for entry in (*queues.queued(), *reversed(decided[-_LANDED_SHOWN:])):
        state = entry.state.value
        cells = [
            Span(entry.landing_id, "bold"),
            Span(state, _LANDING_STYLES.get(state, "dim")),
            Span(printable(entry.branch), "cyan"),
            Span(printable(entry.worktree_id or entry.commit[:12])),
            Span(printable(entry.actor)),
            Span(printable(entry.title)),
            Span(format_ago(entry.decided_at or entry.queued_at), "dim"),
            Span(printable(entry.reason), "yellow"),
        ]
        yield PageRow(entry.landing_id, cells, partial(_landing_details, entry))


def _landing_details(entry: Landing, width: int) -> list[str]:
    from holdfast.repository.landing_records import landing_to_json

    known = {name: value for name, value in landing_to_json(entry).items() if value not in (None, "", [], False)}
    lines = [f"{name:14}  {_shown(value)}" for name, value in known.items()]
    return [printable(each) for each in (*lines, "", f"holdfast landing log {entry.landing_id}")]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


PAGES = (
    TopPage("Overview", AGENT_COLUMNS, _agents, "To start an agent: holdfast agent run --next -- COMMAND"),
    TopPage(
        "Queue",
        (
            Column("ISSUE", 0), Column("STATE", 1), Column("PRIORITY", 5), Column("ASSIGNEE", 3, 8),
            Column("TITLE", 2, 12), Column("WAITS FOR", 4, 8),
        ),
        _queue,
        "No issue is open. Create one: holdfast issue create TITLE",
    ),
    TopPage(
        "Landing",
        (
            Column("ENTRY", 0), Column("STATE", 1), Column("BRANCH", 4, 6), Column("WORKTREE", 3, 8),
            Column("ACTOR", 5, 8), Column("TITLE", 2, 12), Column("WHEN", 7), Column("REASON", 6, 10),
        ),
        _landing,
        "Nothing is queued to land. To land the work of a worktree: holdfast land",
    ),
)  # fmt: skip


# --- State ------------------------------------------------------------------------------------------------


class TopState:
    """The page, selection and filter that the user has chosen. `press` handles a key, `frame` draws the screen."""

    def __init__(self, *, colour: bool) -> None:
        self.colour = colour
        self.page = 0
        self.typing = False
        self.in_details = False
        self.in_help = False
        self.scroll = 0
        self._filters = [""] * len(PAGES)
        self._selected = [""] * len(PAGES)
        self._rows: list[PageRow] = []
        self._height = 1
        self._made: tuple[object, ...] = ()
        self._view: LiveView | None = None

    # --- Keys --------------------------------------------------------------------------------------

    def press(self, key: str) -> bool:
        """Handle a key. Returns whether it ends the program."""
        self._find_rows()  # several keys may come before the next frame
        if self.typing:
            self._type(key)
        elif key == "q":
            return True
        elif self.in_details or self.in_help:
            self._press_in_details(key)
        else:
            self._press_in_page(key)
        return False

    def _type(self, key: str) -> None:
        text = self._filters[self.page]
        if key in ("enter", "escape"):
            self.typing = False
            text = "" if key == "escape" else text
        elif key == "backspace":
            text = text[:-1]
        elif len(key) == 1 and key.isprintable():
            text += key
        self._filters[self.page] = text

    def _press_in_details(self, key: str) -> None:
        steps = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page up": -self._height,
            "page down": self._height,
            " ": self._height,
        }
        if key in steps:
            self.scroll = max(0, self.scroll + steps[key])
        elif key in ("escape", "enter", "left", "?", "backspace"):
            self.in_details = self.in_help = False

    def _press_in_page(self, key: str) -> None:
        turns = {"tab": 1, "right": 1, "l": 1, "back tab": -1, "left": -1, "h": -1}
        if key in "123" and len(key) == 1:
            self.page = int(key) - 1
        elif key in turns:
            self.page = (self.page + turns[key]) % len(PAGES)
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self._filters[self.page] = ""
        elif key == "?":
            self.in_help, self.scroll = True, 0
        elif key == "enter" and self._rows:
            self.in_details, self.scroll = True, 0
        else:
            self._move(key)

    def _move(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -self._height, "page down": self._height}
        far = {"home": -len(self._rows), "g": -len(self._rows), "end": len(self._rows), "G": len(self._rows)}
        step = {**steps, **far}.get(key)
        if step is not None and self._rows:
            number = min(max(0, self._position() + step), len(self._rows) - 1)
            self._selected[self.page] = self._rows[number].key

    def _position(self) -> int:
        """The number of the selected row, or of the first row if the selected one is gone."""
        keys = [each.key for each in self._rows]
        chosen = self._selected[self.page]
        return keys.index(chosen) if chosen in keys else 0

    # --- Frames ------------------------------------------------------------------------------------

    def frame(self, view: LiveView | None, size: os.terminal_size) -> list[str]:
        """All lines of the screen."""
        width, height = size
        situation = view.situation if view else None
        self._view = view
        self._find_rows()
        head = [self._head(situation)]
        if view is not None and view.failure is not None:
            head.append([Span(f"! {printable(view.failure.message)}", "bold red")])
        foot = self._foot()
        self._height = max(1, height - len(head) - 2)
        body = self._body(situation, width)
        filled = [*head, *body[: height - len(head) - 1]]
        filled += [[]] * (height - 1 - len(filled))
        return [as_text(cut_line(line, width), colour=self.colour) for line in (*filled, foot)]

    def _find_rows(self) -> None:
        """Update the rows of the page: every second in the overview, which shows times; elsewhere only after a read."""
        view = self._view
        if view is None or view.situation is None:
            self._rows = []
            return
        wanted = self._filters[self.page].lower()
        made = (view.published_at, self.page, wanted, int(time.time()) if self.page == 0 else 0)
        if made != self._made:
            rows = PAGES[self.page].rows(view.situation, time.monotonic() - view.read_at)
            self._rows = [each for each in rows if wanted in " ".join(cell.text for cell in each.cells).lower()]
            self._made = made

    def _head(self, situation: Situation | None) -> StyledLine:
        pages = [
            Span(f" {number} {page.title} ", "reverse" if number - 1 == self.page else "")
            for number, page in enumerate(PAGES, 1)
        ]
        where = "reading…" if situation is None else printable(str(situation.overview.root))
        return [Span("holdfast ", "bold"), *pages, Span(time.strftime("  %H:%M:%S"), "dim"), Span(f"  {where}", "dim")]

    def _foot(self) -> StyledLine:
        text = self._filters[self.page]
        if self.typing:
            return [Span(f"/{printable(text)}", "bold"), Span("▏   Enter keeps the filter, Esc clears it", "dim")]
        if self.in_details or self.in_help:
            return [Span(KEYS_OF_DETAILS, "dim")]
        kept = [Span(f"filter: {printable(text)} (Esc clears it)   ", "bold")] if text else []
        return [*kept, Span(KEYS, "dim")]

    def _body(self, situation: Situation | None, width: int) -> list[StyledLine]:
        if self.in_help:
            return self._scrolled(HELP.splitlines())
        if situation is None:
            return []
        if self.in_details and self._rows:
            lines = self._rows[self._position()].details(width)
            folded = [
                part for line in lines for part in textwrap.wrap(line, max(10, width), break_on_hyphens=False) or [""]
            ]
            return self._scrolled(folded)
        return self._page(situation, width)

    def _scrolled(self, lines: Sequence[str]) -> list[StyledLine]:
        self.scroll = min(self.scroll, max(0, len(lines) - self._height))
        return [[], *([Span(each)] for each in lines[self.scroll : self.scroll + self._height])]

    def _page(self, situation: Situation, width: int) -> list[StyledLine]:
        page = PAGES[self.page]
        above = _attention(situation, self._height) if self.page == 0 else []
        if not self._rows:
            text = f"{nobody(situation.overview)} {page.empty}" if self.page == 0 else page.empty
            text = f"No row contains {self._filters[self.page]!r}." if self._filters[self.page] else text
            return [*above, [], [Span(printable(text), "dim")]]
        room = max(1, self._height - len(above) - 1)
        position = self._position()
        first = max(0, min(position - room // 2, len(self._rows) - room))
        visible = self._rows[first : first + room]
        header, *lines = table(page.columns, [each.cells for each in visible], width)
        lines[position - first] = [Span("".join(each.text for each in lines[position - first]).ljust(width), "reverse")]
        more = len(self._rows) - len(visible)
        count = [Span(f"{len(self._rows)} rows", "dim")] if more > 0 else []
        return [*above, header, *lines, *([count] if count else [])]


def _attention(situation: Situation, height: int) -> list[StyledLine]:
    found = situation.overview.attention
    most = max(1, height // 4)
    lines: list[StyledLine] = [attention_line(each) for each in found[:most]]
    if len(found) > most:
        lines[-1] = [Span(f"! {len(found) - most + 1} more: holdfast who", "yellow")]
    return lines
