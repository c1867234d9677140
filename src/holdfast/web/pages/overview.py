"""The overview: what needs attention, then one row per agent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from holdfast.errors import Failure
from holdfast.findings import Severity
from holdfast.fs import calls
from holdfast.fs.names import counted, shortened
from holdfast.issues.model import IssueSummary, State
from holdfast.issues.rules import IssueSet
from holdfast.locks.identity import Liveness
from holdfast.repository.agent_rows import AgentRow, AwaitedHolding, count_changed_files, with_landings
from holdfast.repository.attention import Attention, LandingQueues, Situation, attention_list, read_landings
from holdfast.repository.attention import store_findings as findings_of_store
from holdfast.repository.holdings import Holding
from holdfast.repository.overview import with_conflicts
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import (
    NOT_KNOWN,
    STATES,
    Page,
    PageRequest,
    address,
    command_line,
    empty,
    lazy,
    moment,
    notice,
    rarely,
    section,
    table,
    time_left,
)
from holdfast.web.workspaces import Workspace

_AGENT_KINDS = ("lease", "named lease", "issue", "claim")
_COLUMNS = ("Agent", "Work", "Worktree", "Since", "Time left", "Alive", "Changed", "Waits for")
_SLOW = ("conflict", "store", "disk")  # kinds of attention that take longer to find out
_ALIVE = {Liveness.ALIVE: ("alive", "good"), Liveness.DEAD: ("dead", "bad"), Liveness.UNKNOWN: ("unknown", "dim")}


def overview_page(asked: PageRequest) -> Page:
    """The part of the page that is quick to read; conflicts, the store and changed files follow."""
    workspace = asked.workspace
    issues: IssueSet[IssueSummary] | None = None
    with contextlib.suppress(Failure):
        issues = workspace.issues()
    overview, landings = workspace.overview(), _landings(workspace)
    agents = with_landings(overview.agents, landings.queued())
    agents = tuple(each for each in agents if _is_agent(each))
    urgent = [each for each in attention_list(Situation(overview, issues, landings)) if each.kind not in _SLOW]
    counts = _issue_counts(workspace, issues) if issues is not None else None
    body = join(
        _attention_part(asked, urgent),
        counts,
        _agents_part(asked, agents),
        _others_part(asked, overview.holdings),
        [notice("bad", f"Cannot list every {each.kind}: {each.problem}") for each in overview.unreadable],
    )
    return Page("Overview", "overview", body, "holdfast who")


def attention_part(asked: PageRequest) -> Html:
    """The rest of the attention strip, which needs every file and the store."""
    return rarely(asked, "attention", lambda: _slow_attention(asked))


def _slow_attention(asked: PageRequest) -> Html:
    overview = with_conflicts(asked.workspace.overview())
    situation = Situation(overview._replace(holdings=()))
    with contextlib.suppress(Failure), asked.workspace.repository(to_examine=True) as repository:
        situation = situation._replace(findings=tuple(findings_of_store(repository)))
    with contextlib.suppress(OSError):
        situation = situation._replace(free_space=calls.free_space(asked.workspace.root))
    return join(map(_attention_line, attention_list(situation)))


def changed_part(asked: PageRequest) -> Html:
    """How many files of a worktree have changed since its last snapshot."""
    return rarely(asked, "changed", lambda: _changed(asked))


def _changed(asked: PageRequest) -> Html:
    with asked.workspace.repository() as repository:
        count = count_changed_files(repository, [asked.name]).get(asked.name)
    return join(NOT_KNOWN if count is None else counted(count, "file"))


def _is_agent(row: AgentRow) -> bool:
    return not row.holdings or any(each.kind in _AGENT_KINDS for each in row.holdings)


def _landings(workspace: Workspace) -> LandingQueues:
    with contextlib.suppress(Failure), workspace.repository() as repository:
        return read_landings(repository)
    return LandingQueues()


# --- Attention -------------------------------------------------------------------------------------


def _attention_part(asked: PageRequest, urgent: Sequence[Attention]) -> Html:
    rest = lazy(asked, "attention", "", class_="more-attention")
    lines = [_attention_line(each) for each in urgent]
    calm = h("p", "Nothing needs attention.", class_="calm")
    return h("section", h("h2", "Attention", class_="unseen"), lines, rest, calm, class_="attention", id="attention")


def _attention_line(each: Attention) -> Html:
    kind = "bad" if each.severity is Severity.ERROR else "warn"
    return h(
        "p",
        h("span", each.kind, class_="kind"),
        h("span", each.message, class_="message"),
        command_line(each.command),
        class_=f"line {kind}",
    )


# --- Counts ----------------------------------------------------------------------------------------


def _issue_counts(workspace: Workspace, issues: IssueSet[IssueSummary]) -> Html | None:
    """How many issues are in each state, as one bar with a legend of links."""
    counts = dict.fromkeys(STATES, 0)
    for issue in issues:
        counts[issues.state(issue)] += 1
    total = sum(counts.values())
    if not total:
        return empty("There are no issues yet.", "holdfast issue create 'First piece of work'")
    links = [
        h(
            "a",
            h("span", class_=f"dot {state.value}", aria_hidden="true"),
            f"{STATES[state]} ",
            h("strong", count),
            href=address(workspace, "board", part=state.value),
        )
        for state, count in counts.items()
        if count
    ]
    return h("section", h("h2", "Issues", class_="unseen"), _bar(counts, total), h("p", links, class_="legend"))


def _bar(counts: Mapping[State, int], total: int) -> Html:
    parts, start = [], 0.0
    for state, count in counts.items():
        width = 100 * count / total
        if count:
            parts.append(h("rect", x=f"{start:.3f}", y=0, width=f"{width:.3f}", height=4, class_=f"fill {state.value}"))
        start += width
    return h("svg", parts, viewBox="0 0 100 4", preserveAspectRatio="none", class_="bar", aria_hidden="true")


# --- Agents ----------------------------------------------------------------------------------------


def _agents_part(asked: PageRequest, agents: Sequence[AgentRow]) -> Html:
    if not agents:
        hint = empty(
            "No agent is at work. Start one on the next issue, or lease a worktree yourself:",
            "holdfast agent run --next -- ./my-agent",
            "holdfast run --snapshot -- ./work",
        )
        return section("Agents", hint, count=0)
    rows = [_agent_cells(asked, each) for each in agents]
    return section("Agents", table(_COLUMNS, rows, label="Agents", class_="agents rows", folds=True), count=len(agents))


def _agent_cells(asked: PageRequest, row: AgentRow) -> list[Child]:
    workspace = asked.workspace
    work: Child = shortened(row.work, 90)
    if row.issue_id is not None:
        title = row.work.removeprefix(row.issue_id[:8]).strip()
        work = h(
            "a", h("code", row.issue_id[:8]), " ", shortened(title, 80), href=address(workspace, "issue", row.issue_id)
        )
    tree: Child = NOT_KNOWN
    changed: Child = NOT_KNOWN
    if row.worktree is not None:
        tree = h("a", row.worktree, href=address(workspace, "worktree", row.worktree))
        changed = lazy(asked, "changed", "…", name=row.worktree, tag="span")
    word, kind = _ALIVE[row.liveness]
    return [
        h("strong", row.actor),
        work,
        tree,
        moment(row.since, asked.now),
        time_left(row.time_left, asked.now),
        h("span", word, class_=f"alive {kind}"),
        changed,
        _awaited(row.waits_for),
    ]


def _awaited(waits: Iterable[AwaitedHolding]) -> Child:
    shown = []
    for each in waits:
        by = f", held by {each.held_by}" if each.held_by else ""
        place = f" (position {each.place})" if each.place else ""
        shown.append(h("span", f"{each.kind} {each.what}{by}{place}"))
    return shown or NOT_KNOWN


def _others_part(asked: PageRequest, holdings: Iterable[Holding]) -> Html | None:
    """Locks and operations, which have no agent."""
    others = [each for each in holdings if each.kind not in _AGENT_KINDS and not each.is_ours]
    if not others:
        return None
    rows = [
        (
            each.kind,
            h("code", each.what),
            each.who,
            moment(each.since, asked.now),
            h("span", _ALIVE[each.liveness][0], class_=f"alive {_ALIVE[each.liveness][1]}"),
            ", ".join(waiter.who for waiter in each.waiting) or NOT_KNOWN,
        )
        for each in others
    ]
    columns = ("Kind", "What", "Holder", "Since", "Alive", "Waiting")
    return section("Locks and operations", table(columns, rows, label="Locks and operations"), count=len(others))
