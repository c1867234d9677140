"""The ledger, the audit trail with its chain, and what the doctor finds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from holdfast.errors import AuditChainBroken, NotInitialised
from holdfast.findings import Finding, Severity, is_wrong
from holdfast.fs.names import counted, shortened
from holdfast.ledger.log import Recorded
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import (
    Page,
    PageRequest,
    address,
    command_line,
    empty,
    flat,
    lazy,
    moment,
    notice,
    section,
    table,
    time_left,
)

MOST_SHOWN = 200
MOST_VERIFIED = 20_000  # events that are verified unasked
_MARKS = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "dim"}


def ledger_page(asked: PageRequest) -> Page:
    """The last events, the claims, and whether the ledger is sound."""
    command = "holdfast ledger log"
    try:
        with asked.workspace.ledger() as opened:
            last = opened.ledger.sequence
            before = _before(asked.query, last)
            events = list(opened.ledger.latest(MOST_SHOWN, until=before))
            archived = opened.ledger.archived
            active, expired = opened.claims.active(), opened.claims.expired()
            now = opened.ledger.store.now()
    except NotInitialised:
        hint = empty("There is no ledger here. Agents can share results through one:", "holdfast ledger init")
        return Page("Ledger", "ledger", hint, command)
    claims = [
        [
            h("code", each.node_id),
            each.owner,
            moment(each.acquired_at, asked.now),
            time_left(each.expiry() - now, asked.now),
        ]
        for each in (*active, *expired)
    ]
    rows = [_event_row(asked, each) for each in reversed(events)]
    body = join(
        _soundness(asked, last),
        section(
            "Claims",
            table(("Node", "Actor", "Since", "Time left"), claims, label="Claims", folds=True),
            count=len(claims),
        )
        if claims
        else None,
        section(
            "Events",
            table(("", "When", "Type", "Content"), rows, label="Events", class_="rows tight", folds=True),
            count=last,
        )
        if rows or archived
        else empty("The ledger has no events yet.", 'holdfast ledger append \'{"type":"note"}\''),
        _archived("Events", archived),
        None if archived else _older(asked, "ledger", before - MOST_SHOWN),
    )
    return Page("Ledger", "ledger", body, command)


def _soundness(asked: PageRequest, events: int) -> Html:
    """Whether the ledger is sound; a long one is verified only on request."""
    found = lazy(asked, "ledger-check", h("p", "Verifying…", class_="notice"), once=True)
    if events <= MOST_VERIFIED:
        return found
    return h("details", h("summary", f"Verify {events} events"), found, class_="run")


def _before(query: Mapping[str, str], last: int) -> int:
    text = query.get("before", "")
    return min(last, int(text)) if text.isdigit() and len(text) < 12 else last


def _older(asked: PageRequest, page: str, before: int) -> Html | None:
    if before <= 0:
        return None
    return h("p", h("a", "Older", href=address(asked.workspace, page, before=str(before)), class_="button"))


def _archived(what: str, last: int) -> Html | None:
    return h("p", f"{what} 1 to {last} are archived.", class_="dim") if last else None


def _event_row(asked: PageRequest, recorded: Recorded) -> list[Child]:
    rest = {name: value for name, value in recorded.event.items() if name not in ("type", "timestamp", "holder")}
    at = str(recorded.event.get("timestamp", ""))
    return [recorded.sequence, moment(at, asked.now), h("strong", str(recorded.event.get("type"))), flat(rest)]


def ledger_check_part(asked: PageRequest) -> Html:
    with asked.workspace.ledger() as opened:
        report = opened.verify()
    if not report.findings:
        return notice("good", f"✓ Verified: {counted(report.events, 'event')}, no findings.")
    return join(
        notice("bad", f"✗ {counted(len(report.findings), 'finding')}."),
        [h("p", each.message) for each in report.findings[:50]],
    )


# --- Audit -----------------------------------------------------------------------------------------


def audit_page(asked: PageRequest) -> Page:
    wanted = asked.query.get("event", "")
    with asked.workspace.repository() as repository:
        reader = repository.audit()
        found = (each for each in reader.read() if not wanted or each.event == wanted)
        before = asked.query.get("before", "")
        limit = int(before) if before.isdigit() and len(before) < 12 else None
        entries = list(deque((each for each in found if limit is None or each.number <= limit), maxlen=MOST_SHOWN))
    rows = [
        [
            each.number,
            moment(each.at, asked.now),
            h("a", each.event, href=address(asked.workspace, "audit", event=each.event)),
            flat(each.facts),
            h("code", shortened(each.actor, 40)),
            h("code", each.hash[:8], title=each.hash),
        ]
        for each in reversed(entries)
    ]
    body = join(
        lazy(asked, "audit-check", h("p", "Verifying the chain…", class_="notice"), once=True),
        h("p", "Only ", h("strong", wanted), " ", h("a", "show all", href=address(asked.workspace, "audit")))
        if wanted
        else None,
        table(("", "When", "Event", "Facts", "By", "Hash"), rows, label="Audit trail", class_="rows tight", folds=True),
        _archived("Entries", reader.archived),
        _older(asked, "audit", entries[0].number - 1) if entries and len(entries) == MOST_SHOWN else None,
    )
    return Page("Audit", "audit", body, "holdfast audit --verify")


def audit_check_part(asked: PageRequest) -> Html:
    """Verify the whole chain."""
    with asked.workspace.repository() as repository:
        try:
            end = repository.verify_audit()
        except AuditChainBroken as failure:
            return notice("bad", "✗ The chain is broken: ", failure.message, ".")
    return notice(
        "good", f"✓ The chain is intact: {counted(end.entries, 'entry')}, the last hash is ", h("code", end.hash)
    )


# --- Doctor ----------------------------------------------------------------------------------------


def doctor_page(asked: PageRequest) -> Page:
    body = lazy(asked, "findings", h("p", "Examining the repository…", class_="notice"), once=True)
    return Page("Doctor", "doctor", body, "holdfast doctor")


def findings_part(asked: PageRequest) -> Html:
    """Examine the repository, and say what --fix would do. Nothing is changed."""
    with asked.workspace.repository(to_examine=True) as repository:
        findings = repository.examine()
    verdict = (
        notice("bad", "✗ The repository is not healthy.")
        if is_wrong(findings)
        else notice("good", "✓ The repository is healthy.")
    )
    fix = h("p", "To make all safe repairs: ", command_line("holdfast doctor --fix" + asked.workspace.repo_option))
    return join(verdict, fix if any(each.fixable for each in findings) else None, map(_finding, findings))


def _finding(each: Finding) -> Html:
    return h(
        "article",
        h("h2", h("span", each.severity.value, class_=_MARKS[each.severity]), " ", each.message),
        h("p", each.meaning),
        h("p", h("span", "--fix: ", class_="dim"), each.remedy),
        class_="finding",
    )
