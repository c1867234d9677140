"""Landing: the queues, the outcomes of entries, the check runs, and their live logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from holdfast.clock import format_duration
from holdfast.errors import NotFound, Refused
from holdfast.fs.names import counted, is_safe_name, shortened
from holdfast.repository.context import RepositoryPaths
from holdfast.repository.landing_checks import CheckRun, check_runs, is_running, read_log
from holdfast.repository.landing_records import Landing, LandingState, lease_of
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
    notice,
    section,
    table,
)
from holdfast.web.pages.forms import action_form
from holdfast.web.workspaces import Workspace

MOST_ENTRIES, MOST_RUNS = 200, 60
MOST_LOG, MOST_LOG_IN_FILE = 256 << 10, 32 << 10  # bytes: the end of a log
_RETRYABLE = (LandingState.CONFLICT, LandingState.FAILED, LandingState.WITHDRAWN)


def landing_page(asked: PageRequest) -> Page:
    """All queues; or one entry, if it is named."""
    if asked.name:
        return entry_page(asked)
    workspace = asked.workspace
    try:
        with workspace.landings() as landings:
            queued, everything, targets = landings.queued(), landings.all(), landings.targets()
            why = {each.landing_id: landings.waits_for(each) for each in queued}
    except Refused as refusal:
        return Page("Landing", "landing", empty(refusal.message, "holdfast init"), "holdfast landing list")
    if not everything:
        hint = empty("No work has been queued to land yet. To land the work of a worktree:", "holdfast land")
        return Page("Landing", "landing", hint, "holdfast landing list")
    decided = [each for each in reversed(everything) if not each.is_open]
    publishing = [
        notice(
            "warn",
            f"Publishing {counted(len(each.intent.entries), 'entry')} to {each.branch}: ",
            h("code", each.intent.new[:12]),
        )
        for each in targets
        if each.intent is not None
    ]
    body = join(
        publishing,
        section("Queue", _queue(asked, queued, why), count=len(queued)),
        section("Batches", lazy(asked, "batches", batches_part(asked)), id_="batches"),
        section("Outcomes", _outcomes(asked, decided[:MOST_ENTRIES]), count=len(decided)),
    )
    return Page("Landing", "landing", body, "holdfast landing list --all")


def _queue(asked: PageRequest, queued: Sequence[Landing], why: dict[str, str]) -> Html:
    if not queued:
        return empty("Nothing is queued.", "holdfast land")
    rows: list[list[Child]] = []
    for position, each in enumerate(queued, 1):
        cancel = action_form(asked, "landing-cancel", "Cancel", landing=each.landing_id) if asked.writable else None
        rows.append(
            [
                position,
                _link(asked.workspace, each),
                each.branch,
                _source(asked.workspace, each),
                each.actor or NOT_KNOWN,
                moment(each.queued_at, asked.now),
                why[each.landing_id] or NOT_KNOWN,
                cancel,
            ]
        )
    return table(
        ("", "Work", "Onto", "From", "By", "Queued", "Waits for", ""), rows, label="Queue", class_="rows", folds=True
    )


def _outcomes(asked: PageRequest, entries: Sequence[Landing]) -> Html:
    """The entries with an outcome. Entries that were published together share their last commit, and are a batch."""
    rows: list[list[Child]] = []
    for each in entries:
        retry = None
        if asked.writable and each.state in _RETRYABLE:
            retry = action_form(asked, "landing-retry", "Retry", landing=each.landing_id)
        why = ", ".join(each.conflicts[:5]) or each.reason
        rows.append(
            [
                h("span", each.state.value, class_=f"state {each.state.value}"),
                _link(asked.workspace, each),
                each.branch,
                _source(asked.workspace, each),
                moment(each.decided_at, asked.now),
                h("code", each.landed_as[:12]) if each.landed_as else shortened(why, 160) or NOT_KNOWN,
                retry,
            ]
        )
    return table(
        ("Outcome", "Work", "Onto", "From", "Decided", "As", ""), rows, label="Outcomes", class_="rows", folds=True
    )


# --- Batches ---------------------------------------------------------------------------------------


class TestedBatch(NamedTuple):
    """Entries that were tested together, and the runs about them, the oldest first."""

    target: str
    entries: tuple[str, ...]
    runs: list[CheckRun]


def batches_of(runs: Iterable[CheckRun]) -> list[TestedBatch]:
    """The batches of some runs, both the oldest first. A run belongs to the smallest batch with all of its entries:
    tests of the whole, tests once more, and those of the parts that it was bisected into."""
    found: list[TestedBatch] = []
    for run in runs:
        entries = _entries(run)
        whole = [each for each in found if each.target == run.target and set(entries) <= set(each.entries)]
        if whole:
            min(whole, key=lambda each: len(each.entries)).runs.append(run)
        else:
            found.append(TestedBatch(run.target, entries, [run]))
    return found


def _entries(run: CheckRun) -> tuple[str, ...]:
    return run.entries or (run.landing_id,)


def batches_part(asked: PageRequest) -> Html:
    """The batches, the newest first. While somebody works on a queue, the scripts ask again."""
    with asked.workspace.landings() as landings, asked.workspace.repository() as repository:
        paths, entries = repository.paths, {each.landing_id: each for each in landings.all()}
        runs = list(islice(check_runs(paths), MOST_RUNS))[::-1]
        going = frozenset(run.run_id for run in runs if is_running(paths, run))
        states = [repository.named_leases.state(lease_of(each.name)) for each in landings.targets()]
        is_busy = going or any(each is not None and not each.expired for each in states)
    if not runs:
        text = "No checks ran on this machine. Commands that a commit must pass before it lands are a setting:"
        shown = empty(text, "holdfast config set land.checks 'make test'")
    else:
        shown = join(_batch(asked, each, entries, going) for each in reversed(batches_of(runs)))
    return join(shown, h("span", data_again="1000", hidden=True) if is_busy else None)


def _batch(asked: PageRequest, batch: TestedBatch, entries: Mapping[str, Landing], going: frozenset[str]) -> Html:
    """The outcomes of the entries, then one row per run with a mark for each entry that it tested."""
    members = [
        h("li", _link(asked.workspace, found), " ", h("span", found.state.value, class_=f"state {found.state.value}"))
        if (found := entries.get(each)) is not None
        else h("li", h("code", each[:8]))
        for each in batch.entries
    ]
    rows: list[list[Child]] = []
    for run in batch.runs:
        word, kind = ("running", "warn") if run.run_id in going else _verdict(run)
        commands = ", ".join(f"{each.command} {'passed' if each.passed else 'failed'}" for each in run.commands)
        log = address(asked.workspace, "run", run.run_id)
        rows.append(
            [
                _marks(batch, run, kind),
                h("span", word, class_=kind),
                h("code", run.commit[:12]),
                moment(run.began_at, asked.now),
                format_duration(run.seconds) if run.seconds else NOT_KNOWN,
                h("span", shortened(commands, 90), class_="one-line") if commands else NOT_KNOWN,
                h("a", "log", href=log, aria_label=f"Log of the run on {run.commit[:12]}"),
            ]
        )
    title = h("h3", f"{counted(len(batch.entries), 'entry')} onto {batch.target}")
    columns = ("Tested", "Result", "Commit", "Began", "Took", "Commands", "")
    runs = table(columns, rows, label=f"Runs for {batch.entries[-1][:8]}", class_="rows")
    return h("div", title, h("ol", members, class_="members"), runs, class_="panel batch")


def _marks(batch: TestedBatch, run: CheckRun, kind: str) -> Html:
    """A mark per entry of the batch: filled if the run tested it."""
    tested = set(_entries(run))
    marks = [h("span", class_=f"mark {kind}" if each in tested else "mark") for each in batch.entries]
    numbers = [str(number) for number, each in enumerate(batch.entries, 1) if each in tested]
    label = f"{' to '.join(dict.fromkeys((numbers[0], numbers[-1])))} of {len(batch.entries)}"
    return h("span", h("span", marks, class_="marks", aria_hidden="true"), label, class_="tested")


def _verdict(run: CheckRun) -> tuple[str, str]:
    if run.cancelled:
        return "cancelled", "dim"
    return {True: ("passed", "good"), False: ("failed", "bad"), None: ("ended", "dim")}[run.passed]


def _link(workspace: Workspace, entry: Landing) -> Html:
    title = shortened(entry.title or entry.landing_id, 90)
    return h("a", h("code", entry.landing_id[:8]), " ", title, href=address(workspace, "landing", entry.landing_id))


def _source(workspace: Workspace, entry: Landing) -> Child:
    if entry.worktree_id is None:
        return h("code", entry.commit[:12])
    return h("a", entry.worktree_id, href=address(workspace, "worktree", entry.worktree_id))


def entry_page(asked: PageRequest) -> Page:
    """One entry, and the log of its checks."""
    with asked.workspace.landings() as landings:
        entry = landings.find(_checked(asked.name))
        waits = landings.waits_for(entry)
    issue = entry.issue_id
    pairs: list[tuple[str, Child]] = [
        ("Outcome", h("span", entry.state.value, class_=f"state {entry.state.value}")),
        ("Onto", entry.branch),
        ("From", _source(asked.workspace, entry)),
        ("Issue", h("a", h("code", issue[:8]), href=address(asked.workspace, "issue", issue)) if issue else None),
        ("By", entry.actor),
        ("Commit", h("code", entry.commit)),
        ("Landed as", h("code", entry.landed_as) if entry.landed_as else None),
        ("Queued", moment(entry.queued_at, asked.now)),
        ("Decided", moment(entry.decided_at, asked.now) if entry.decided_at else None),
        ("Style", entry.style.value),
        ("Priority", entry.priority or None),
        ("Waits for", waits),
        ("Reason", entry.reason),
        ("Conflicts", join([h("code", each), " "] for each in entry.conflicts) if entry.conflicts else None),
        ("Flaky", "a check failed, then passed when it ran again" if entry.flaky else None),
    ]
    log = lazy(asked, "log", "…", name=entry.landing_id, tag="pre", class_="log")
    body = join(h("div", facts(pairs), class_="panel"), section("Log", log))
    return Page(entry.title or entry.landing_id, "landing", body, f"holdfast landing show {entry.landing_id}")


def log_part(asked: PageRequest) -> Html:
    """The end of the log of the last run that tested an entry."""
    with asked.workspace.landings() as landings, asked.workspace.repository() as repository:
        entry, paths = landings.find(_checked(asked.name)), repository.paths
        about = (run for run in check_runs(paths) if entry.landing_id in _entries(run) or run.run_id == entry.log)
        run = next(about, None)
        if run is None:
            return h("span", "No checks ran for this entry on this machine.", class_="dim")
        return _log(asked, paths, run)


def run_page(asked: PageRequest) -> Page:
    """One run of checks, and its log."""
    with asked.workspace.repository() as repository:
        run = _run(repository.paths, asked.name)
    links = [
        (h("a", h("code", each[:8]), href=address(asked.workspace, "landing", each)), " ") for each in _entries(run)
    ]
    commands = [
        h("div", h("code", each.command), " ", each.message or f"exit status {each.exit_status}")
        for each in run.commands
    ]
    pairs: list[tuple[str, Child]] = [
        ("Entries", links),
        ("Onto", run.target),
        ("Commit", h("code", run.commit)),
        ("Began", moment(run.began_at, asked.now)),
        ("Took", format_duration(run.seconds) if run.seconds else None),
        ("Commands", commands or None),
    ]
    log = lazy(asked, "run-log", "…", name=run.run_id, tag="pre", class_="log")
    body = join(h("div", facts(pairs), class_="panel"), section("Log", log))
    return Page("Check run", "landing", body, f"holdfast landing log {run.landing_id}")


def run_log_part(asked: PageRequest) -> Html:
    """The end of the log of a run."""
    with asked.workspace.repository() as repository:
        return _log(asked, repository.paths, _run(repository.paths, asked.name))


def _run(paths: RepositoryPaths, run_id: str) -> CheckRun:
    found = next((each for each in check_runs(paths) if each.run_id == run_id), None)
    if found is None:
        raise NotFound("this run is not kept on this machine")
    return found


def _log(asked: PageRequest, paths: RepositoryPaths, run: CheckRun) -> Html:
    """The end of a log. While the run goes on, the scripts ask again."""
    going = is_running(paths, run)
    text = _end_of_log(paths, run.run_id, MOST_LOG if asked.part is None else MOST_LOG_IN_FILE)
    return join(text or "(empty)\n", h("span", "…", data_again="1000", class_="dim") if going else None)


def _end_of_log(paths: RepositoryPaths, run_id: str, size: int) -> str:
    content, offset = b"", 0
    while block := read_log(paths, run_id, offset=offset):
        content, offset = (content + block)[-size:], offset + len(block)
    return content.decode(errors="replace")


def _checked(text: str) -> str:
    if not is_safe_name(text):
        raise NotFound("this is not the id of an entry")
    return text
