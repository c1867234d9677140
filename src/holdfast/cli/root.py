"""The command `holdfast` itself: what it is, and which commands it has."""

from __future__ import annotations

import click

from holdfast import __version__
from holdfast.cli.exit_statuses import table as exit_statuses
from holdfast.cli.group import Entry, Group

HELP = """\
Holdfast lets many agents and people work in one repository at the same time, without lost work,
double work or stuck locks: each in a worktree of its own, or one after the other in the same.

\b
Make a repository, with a copy of what you have:
  holdfast init my-repo --import ~/my-project
Run a command as the only writer of a worktree, waiting up to a minute for it:
  holdfast run --worktree main --wait 1m --snapshot -- make
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
    "file-lock": Entry(
        "holdfast.cli.file_lock:group", "Lock any file: run a command under a lock, see who holds it."
    ),
    "repo-lock": Entry(
        "holdfast.cli.repo_lock:group", "One writer per repository: run, see and break its lock."
    ),
    "ref": Entry("holdfast.cli.ref:group", "Names for snapshots, which keep them."),
    "pin": Entry("holdfast.cli.pin:group", "Keep a snapshot, for a reason, for some time."),
    "gc": Entry("holdfast.cli.gc:group", "Delete snapshots that nothing keeps, by a plan to be read first."),
    "audit": Entry("holdfast.cli.audit:audit", "Show what was done, by whom; check that nobody changed it."),
    "doctor": Entry("holdfast.cli.doctor:doctor", "Find out what is wrong with a repository, and repair it."),
    "demo": Entry("holdfast.cli.demo:demo", "Watch locks do their work while processes are killed."),
    "completion": Entry("holdfast.cli.completion:completion", "Print the completion script of your shell."),
    "demo-worker": Entry("holdfast.cli.demo:worker", "One of the processes of the demo.", hidden=True),
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
