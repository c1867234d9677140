"""`holdfast issue`: which commands there are about issues."""

from __future__ import annotations

from holdfast.cli.group import Entry, Group

group = Group(
    "issue",
    help="""\
Issues: what is to be done, what waits for what, and who works on it. They are plain JSON files below
.jit/, which any number of processes may change at the same time. An id may be shortened to any
beginning that no other id has.

\b
Example:
  holdfast issue init
  holdfast issue create "Write the parser" --priority high
  holdfast issue claim-next
  holdfast issue finish 4f1c
""",
    table={
        "init": Entry("holdfast.cli.issue_basics:init", "Make an empty tracker here."),
        "create": Entry("holdfast.cli.issue_basics:create", "Create an issue, or a batch of them."),
        "list": Entry("holdfast.cli.issue_basics:list_", "List issues."),
        "show": Entry("holdfast.cli.issue_basics:show", "Show one issue."),
        "search": Entry("holdfast.cli.issue_basics:search", "Find issues by words."),
        "update": Entry("holdfast.cli.issue_basics:update", "Change an issue."),
        "delete": Entry("holdfast.cli.issue_basics:delete", "Delete an issue."),
        "claim": Entry("holdfast.cli.issue_claim:claim", "Take an issue to work on it."),
        "claim-next": Entry(
            "holdfast.cli.issue_claim:claim_next", "Take the most urgent issue that is ready."
        ),
        "heartbeat": Entry("holdfast.cli.issue_claim:heartbeat", "Keep a claim alive."),
        "finish": Entry("holdfast.cli.issue_finish:finish", "Say that the work on an issue is done."),
        "release": Entry("holdfast.cli.issue_claim:release", "Put an issue back for others."),
        "work": Entry("holdfast.cli.issue_work:work", "Run a command while holding a claim."),
        "breakdown": Entry("holdfast.cli.issue_many:breakdown", "Break an issue down into parts."),
        "import": Entry("holdfast.cli.issue_many:import_", "Bring in issues from a file."),
        "export": Entry("holdfast.cli.issue_many:export", "Print all issues and gates as JSON."),
        "validate": Entry("holdfast.cli.issue_many:validate", "Check everything; put right what can be."),
        "locks": Entry("holdfast.cli.issue_locks:locks", "See who holds the tracker's locks, and who waits."),
    },
)
