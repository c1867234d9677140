"""The contents: each page, and each part of one, by its name in addresses."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.html import Html
from holdfast.web.layout import Page, PageRequest
from holdfast.web.pages import board, diff, graph, issue, landing, overview, records, timeline, worktrees

PAGES: dict[str, Callable[[PageRequest], Page]] = {
    "overview": overview.overview_page,
    "board": board.board_page,
    "new": issue.new_page,
    "issue": issue.issue_page,
    "graph": graph.graph_page,
    "landing": landing.landing_page,
    "run": landing.run_page,
    "worktrees": worktrees.worktrees_page,
    "worktree": worktrees.worktree_page,
    "diff": diff.diff_page,
    "timeline": timeline.timeline_page,
    "ledger": records.ledger_page,
    "audit": records.audit_page,
    "doctor": records.doctor_page,
}
PARTS: dict[str, Callable[[PageRequest], Html]] = {
    "attention": overview.attention_part,
    "changed": overview.changed_part,
    "names": board.names_part,
    "prompt": issue.prompt_part,
    "batches": landing.batches_part,
    "log": landing.log_part,
    "run-log": landing.run_log_part,
    "changes": worktrees.changes_part,
    "conflicts": worktrees.conflicts_part,
    "ledger-check": records.ledger_check_part,
    "audit-check": records.audit_check_part,
    "findings": records.findings_part,
}
