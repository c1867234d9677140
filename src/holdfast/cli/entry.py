"""From the arguments to an exit status: runs a command and reports whatever comes of it.

What is expected to go wrong is a `Failure`, and is shown as one. Anything else is a defect: it is
shown as `E_UNEXPECTED`, with a traceback only if `HOLDFAST_DEBUG=1` asks for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast import __version__
from holdfast.cli.output import CommandFailed, Output, discard_output
from holdfast.errors import ExitStatus, Failure, Interrupted, IoFailure, UsageFailure

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Terminated(BaseException):
    """A signal has asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def ending_raises() -> Iterator[None]:
    """Let a signal that asks us to end raise `Terminated` in the block.

    While a command runs under us these signals are kept back, and go on to it.
    """

    def end(number: int, frame: object) -> None:
        raise Terminated(number)

    asking = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    wanted: list[int] = []
    try:
        for each in asking:
            if signal.getsignal(each) is signal.SIG_DFL:
                signal.signal(each, end)
                wanted.append(each)
    except ValueError:  # not in the main thread: whoever runs us there sees to signals
        pass
    try:
        yield
    finally:
        for each in wanted:
            signal.signal(each, signal.SIG_DFL)


def end_by(number: int) -> int:
    """End this process by the signal that it was asked with."""
    from holdfast.cli import child

    return child.end_like(child.CommandExit(None, number))


class LazyCommand(NamedTuple):
    """A command that is loaded on demand: `module:attribute`, and the line that help shows for it."""

    place: str
    help: str
    hidden: bool = False


class CommandMissing(click.UsageError):
    """A group was named without any of its commands: what helps is its help."""

    def __init__(self, context: click.Context) -> None:
        super().__init__(f"'{context.command_path}' needs a command.", context)
        self.help = context.get_help()


ELSEWHERE = (
    {"add", "create", "define", "make", "new", "take"},
    {"cancel", "delete", "drop", "remove", "rm"},
    {"close", "complete", "done", "finish", "resolve"},
    {"commit", "save", "snapshot"},
    {"cat", "get", "info", "inspect", "show", "view"},
    {"list", "ls"},
    {"log", "history"},
    {"lock", "acquire"},
    {"unlock", "release"},
    {"move", "mv", "rename"},
    {"checkout", "restore", "revert", "undo"},
    {"branch", "workspace", "worktree"},
    {"branch", "ref", "tag"},
    {"refresh", "renew", "extend", "heartbeat"},
    {"check", "fsck", "doctor", "verify", "validate"},
    {"prune", "clean", "gc"},
    {"next", "claim-next", "ready"},
)
"""Words that other programs use for what some command here does: whoever types one is told ours."""


def _meant(name: str, known: list[str]) -> list[str]:
    """The commands that are spelled like this name, else those that it may stand for."""
    from difflib import get_close_matches

    spelled_alike = get_close_matches(name, known, cutoff=0.7)
    return spelled_alike or [each for each in known if any({name, each} <= words for words in ELSEWHERE)]


