"""The command `holdfast` itself: what it is, and which commands it has."""

from __future__ import annotations

import click

from holdfast import __version__
from holdfast.cli.exit_statuses import table as exit_statuses
from holdfast.cli.group import Entry, Group

HELP = """\
Holdfast lets many agents and people work in one repository at the same time, without lost work,
double work or stuck locks. This version has locks: run a command while you hold one, see who
holds it, and clear up after a crash; and issues: what is to be done, what waits for what, who does it.

\b
Run a command that nobody else may run at the same time, waiting up to a minute:
  holdfast file-lock run build.lock --timeout 1m -- make install
See who is in the way:
  holdfast file-lock status build.lock
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
    "file-lock": Entry(
        "holdfast.cli.file_lock:group", "Lock any file: run a command under a lock, see who holds it."
    ),
    "repo-lock": Entry(
        "holdfast.cli.repo_lock:group", "One writer per repository: run, see and break its lock."
    ),
    "issue": Entry("holdfast.cli.issue:group", "Issues: create, see, change, claim and finish them."),
    "dep": Entry("holdfast.cli.dep:group", "Dependencies: which issue waits for which."),
    "gate": Entry("holdfast.cli.gate:group", "Gates: what an issue must pass to be done."),
    "ready": Entry("holdfast.cli.queries:ready", "List the issues that can be worked on now."),
    "blocked": Entry("holdfast.cli.queries:blocked", "List the issues that wait for others, and why."),
    "graph": Entry("holdfast.cli.queries:graph", "Draw which issue waits for which."),
    "events": Entry("holdfast.cli.queries:events", "Show what happened to issues, also as it happens."),
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
