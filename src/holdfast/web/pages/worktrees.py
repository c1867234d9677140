"""Worktrees and snapshots: leases, the snapshot graph, and conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.errors import Failure
from holdfast.fs.names import counted, shortened
from holdfast.repository.conflicts import find_conflicts
from holdfast.repository.history import History, HistoryEntry
from holdfast.repository.locating import is_git_home
from holdfast.repository.worktrees import WorktreeState
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import (
    NOT_KNOWN,
    Page,
    PageRequest,
    address,
    empty,
    facts,
    lazy,
    moment,
    rarely,
    section,
    table,
    time_left,
)
from holdfast.web.pages.forms import action_form

MOST_SNAPSHOTS = 200
ROW, LANE = 38, 16  # pixels of the graph: the height of a row, the distance of two lanes


def worktrees_page(asked: PageRequest) -> Page:
    with asked.workspace.repository() as repository:
        states = list(repository.worktrees.states())
        history = repository.snapshots.everything(limit=MOST_SNAPSHOTS)
    rows = [_row(asked, each) for each in states]
    columns = ("Worktree", "Branch", "Lease", "Time left", "Head", "Created", "")
    conflicts = lazy(asked, "conflicts", "…") if is_git_home(str(asked.workspace.root)) else None
    body = join(
        section("Worktrees", table(columns, rows, label="Worktrees", class_="rows", folds=True), count=len(states)),
        section("Would conflict if merged now", conflicts) if conflicts is not None else None,
        section("Snapshots", _history(asked, history, "main"), count=len(history.entries)),
    )
    return Page("Worktrees", "worktrees", body, "holdfast worktree list")


def _row(asked: PageRequest, state: WorktreeState) -> list[Child]:
    config, lease = state.config, state.lease
    name: list[Child] = [
        h("a", h("strong", config.worktree_id), href=address(asked.workspace, "worktree", config.worktree_id))
    ]
    if state.is_shared:
        name.append(h("span", " shared: nothing keeps writers apart", class_="warn"))
    if not state.exists:
        name.append(h("span", " the directory is missing", class_="bad"))
    who: Child = h("span", "free", class_="dim")
    left: Child = NOT_KNOWN
    broken: Child = None
    if lease is not None:
        who, left = lease.lease.actor or lease.lease.holder_id, time_left(lease.time_left, asked.now)
        if asked.writable and lease.expired:
            broken = action_form(asked, "break-lease", "Release the expired lease", worktree=config.worktree_id)
    branch = config.git.branch if config.git else None
    head = config.head_snapshot_id
    return [
        name,
        h("code", branch) if branch else NOT_KNOWN,
        who,
        left,
        h("code", head[:8]) if head else NOT_KNOWN,
        moment(config.created_at, asked.now),
        broken,
    ]


def worktree_page(asked: PageRequest) -> Page:
    name = asked.name
    with asked.workspace.repository() as repository:
        state = repository.worktrees.state(name)
        history = repository.snapshots.line(name, limit=MOST_SNAPSHOTS)
    lease, config = state.lease, state.config
    pairs: list[tuple[str, Child]] = [
        ("Directory", h("code", str(state.path))),
        ("Branch", h("code", config.git.branch) if config.git and config.git.branch else None),
        ("Isolation", config.isolation.value),
        ("Label", config.label),
        ("Created", moment(config.created_at, asked.now)),
        ("Lease", lease.lease.actor or lease.lease.holder_id if lease else "free"),
        ("Time left", time_left(lease.time_left, asked.now) if lease else None),
        ("Token", lease.lease.fencing_token if lease else None),
        ("Holder", lease.liveness.value if lease else None),
        ("Purpose", lease.lease.purpose if lease else None),
        ("Waiting", ", ".join(each.actor or each.holder_id for each in lease.waiters) if lease else None),
    ]
    changes = lazy(asked, "changes", "…", name=name)
    body = join(
        h("div", facts(pairs), class_="panel"),
        section("Changes since the last snapshot", changes),
        section("Snapshots", _history(asked, history, name), count=len(history.entries)),
    )
    return Page(name, "worktrees", body, f"holdfast history --worktree {name}")


def changes_part(asked: PageRequest) -> Html:
    with asked.workspace.repository() as repository:
        found = repository.snapshots.status(asked.name)
    files = [each for each in found.changes if each.kind != "d"]
    if not files:
        return h("p", "Nothing has changed.", class_="dim")
    link = h(
        "a", f"Show {counted(len(files), 'changed file')}", href=address(asked.workspace, "diff", worktree=asked.name)
    )
    return h("p", link)


def conflicts_part(asked: PageRequest) -> Html:
    """The worktrees that would conflict with each other, or with the branch that work lands on."""
    return rarely(asked, "conflicts", lambda: _conflicts(asked))


def _conflicts(asked: PageRequest) -> Html:
    try:
        with asked.workspace.repository() as repository:
            report = find_conflicts(repository)
    except Failure as failure:
        return h("p", failure.message, class_="dim")
    if not report.conflicts:
        return h("p", f"None of {counted(len(report.worktrees), 'worktree')}.", class_="dim")
    rows: list[list[Child]] = [
        [each.worktree, each.other, join([h("code", path), " "] for path in each.paths[:8])]
        for each in report.conflicts
    ]
    skipped = [h("p", f"{each.worktree} was left out: {each.reason}", class_="dim") for each in report.skipped]
    return join(table(("Worktree", "Conflicts with", "Paths"), rows, label="Conflicts"), skipped)


# --- History ---------------------------------------------------------------------------------------


def _history(asked: PageRequest, history: History, worktree: str) -> Html:
    if not history.entries:
        return empty("There are no snapshots yet. To take one of a worktree:", "holdfast snapshot")
    rows = [_snapshot(asked, each, worktree) for each in history.entries]
    more = h("p", f"Only the newest {MOST_SNAPSHOTS} are shown.", class_="dim") if history.more else None
    form = h(
        "form",
        h("input", type="hidden", name="worktree", value=worktree),
        h(
            "p",
            h("button", "Compare"),
            " the snapshot selected on the left with the one on the right",
            class_="compare dim",
        ),
        h("div", _drawn(history.entries), h("ol", rows, class_="snapshots"), class_="history"),
        action=address(asked.workspace, "diff"),
        method="get",
    )
    return join(form, more)


def _snapshot(asked: PageRequest, entry: HistoryEntry, worktree: str) -> Html:
    each, marks = entry.descriptor, entry.marks
    short = each.snapshot_id
    tags: list[Child] = [h("span", f"head of {name}", class_="label") for name in marks.heads]
    tags += [h("span", name, class_="label") for name in marks.references]
    tags += [h("span", "pinned", class_="label")] if marks.pinned else []
    tags += [h("span", "files may have changed during capture", class_="warn")] if entry.warning else []
    link: Child = h("code", short[:8])
    if entry.parent_id:
        link = h(
            "a",
            link,
            href=address(asked.workspace, "diff", worktree=worktree, old=entry.parent_id, new=short),
            title="changes in this snapshot",
        )
    return h(
        "li",
        h("input", type="radio", name="old", value=short, aria_label=f"compare from {short}"),
        h("input", type="radio", name="new", value=short, aria_label=f"compare to {short}"),
        link,
        h("span", shortened(each.note or each.worktree_id, 120), class_="note"),
        tags,
        h("span", moment(each.created_at, asked.now), class_="dim"),
    )


def _drawn(entries: Sequence[HistoryEntry]) -> Html:
    """The graph of parents, children above: a lane per line of descent."""
    rows = {each.descriptor.snapshot_id: number for number, each in enumerate(entries)}
    lanes, width = _lanes(entries)
    lines = [
        h("path", d=_curve(lanes[name], rows[name], lanes[parent], rows[parent]), class_="edge")
        for name, parent in ((each.descriptor.snapshot_id, each.parent_id) for each in entries)
        if parent in rows
    ]
    dots = [
        h("circle", cx=8 + LANE * lanes[name], cy=ROW * row + ROW // 2, r=4, class_="snap")
        for name, row in rows.items()
    ]
    size = {"width": 16 + LANE * (width - 1), "height": ROW * len(entries)}
    return h("svg", lines, dots, **size, class_="lanes", aria_hidden="true")


def _lanes(entries: Iterable[HistoryEntry]) -> tuple[dict[str, int], int]:
    """The lane of each snapshot, and how many there are. A lane leads to a parent, and ends there."""
    leads: list[str | None] = []  # the snapshot that each lane leads to
    found: dict[str, int] = {}
    for each in entries:
        name = each.descriptor.snapshot_id
        mine = [number for number, goal in enumerate(leads) if goal == name]
        lane = mine[0] if mine else next((n for n, goal in enumerate(leads) if goal is None), len(leads))
        leads += [None] * (lane + 1 - len(leads))
        for number in mine[1:]:
            leads[number] = None
        leads[lane] = each.parent_id
        found[name] = lane
    return found, max(len(leads), 1)


def _curve(lane: int, row: int, to_lane: int, to_row: int) -> str:
    x, y = 8 + LANE * lane, ROW * row + ROW // 2
    goal_x, goal_y = 8 + LANE * to_lane, ROW * to_row + ROW // 2
    if x == goal_x:
        return f"M{x} {y}V{goal_y}"
    return f"M{x} {y}V{goal_y - ROW // 2}C{x} {goal_y} {goal_x} {goal_y - ROW // 2} {goal_x} {goal_y}"