class Group(click.Group):
    """Commands in the order in which they were declared; those in `table` are loaded on demand."""

    def __init__(
        self, *arguments: Any, table: Mapping[str, LazyCommand] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, hidden ones included."""
        return [*self.table, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name, loaded now if it has to be."""
        command = self._loaded(ctx, cmd_name)
        if command is not None and ctx.resilient_parsing:  # a shell asks how the line may go on
            from holdfast.cli.candidates import offer_names

            offer_names(command, f"{ctx.command_path} {cmd_name}".partition(" ")[2])
        return command

    def _loaded(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table:
            from importlib import import_module

            module, _, attribute = self.table[cmd_name].place.partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's own options; without any argument, say which commands there are."""
        if not args and not ctx.resilient_parsing:
            raise CommandMissing(ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names, or say which ones are spelled like it."""
        name = args[0]
        if name in self.list_commands(ctx) or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        similar = _meant(name, [known for known, _ in self._shown(ctx)])
        meant = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        raise click.UsageError(f"There is no command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(self._shown(ctx))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin like this."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=text) for name, text in self._shown(ctx) if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _shown(self, ctx: click.Context) -> list[tuple[str, str]]:
        loaded_on_demand = [(name, entry.help) for name, entry in self.table.items() if not entry.hidden]
        return loaded_on_demand + [
            (name, command.get_short_help_str(100))
            for name, command in self.commands.items()
            if not command.hidden
        ]


MEANINGS = {
    ExitStatus.OK: "done",
    ExitStatus.UNEXPECTED: "something failed that no other status stands for: the system, or a defect",
    ExitStatus.USAGE: "the command was given something that it cannot take",
    ExitStatus.NOT_FOUND: "what was named does not exist",
    ExitStatus.CONFLICT: "somebody else holds it, or it is there already",
    ExitStatus.FENCED: "you no longer hold what this needs; stop writing",
    ExitStatus.CORRUPT: "stored content is not what it must be",
    ExitStatus.REFUSED: "it would put work at risk",
    ExitStatus.TIMED_OUT: "it could not be had in time; try again",
    ExitStatus.INTERRUPTED: "ended by the user",
}


def table(indent: str = "  ") -> str:
    """One line for each status."""
    return "\n".join(f"{indent}{int(status):>3}  {meaning}" for status, meaning in MEANINGS.items())


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
{table()}

HOLDFAST_DEBUG=1 in the environment adds a traceback to errors that should not happen.
"""

COMMANDS = {
    "init": LazyCommand("holdfast.cli.init:init", "Make a repository."),
    "info": LazyCommand("holdfast.cli.info:info", "Show what is in a repository, and who works in it."),
    "run": LazyCommand("holdfast.cli.run:run", "Run a command while you hold the lock of a worktree."),
    "worktree": LazyCommand(
        "holdfast.cli.worktree:group", "Directories to work in: create, list, rename, remove them."
    ),
    "lock": LazyCommand(
        "holdfast.cli.lease:group", "The lock of a worktree: acquire, renew, release, see it."
    ),
    "snapshot": LazyCommand("holdfast.cli.snapshot:snapshot", "Keep what is in a worktree."),
    "history": LazyCommand(
        "holdfast.cli.history:history", "Show the snapshots that led to where a worktree is."
    ),
    "show": LazyCommand("holdfast.cli.history:show", "Show one snapshot."),
    "status": LazyCommand("holdfast.cli.compare:status", "Show what has changed since the last snapshot."),
    "diff": LazyCommand(
        "holdfast.cli.compare:diff", "Show what is different between snapshots, or in a worktree."
    ),
    "verify": LazyCommand("holdfast.cli.compare:verify", "Check that snapshots are still what they were."),
    "restore": LazyCommand(
        "holdfast.cli.restore:restore", "Bring a snapshot back: into a new worktree, or in place."
    ),
    "export": LazyCommand("holdfast.cli.restore:export", "Write what a snapshot holds into a new directory."),
    "ref": LazyCommand("holdfast.cli.pin:ref_group", "Names for snapshots, which keep them."),
    "pin": LazyCommand("holdfast.cli.pin:group", "Keep a snapshot, for a reason, for some time."),
    "gc": LazyCommand(
        "holdfast.cli.gc:group", "Delete snapshots that nothing keeps, by a plan to be read first."
    ),
    "audit": LazyCommand(
        "holdfast.cli.audit:audit", "Show what was done, by whom; check that nobody changed it."
    ),
    "doctor": LazyCommand(
        "holdfast.cli.doctor:doctor", "Find out what is wrong with a repository, and repair it."
    ),
    "agent": LazyCommand(
        "holdfast.cli.agent:group", "Let agents work through the queue, one piece at a time."
    ),
    "issue": LazyCommand("holdfast.cli.issue:group", "Issues: create, see, change, claim and finish them."),
    "dep": LazyCommand("holdfast.cli.dep:group", "Dependencies: which issue waits for which."),
    "gate": LazyCommand("holdfast.cli.gate:group", "Gates: what an issue must pass to be done."),
    "ready": LazyCommand("holdfast.cli.queries:ready", "List the issues that can be worked on now."),
    "blocked": LazyCommand("holdfast.cli.queries:blocked", "List the issues that wait for others, and why."),
    "graph": LazyCommand("holdfast.cli.queries:graph", "Draw which issue waits for which."),
    "events": LazyCommand("holdfast.cli.queries:events", "Show what happened to issues, also as it happens."),
    "ledger": LazyCommand(
        "holdfast.cli.ledger:group", "An event log that many agents append to: append, read, watch, verify."
    ),
    "claim": LazyCommand(
        "holdfast.cli.ledger_claims:group", "Reserve work: take, extend, release and see claims."
    ),
    "who": LazyCommand("holdfast.cli.who:who", "Show who holds what, who waits, and what can be reclaimed."),
    "top": LazyCommand("holdfast.cli.who:top", "The same as 'who', live, for a terminal."),
    "guard": LazyCommand(
        "holdfast.cli.guard:guard", "Say whether paths may be written to, or who leased them."
    ),
    "mcp": LazyCommand(
        "holdfast.cli.mcp:mcp", "Serve an agent that speaks MCP, over standard input and output."
    ),
    "setup": LazyCommand(
        "holdfast.cli.setup:setup", "Teach coding agents and git to use Holdfast, or undo it."
    ),
    "migrate": LazyCommand(
        "holdfast.cli.migrate:migrate", "Move everything that is shared to another store."
    ),
    "file-lock": LazyCommand(
        "holdfast.cli.lock:group", "Lock any file: run a command under a lock, see who holds it."
    ),
    "repo-lock": LazyCommand(
        "holdfast.cli.repo_lock:group", "One writer per repository: run, see and break its lock."
    ),
    "demo": LazyCommand("holdfast.cli.demo:demo", "Watch agents work while some are killed, and a verdict."),
    "completion": LazyCommand(
        "holdfast.cli.completion:completion", "Print the completion script of your shell."
    ),
    "hook": LazyCommand(
        "holdfast.cli.hook:hook", "Answer a program that calls at certain moments.", hidden=True
    ),
    "demo-task": LazyCommand("holdfast.cli.demo:task", "What an agent of the demo does.", hidden=True),
    "demo-faulty-agent": LazyCommand(
        "holdfast.cli.demo:faulty_agent", "One that no token stops.", hidden=True
    ),
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


NAME = "holdfast"
COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"
STORE_VARIABLE = "HOLDFAST_STORE"  # as in `places`, which is not loaded for this


def run(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; return the exit status of the process."""
    output = Output(as_json=asks_for_json(arguments))
    try:
        try:
            with ending_raises():  # so that what we hold is given back, and a terminal is left as it was
                return _invoke(arguments, output)
        except Terminated as asked:
            return end_by(asked.number)
        except click.exceptions.Exit as exit_:
            return exit_.exit_code
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            return _report(error, output)
    except BrokenPipeError:  # whoever read our output has seen enough
        for stream in (sys.stdout, sys.stderr):
            discard_output(stream)
        return ExitStatus.UNEXPECTED
    except KeyboardInterrupt:  # again, while we were reporting the first one
        return ExitStatus.INTERRUPTED


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` stands anywhere among our own arguments, which end at `--`."""
    own = list(arguments)
    return "--json" in (own[: own.index("--")] if "--" in own else own)


def _invoke(arguments: Sequence[str], output: Output) -> int:
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return _complete(instruction)
    if address := os.environ.get(STORE_VARIABLE):
        _remember_secrets(address)
    with root.make_context(NAME, list(arguments), obj=output) as context:
        status = root.invoke(context)
    return status if isinstance(status, int) else ExitStatus.OK


def _remember_secrets(address: str) -> None:
    """A repository names its store without secrets: `HOLDFAST_STORE` may have the same address with them."""
    from holdfast.store.addresses import remember_secrets

    with contextlib.suppress(Failure):  # an address that cannot be read is refused by who uses it
        remember_secrets(address)


def _complete(instruction: str) -> int:
    """Answer the shell, which asks how a command line may go on; if something is wrong, with nothing."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(root, {}, NAME, COMPLETION_VARIABLE, instruction)
    except Exception:  # somebody is in the middle of typing
        return ExitStatus.UNEXPECTED


def _report(error: BaseException, output: Output) -> int:
    if isinstance(error, CommandMissing) and not output.as_json:
        output.diagnostic(error.help)
        return ExitStatus.USAGE
    told = _as_told(error)
    if isinstance(told.failure, Interrupted) and sys.stderr is not None and sys.stderr.isatty():
        output.diagnostic("")  # the terminal has shown ^C on this line
    try:
        output.failure(told.failure, advice=told.advice)
    except IoFailure:  # standard output cannot take the envelope; standard error may
        with contextlib.suppress(IoFailure):
            output.failure(told.failure, advice=told.advice)
    if os.environ.get("HOLDFAST_DEBUG") == "1" and type(told.failure) is Failure:
        import traceback

        output.diagnostic("".join(traceback.format_exception(error)).rstrip("\n"))
    return told.exit_status


def _as_told(error: BaseException) -> CommandFailed:
    """The error as a failure, whatever it is."""
    if isinstance(error, CommandFailed):
        return error
    if isinstance(error, Failure):
        return CommandFailed(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return CommandFailed(Interrupted())
    if isinstance(error, click.UsageError):
        return _usage(error)
    if isinstance(error, FileNotFoundError):  # whoever makes a path absolute asks for the current directory
        try:
            from holdfast.cli.repository import current_directory

            current_directory()
        except Failure as failure:
            return CommandFailed(failure)
    return CommandFailed(Failure(f"{type(error).__name__}: {error}"))


def _usage(error: click.UsageError) -> CommandFailed:
    message = " ".join(error.format_message().split())  # some of them list choices, a line each
    if error.ctx is None:
        return CommandFailed(UsageFailure(message))
    hint = f"See '{error.ctx.command_path} --help'."
    failure = UsageFailure(message, hint=hint, command=error.ctx.command_path)
    return CommandFailed(failure, advice=f"{error.ctx.get_usage()}\n{hint}")
