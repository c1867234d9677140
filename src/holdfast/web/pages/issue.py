"""One issue: its text, claim, dependencies, gates with their runs, attempts, events, and the prompt of its agent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import islice

from holdfast.clock import format_duration, format_instant, parse_instant
from holdfast.errors import NotFound
from holdfast.fs.names import is_safe_name, shortened
from holdfast.issues.model import Gate, GateRun, GateStatus, Issue, IssueClaim, IssueEvent, Priority, State
from holdfast.issues.prompt import Ending, issue_prompt
from holdfast.repository.timeline import issue_spans
from holdfast.store.model import Entry
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import (
    NOT_KNOWN,
    SHORT,
    STATES,
    Page,
    PageRequest,
    address,
    facts,
    flat,
    issue_link,
    lazy,
    moment,
    section,
    state_mark,
    table,
    time_left,
)
from holdfast.web.pages.forms import action_form, field, select_field, text_field
from holdfast.web.workspaces import Workspace

MOST_EVENTS = 300
_GATE_MARKS = {GateStatus.PASSED: "good", GateStatus.FAILED: "bad", GateStatus.PENDING: "dim"}
_MOVES = (State.READY, State.DONE, State.REJECTED, State.ARCHIVED)


def issue_page(asked: PageRequest) -> Page:
    workspace, issue_id = asked.workspace, _checked_id(asked.name)
    with workspace.tracker() as tracker:
        found = tracker.find_id(issue_id)
        issue = tracker.issue(found)
        state = tracker.state(issue)
        record = tracker.claims.state(found)
        claim = record.claim if record else None
        near = dict(tracker.transactions.with_dependencies(issue).issues)
        dependents = [tracker.transactions.lookup(each) for each in tracker.dependents_of(found)]
        left = None if claim is None else claim.time_left(tracker.transactions.moment(), for_others=True)
        gates, runs = tracker.gates.all(), tracker.gates.runs(found) if issue.gates_required else []
        events = list(islice(tracker.newest_events_of(found), MOST_EVENTS))[::-1]
    described = h("div", issue.description, class_="prose") if issue.description else h("p", "None.", class_="dim")
    main = join(
        section("Description", described),
        _gates_part(asked, issue, gates, runs),
        _attempts_part(asked, [each.record for each in events]),
        _events_part(asked, events),
        section(
            "Prompt",
            h("p", "The text that an agent gets when it works on this issue.", class_="dim"),
            h("details", h("summary", "Show"), lazy(asked, "prompt", "…", name=found, tag="pre")),
        ),
    )
    side = join(
        _facts_part(asked, issue, state, claim, left),
        _dependency_part(workspace, issue, near, [each for each in dependents if each is not None]),
        _actions_part(asked, issue, state, claim, left) if asked.writable else None,
    )
    body = h("div", h("div", main, class_="main-column"), h("aside", side, aria_label="Details"), class_="two-columns")
    lead = join(state_mark(state), " ", h("code", issue.id, class_="id"))
    return Page(issue.title, "board", body, f"holdfast issue show {found[:SHORT]}", lead)


def prompt_part(asked: PageRequest) -> Html:
    with asked.workspace.tracker() as tracker:
        found = tracker.find_id(_checked_id(asked.name))
        return join(issue_prompt(tracker, found, ending=Ending.COMMAND).text)


def _checked_id(text: str) -> str:
    if not is_safe_name(text):
        raise NotFound("this is not the id of an issue")
    return text


def _facts_part(asked: PageRequest, issue: Issue, state: State, claim: IssueClaim | None, left: float | None) -> Html:
    labels = [h("a", each, href=address(asked.workspace, "board", label=each), class_="label") for each in issue.labels]
    touches = join([h("code", each), " "] for each in issue.touches)
    pairs: list[tuple[str, Child]] = [
        ("State", state_mark(state)),
        ("Priority", h("span", issue.priority.value, class_=f"priority {issue.priority.value}")),
        ("Assignee", issue.assignee),
        ("Labels", labels or None),
        ("Touches", touches if issue.touches else None),
        ("Created", moment(issue.created_at, asked.now)),
        ("Updated", moment(issue.updated_at, asked.now)),
    ]
    if claim is not None:
        pairs += [
            ("Claimed by", claim.assignee),
            ("Claimed", moment(claim.claimed_at, asked.now)),
            ("Time left", time_left(left, asked.now)),
            ("Token", claim.token),
            ("Purpose", claim.purpose),
        ]
    pairs += [(name, shortened(value, 300)) for name, value in issue.context.items()]
    return section("Details", facts(pairs))


def _dependency_part(
    workspace: Workspace, issue: Issue, near: Mapping[str, Issue | None], dependents: list[Issue]
) -> Html | None:
    waits = [h("li", _near_issue(workspace, near.get(on), on)) for on in issue.dependencies]
    needed = [h("li", _near_issue(workspace, each, each.id)) for each in dependents]
    if not waits and not needed:
        return None
    return section(
        "Dependencies",
        h("h3", "Depends on") if waits else None,
        h("ul", waits, class_="plain") if waits else None,
        h("h3", "Needed by") if needed else None,
        h("ul", needed, class_="plain") if needed else None,
    )


def _near_issue(workspace: Workspace, issue: Issue | None, issue_id: str) -> Child:
    if issue is None:
        return [h("code", issue_id[:SHORT]), " is missing"]
    return [h("span", class_=f"dot {issue.state.value}", title=STATES[issue.state]), issue_link(workspace, issue)]


def _gates_part(asked: PageRequest, issue: Issue, gates: Mapping[str, Gate], runs: list[GateRun]) -> Html | None:
    if not issue.gates_required:
        return None
    rows: list[list[Child]] = []
    for key in issue.gates_required:
        gate, status = gates.get(key), issue.gate_status(key)
        last = next((each for each in reversed(runs) if each.gate_key == key), None)
        by: Child = "a command" if gate is not None and gate.checker is not None else "a person"
        decide: Child = None
        if asked.writable and (gate is None or gate.checker is None):
            hidden = {"issue": issue.id, "gate": key}
            decide = join(
                action_form(asked, "gate-pass", "Pass", **hidden), action_form(asked, "gate-fail", "Fail", **hidden)
            )
        mark = h("span", status.value, class_=_GATE_MARKS[status])
        rows.append([h("strong", key), mark, by, moment(last.completed_at, asked.now) if last else NOT_KNOWN, decide])
    columns = ("Gate", "Status", "Decided by", "Last run", "")
    return section(
        "Gates", table(columns, rows, label="Gates", folds=True), [_run(asked, each) for each in reversed(runs)]
    )


def _run(asked: PageRequest, run: GateRun) -> Html:
    kind = "good" if run.status == "passed" else "bad"
    output = "\n".join(filter(None, (run.stdout, run.stderr, run.message)))
    summary = join(
        h("strong", run.gate_key),
        " ",
        h("span", run.status, class_=kind),
        f" in {format_duration(run.duration_ms / 1000)} ",
        moment(run.completed_at, asked.now),
    )
    return h("details", h("summary", summary), h("pre", f"$ {run.command}\n{output}"), class_="run")


def _attempts_part(asked: PageRequest, events: list[IssueEvent]) -> Html | None:
    """The claims of the issue, how long they lasted, and how they ended; the newest first."""
    reasons: dict[float | None, object] = {}
    for event in events:
        with contextlib.suppress(ValueError):  # another program wrote it
            reasons[parse_instant(event.timestamp)] = event.unknown.get("reason")
    rows: list[list[Child]] = []
    for each in reversed(list(issue_spans(events))):
        took = format_duration(max(1, round((asked.now if each.end is None else each.end) - each.begin)))
        why = shortened(str(reasons.get(each.end) or NOT_KNOWN), 300)
        began = moment(format_instant(each.begin), asked.now)
        rows.append([h("strong", each.who), each.how or "not ended", began, took, why])
    if not rows:
        return None
    columns = ("By", "How it ended", "Began", "Took", "Why")
    return section("Attempts", table(columns, rows, label="Attempts", folds=True), count=len(rows))


def _events_part(asked: PageRequest, events: list[Entry[IssueEvent]]) -> Html:
    """The events, the newest first; ends of attempts stand out."""
    lines = [
        h(
            "li",
            moment(event.timestamp, asked.now),
            h("strong", event.type.removeprefix("issue_").replace("_", " ")),
            flat(_event_facts(event)),
            class_=_ATTEMPTS.get(event.type),
        )
        for _, event in reversed(events)
    ]
    return section("Events", h("ol", lines, class_="events"), count=len(events))


_ATTEMPTS = {
    "issue_released": "warn",
    "issue_not_landed": "bad",
    "gate_failed": "bad",
    "issue_landed": "good",
    "issue_completed": "good",
    "gate_passed": "good",
}
"""Events that end an attempt, or decide about one."""


def _event_facts(event: IssueEvent) -> dict[str, object]:
    known = event.unknown
    repeated = "updated_by" if known.get("updated_by") == known.get("by") else ""
    return {name.replace("_", " "): value for name, value in known.items() if name != repeated}


# --- Actions ---------------------------------------------------------------------------------------


def _actions_part(asked: PageRequest, issue: Issue, state: State, claim: IssueClaim | None, left: float | None) -> Html:
    forms: list[Child] = []
    if claim is None or (left is not None and left <= 0):
        forms.append(
            action_form(asked, "claim", "Claim for me", text_field("For how long", "ttl", "8h"), issue=issue.id)
        )
    if claim is not None:
        reason = text_field("Reason", "reason", "")
        forms.append(action_form(asked, "release", "Release", reason, issue=issue.id, claim=claim.claim_id))
    moves = [(each.value, STATES[each]) for each in _MOVES if each is not state]
    claimed = {"claim": claim.claim_id} if claim is not None else {}
    forms.append(
        action_form(asked, "move", "Move", select_field("New state", "state", moves), issue=issue.id, **claimed)
    )
    edit = action_form(
        asked,
        "edit",
        "Save",
        text_field("Title", "title", issue.title),
        field("Description", h("textarea", issue.description, name="description", rows=6)),
        select_field("Priority", "priority", [(each.value, each.value) for each in Priority], issue.priority.value),
        text_field("Labels", "labels", " ".join(issue.labels)),
        issue=issue.id,
    )
    forms.append(h("details", h("summary", "Edit"), edit))
    return section("Actions", forms, class_="actions")


def new_page(asked: PageRequest) -> Page:
    """The form for a new issue."""
    if not asked.writable:
        raise NotFound("this server is read-only", hint="Start it with --writable to create issues here.")
    form = action_form(
        asked,
        "create",
        "Create",
        text_field("Title", "title", ""),
        field("Description", h("textarea", name="description", rows=8)),
        select_field("Priority", "priority", [(each.value, each.value) for each in Priority], Priority.NORMAL.value),
        text_field("Labels", "labels", "", hint="separated by spaces: area:core docs"),
        text_field("Depends on", "depends_on", "", hint="ids of issues: 4f1c 09ab"),
    )
    return Page("New issue", "board", h("div", form, class_="narrow"), "holdfast issue create TITLE")
