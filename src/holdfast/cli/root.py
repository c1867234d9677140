"""The command `holdfast` itself: what it is, and which commands it has."""

from __future__ import annotations

import click

from holdfast import __version__
from holdfast.cli.exit_statuses import table as exit_statuses
from holdfast.cli.group import Entry, Group

HELP = """\
Holdfast lets many agents and people work in one repository at the same time, without lost work,
double work or stuck locks: worktrees with leases, snapshots, a queue of issues, a ledger, and locks.

\b
Make a repository, and work in it under a lease:
  holdfast init project && cd project/main
  holdfast run --snapshot -- ./work
See who holds what, and let an agent take work from the queue:
  holdfast who
  holdfast agent run --next -- ./my-agent
Run a command that nobody else may run at the same time, without any repository:
  holdfast file-lock run build.lock --timeout 1m -- make install
"""

EPILOG = f"""\
\b
Every command takes --json. With it, one JSON object says what happened:
  {{"schema_version":1,"ok":true,"data":{{...}}}}
  {{"schema_version":1,"ok":false,"error":{{"code":"E_...","message":...}}}}

\b
Exit statuses ('run' ends as the command that it ran):
{exit_statuses()}

HOLDFAST_DEBUG=1 in the environment adds a traceback to errors that should not happen.
"""

COMMANDS = {
    "init": Entry("holdfast.cli.init:init", "Make a repository."),
    "info": Entry("holdfast.cli.info:info", "Show what is in a repository, and who works in it."),
    "run": Entry("holdfast.cli.run:run", "Run a command while you hold the lock of a worktree."),
    "worktree": Entry(
        "holdfast.cli.worktree:group", "Directories to work in: create, list, rename, remove them."
    ),
    "lock": Entry("holdfast.cli.lock:group", "The lock of a worktree: acquire, renew, release, see it."),
    "snapshot": Entry("holdfast.cli.snapshot:snapshot", "Keep what is in a worktree."),
    "history": Entry("holdfast.cli.history:history", "Show the snapshots that led to where a worktree is."),
    "show": Entry("holdfast.cli.history:show", "Show one snapshot."),
    "status": Entry("holdfast.cli.compare:status", "Show what has changed since the last snapshot."),
    "diff": Entry("holdfast.cli.compare:diff", "Show what is different between snapshots, or in a worktree."),
    "verify": Entry("holdfast.cli.compare:verify", "Check that snapshots are still what they were."),
    "restore": Entry(
        "holdfast.cli.restore:restore", "Bring a snapshot back: into a new worktree, or in place."
    ),
    "export": Entry("holdfast.cli.export:export", "Write what a snapshot holds into a new directory."),
    "ref": Entry("holdfast.cli.ref:group", "Names for snapshots, which keep them."),
    "pin": Entry("holdfast.cli.pin:group", "Keep a snapshot, for a reason, for some time."),
    "gc": Entry("holdfast.cli.gc:group", "Delete snapshots that nothing keeps, by a plan to be read first."),
    "audit": Entry("holdfast.cli.audit:audit", "Show what was done, by whom; check that nobody changed it."),
    "doctor": Entry("holdfast.cli.doctor:doctor", "Find out what is wrong with a repository, and repair it."),
    "agent": Entry("holdfast.cli.agent:group", "Let agents work through the queue, one piece at a time."),
    "issue": Entry("holdfast.cli.issue:group", "Issues: create, see, change, claim and finish them."),
    "dep": Entry("holdfast.cli.dep:group", "Dependencies: which issue waits for which."),
    "gate": Entry("holdfast.cli.gate:group", "Gates: what an issue must pass to be done."),
    "ready": Entry("holdfast.cli.queries:ready", "List the issues that can be worked on now."),
    "blocked": Entry("holdfast.cli.queries:blocked", "List the issues that wait for others, and why."),
    "graph": Entry("holdfast.cli.queries:graph", "Draw which issue waits for which."),
    "events": Entry("holdfast.cli.queries:events", "Show what happened to issues, also as it happens."),
    "ledger": Entry(
        "holdfast.cli.ledger:group", "An event log that many agents append to: append, read, watch, verify."
    ),
    "claim": Entry("holdfast.cli.claim:group", "Reserve work: take, extend, release and see claims."),
    "who": Entry("holdfast.cli.who:who", "Show who holds what, who waits, and what can be reclaimed."),
    "top": Entry("holdfast.cli.who:top", "The same as 'who', live, for a terminal."),
    "guard": Entry("holdfast.cli.guard:guard", "Say whether paths may be written to, or who leased them."),
    "mcp": Entry("holdfast.cli.mcp:mcp", "Serve an agent that speaks MCP, over standard input and output."),
    "setup": Entry("holdfast.cli.setup:setup", "Teach coding agents and git to use Holdfast, or undo it."),
    "migrate": Entry("holdfast.cli.migrate:migrate", "Move everything that is shared to another store."),
    "file-lock": Entry(
        "holdfast.cli.file_lock:group", "Lock any file: run a command under a lock, see who holds it."
    ),
    "repo-lock": Entry(
        "holdfast.cli.repo_lock:group", "One writer per repository: run, see and break its lock."
    ),
    "demo": Entry("holdfast.cli.demo:demo", "Watch agents work while some are killed, and a verdict."),
    "completion": Entry("holdfast.cli.completion:completion", "Print the completion script of your shell."),
    "hook": Entry("holdfast.cli.hook:hook", "Answer a program that calls at certain moments.", hidden=True),
    "demo-task": Entry("holdfast.cli.demo:task", "What an agent of the demo does.", hidden=True),
    "demo-faulty-agent": Entry("holdfast.cli.demo:faulty_agent", "One that no token stops.", hidden=True),
}

root = Group(
    "holdfast",
    help=HELP,
    epilog=EPILOG,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(
    __version__,
    prog_name="holdfast",
    message="%(prog)s %(version)s",
    help="Show the version and exit.",
)(root)
