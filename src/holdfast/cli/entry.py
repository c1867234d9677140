"""The entry point: runs the command that the arguments name, and turns the outcome into an exit status.

Expected errors are `Failure`s. Anything else is a defect: it is printed as `E_UNEXPECTED`, with a traceback only if
`HOLDFAST_DEBUG=1`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast import __version__
from holdfast.cli import REPO, STORE
from holdfast.cli.output import CommandFailed, Output, discard_output, lost_output
from holdfast.errors import ExitStatus, Failure, Interrupted, IoFailure, NameInvalid, NotInitialised, UsageFailure
from holdfast.fs import calls

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Terminated(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_A_MOMENT = 0.001  # seconds


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Terminated`, so that the block releases everything; `child` blocks both.

    Python ignores an exception in a finalizer (`__del__`), so one that is raised there is raised again a moment later.
    """

    def end(number: int, frame: object) -> None:
        raise Terminated(number)

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        lost = unraisable.exc_value
        if sys.platform == "win32" or not isinstance(lost, Terminated):
            before(unraisable)
            return
        number = lost.number
        signal.signal(signal.SIGALRM, lambda _, frame: end(number, frame))
        signal.setitimer(signal.ITIMER_REAL, _A_MOMENT)

    before, sys.unraisablehook = sys.unraisablehook, ignored
    changed: list[int] = []
    with contextlib.suppress(ValueError):  # not in the main thread: the caller handles signals
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                changed.append(number)
    try:
        yield
    finally:
        sys.unraisablehook = before
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


class LazyCommand(NamedTuple):
    """A command that is loaded on demand: `module:attribute`, and its line in the help."""

    place: str
    help: str
    hidden: bool = False


class CommandMissing(click.UsageError):
    """The arguments name a group, but none of its commands."""

    def __init__(self, context: click.Context) -> None:
        super().__init__(f"'{context.command_path}' needs a command.", context)
        self.help = context.get_help()


SYNONYMS = """\
add create define make new take, cancel delete drop remove rm, close complete done finish resolve, commit save snapshot,
cat get info inspect show view, list ls, log history, lock acquire claim, unlock release, move mv rename,
checkout restore revert undo, branch workspace worktree, branch ref tag, refresh renew extend heartbeat,
check fsck doctor verify validate, prune clean gc, next claim-next ready"""
"""Groups of words that programs use for the same command."""

RETIRED_COMMANDS = {
    "file-lock": "lock",
    "claim": "ledger claim",
    **{f"lock {verb}": f"lease {verb}" for verb in ("acquire", "renew", "release", "steal", "list")},
}
RETIRED_OPTIONS = {
    "--dir": "--repo",
    "--timeout": "--wait",
    "--patience": "--wait",
    "--claim-id": "--claim",
    "--owner": "--actor",
    "--last": "--limit",
    "--count": "--limit",
    "--chdir": "the default; the opposite is --no-chdir",
}
"""Former names; the error names the present one."""


def _suggestion(context: click.Context, name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    if current := RETIRED_COMMANDS.get(f"{context.command_path} {name}".removeprefix(f"{NAME} ")):
        return f" {name!r} is now '{NAME} {current}'."
    similar = get_close_matches(name, known, cutoff=0.7)
    if not similar and len(similar := _elsewhere(context, name)) != 1:
        synonyms = [set(words.split()) for words in SYNONYMS.split(",")]
        similar = [each for each in known if any({name, each} <= words for words in synonyms)] or similar[:3]
    return f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def _elsewhere(context: click.Context, name: str) -> list[str]:
    """The commands of this name in other groups: for `finish`, `holdfast issue finish`."""
    root = context.find_root()
    top = root.command
    assert isinstance(top, Group)
    groups = {group: top.get_command(root, group) for group in top.list_commands(root)}
    found = [f"{NAME} {name}"] if name in groups else []
    return found + [
        f"{NAME} {group} {name}"
        for group, commands in groups.items()
        if isinstance(commands, Group) and not commands.hidden and name in commands.list_commands(root)
    ]


_MAY_BE_EMPTY = ("TEXT", "TITLE", "DURATION", "SIZE", "N", "WHEN")  # free text, and values that have their own check
_TEXTS = ("title", "words", "event")


class NotEmpty(click.types.StringParamType):
    """Another type without the empty value: an unset shell variable must not mean the default."""

    def __init__(self, kind: click.types.StringParamType | click.Path) -> None:
        self._kind, self.name = kind, kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        source = ctx.get_parameter_source(param.name or "") if ctx and param else None
        if value == "" and param and source is not click.core.ParameterSource.DEFAULT:
            name = param.get_error_hint(ctx).strip("'[]")
            hint = "Leave it out, or give it a value. In a script, a variable may be unset."
            raise NameInvalid(f"{name} is empty", hint=hint)
        return self._kind.convert(value, param, ctx)


def refuse_empty_names(command: click.Command) -> None:
    """Make the parameters of a command that take a name refuse an empty one."""
    for each in command.params:
        kind, is_name = each.type, each.metavar not in _MAY_BE_EMPTY and each.name not in _TEXTS
        if is_name and isinstance(kind, click.types.StringParamType | click.Path) and not isinstance(kind, NotEmpty):
            each.type = NotEmpty(kind)


class Group(click.Group):
    """Commands in the order of their declaration, then the commands in `table`, which are loaded on demand."""

    def __init__(self, *arguments: Any, table: Mapping[str, LazyCommand] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.table]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if cmd_name in self.table:
            from importlib import import_module

            module, _, attribute = self.table[cmd_name].place.partition(":")
            command = getattr(import_module(module), attribute)
        if command is not None and ctx.resilient_parsing:  # a shell asks for completions
            from holdfast.cli.candidates import offer_names

            offer_names(command, f"{ctx.command_path} {cmd_name}".partition(" ")[2])
        elif command is not None:
            refuse_empty_names(command)
            command.params += [each for each in EVERYWHERE if each not in command.params]
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            args = self.without_arguments(ctx)
        return super().parse_args(ctx, args)

    def without_arguments(self, ctx: click.Context) -> list[str]:
        """The arguments to use if none are given; raises `CommandMissing` unless overridden."""
        raise CommandMissing(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.list_commands(ctx) or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        known = [each for each, _ in self._listed(ctx)]
        raise click.UsageError(f"There is no command {name!r}.{_suggestion(ctx, name, known)}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self._listed(ctx))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        commands = [CompletionItem(name, help=text) for name, text in self._listed(ctx) if name.startswith(incomplete)]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _listed(self, ctx: click.Context) -> list[tuple[str, str]]:
        """The commands that are not hidden, each with its line in the help; loads none of them."""
        own = [(name, each.get_short_help_str(100)) for name, each in self.commands.items() if not each.hidden]
        return own + [(name, each.help) for name, each in self.table.items() if not each.hidden]


class CommandGroup(Group):
    """A command that also has subcommands: `snapshot`, `snapshot push`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, invoke_without_command=True, subcommand_metavar="[COMMAND [ARGS]...]", **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Group.parse_args(self, ctx, args)

    @staticmethod
    def passes_on() -> bool:
        """Whether the arguments name a subcommand. Raises `UsageError` if options come before its name."""
        context = click.get_current_context()
        if context.invoked_subcommand is None:
            return False
        typed = click.core.ParameterSource.COMMANDLINE
        given = [each for each in context.command.params if context.get_parameter_source(f"{each.name}") is typed]
        if given:
            message = f"{given[0].opts[0]} must follow '{context.command_path} {context.invoked_subcommand}'."
            raise click.UsageError(message, context)
        return True


class Root(Group):
    """All commands. Without a command: the overview in a repository, the help elsewhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing and {*args} <= {name for each in EVERYWHERE for name in each.opts}:
            args = [*args, *self.without_arguments(ctx)]
        return super().parse_args(ctx, args)

    def without_arguments(self, ctx: click.Context) -> list[str]:
        from holdfast.cli.who import is_in_workspace

        return ["who"] if is_in_workspace() else super().without_arguments(ctx)


MEANINGS = {
    ExitStatus.OK: "success",
    ExitStatus.UNEXPECTED: "any other failure: a system error, or a defect in Holdfast",
    ExitStatus.USAGE: "invalid arguments or input",
    ExitStatus.NOT_FOUND: "not found",
    ExitStatus.CONFLICT: "held by somebody else, or already exists",
    ExitStatus.FENCED: "you no longer hold the lease or claim; stop writing",
    ExitStatus.CORRUPT: "stored content is corrupt",
    ExitStatus.REFUSED: "refused: it would put work at risk",
    ExitStatus.TIMED_OUT: "timed out; try again",
    ExitStatus.INTERRUPTED: "interrupted by the user",
}
_STATUSES = "\n".join(f"  {int(status):>3}  {meaning}" for status, meaning in MEANINGS.items())

HELP = """\
Holdfast lets many agents and people work in one repository at the same time, without lost work, duplicated work or
stuck locks: worktrees with leases, snapshots, a queue of issues, a ledger, and locks.

\b
Adopt a git checkout, and work in it under a lease:
  cd my-project
  holdfast init
  holdfast run --snapshot -- ./work
See who holds what, and let an agent take work from the queue:
  holdfast who
  holdfast agent run --next -- ./my-agent
Run a command under a lock, without a repository:
  holdfast lock run build.lock --wait 1m -- make install
"""

EPILOG = f"""\
\b
Every command takes --json, and then prints one JSON object:
  {{"schema_version":1,"ok":true,"data":{{...}}}}
  {{"schema_version":1,"ok":false,"error":{{"code":"E_...","message":...}}}}

\b
Exit statuses ('run' exits with that of its command: 127 if not found, 126 if not executable):
{_STATUSES}

The options -q and -v may also follow the command. In a repository, 'holdfast' without a command is the same as
'holdfast who'. HOLDFAST_DEBUG=1 in the environment adds a traceback to unexpected errors. NO_COLOR=1 turns colours off.
"""

COMMANDS = {
    "init": LazyCommand("holdfast.cli.init:init", "Adopt a git checkout, or create a repository."),
    "deinit": LazyCommand("holdfast.cli.init:deinit", "Remove Holdfast from a git checkout."),
    "join": LazyCommand("holdfast.cli.join:join", "Join a repository from another machine."),
    "info": LazyCommand("holdfast.cli.info:info", "Show the contents of a repository, and who works in it."),
    "run": LazyCommand("holdfast.cli.run:run", "Run a command under the lease of a worktree."),
    "worktree": LazyCommand("holdfast.cli.worktree:group", "Worktrees: create, list, rename and remove them."),
    "lease": LazyCommand("holdfast.cli.lease:group", "Leases of worktrees: acquire, renew, release, steal."),
    "snapshot": LazyCommand("holdfast.cli.snapshot:snapshot", "Save the content of a worktree."),
    "history": LazyCommand("holdfast.cli.history:history", "Show the snapshots of a worktree."),
    "show": LazyCommand("holdfast.cli.history:show", "Show one snapshot."),
    "status": LazyCommand("holdfast.cli.compare:status", "Show the changes since the last snapshot."),
    "diff": LazyCommand("holdfast.cli.compare:diff", "Compare snapshots, or a snapshot and a worktree."),
    "conflicts": LazyCommand("holdfast.cli.conflicts:conflicts", "Show which worktrees would conflict if merged now."),
    "verify": LazyCommand("holdfast.cli.compare:verify", "Verify the content of snapshots."),
    "restore": LazyCommand("holdfast.cli.restore:restore", "Restore a snapshot: into a new worktree, or in place."),
    "export": LazyCommand("holdfast.cli.restore:export", "Write a snapshot to a new directory."),
    "ref": LazyCommand("holdfast.cli.pin:ref_group", "Names for snapshots, which also protect them."),
    "pin": LazyCommand("holdfast.cli.pin:group", "Protect a snapshot from garbage collection."),
    "gc": LazyCommand("holdfast.cli.gc:group", "Delete unprotected snapshots, by a plan that you review."),
    "audit": LazyCommand("holdfast.cli.audit:audit", "Show or verify the audit trail."),
    "doctor": LazyCommand("holdfast.cli.doctor:doctor", "Find and repair problems in a repository."),
    "metrics": LazyCommand("holdfast.cli.metrics:metrics", "Print metrics for Prometheus."),
    "agent": LazyCommand("holdfast.cli.agent:group", "Let agents work through the queue, one issue at a time."),
    "land": LazyCommand("holdfast.cli.landing:land", "Bring the work of a worktree onto a branch."),
    "landing": LazyCommand("holdfast.cli.landing:group", "Queues of work waiting to land."),
    "prime": LazyCommand("holdfast.cli.prime:prime", "Print the task of an agent, or the work that it can claim."),
    "issue": LazyCommand("holdfast.cli.issue:group", "Issues: create, list, change, claim and finish them."),
    "dep": LazyCommand("holdfast.cli.dep:group", "Dependencies between issues."),
    "gate": LazyCommand("holdfast.cli.gate:group", "Gates: the checks that an issue must pass to be done."),
    "ready": LazyCommand("holdfast.cli.queries:ready", "List the issues that can be worked on now."),
    "blocked": LazyCommand("holdfast.cli.queries:blocked", "List the issues that wait for others, and why."),
    "graph": LazyCommand("holdfast.cli.queries:graph", "Draw the graph of dependencies."),
    "events": LazyCommand("holdfast.cli.queries:events", "Show the events of issues, or follow them as they happen."),
    "ledger": LazyCommand("holdfast.cli.ledger:group", "The event log and its claims: append, read, verify, claim."),
    "who": LazyCommand("holdfast.cli.who:who", "Show who does what, who waits, and what is stuck."),
    "top": LazyCommand("holdfast.cli.top:top", "Show who does what, live in the terminal."),
    "web": LazyCommand("holdfast.cli.web:web", "Show the work in a browser."),
    "guard": LazyCommand("holdfast.cli.guard:guard", "Check whether paths may be written to."),
    "mcp": LazyCommand("holdfast.cli.mcp:mcp", "Serve an agent over MCP, on standard input and output."),
    "setup": LazyCommand("holdfast.cli.setup:setup", "Set up coding agents and git for Holdfast, or undo it."),
    "config": LazyCommand("holdfast.cli.config:group", "Settings: setup, files and ports of new worktrees."),
    "trust": LazyCommand("holdfast.cli.trust:trust", "Approve the store and the commands that a repository names."),
    "migrate": LazyCommand("holdfast.cli.migrate:migrate", "Move the records to another store."),
    "lock": LazyCommand("holdfast.cli.lock:group", "File locks: run a command under one, show its holders."),
    "repo-lock": LazyCommand("holdfast.cli.repo_lock:group", "Repository locks: run under one, show it, break it."),
    "demo": LazyCommand("holdfast.cli.demo:demo", "Run a fault-injection demo and report pass or fail."),
    "help": LazyCommand("holdfast.cli.help:show_help", "Show the help for a command."),
    "completion": LazyCommand("holdfast.cli.completion:completion", "Print the completion script for your shell."),
    "hook": LazyCommand("holdfast.cli.hook:hook", "Answer the hooks of coding agents and git.", hidden=True),
    "demo-task": LazyCommand("holdfast.cli.demo:task", "The work of an agent in the demo.", hidden=True),
    "demo-landing-task": LazyCommand("holdfast.cli.demo:landing_task", "The work of an agent that lands.", hidden=True),
    "demo-faulty-agent": LazyCommand("holdfast.cli.demo:faulty_agent", "An agent that ignores tokens.", hidden=True),
}

root = Root(
    "holdfast",
    help=HELP,
    epilog=EPILOG,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_version = {"prog_name": "holdfast", "message": "%(prog)s %(version)s", "help": "Show the version and exit."}
click.version_option(__version__, **_version)(root)


def _set(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and isinstance(context.obj, Output):
        setattr(context.obj, parameter.opts[-1].removeprefix("--"), True)


EVERYWHERE: list[click.Parameter] = []
"""The options that may also follow a command."""

for _name, _text in (
    ("quiet", "Print no progress and no warnings."),
    ("verbose", "Print how long the command took, and add a traceback to unexpected errors."),
):
    _flag: Any = {"is_flag": True, "expose_value": False, "callback": _set, "help": _text}
    _names = f"-{_name[0]}", f"--{_name}"
    click.option(*_names, **_flag)(root)
    EVERYWHERE.append(click.Option(_names, **_flag, hidden=True))

NAME = "holdfast"
COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"


def run(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; return the exit status of the process."""
    output = Output(as_json=asks_for_json(arguments))
    try:
        try:
            with termination_raises(), output.showing_warnings():
                return _run_here(arguments, output)
        except Terminated as asked:
            from holdfast.cli import child

            return child.end_like(child.CommandExit(None, asked.number))
        except click.exceptions.Exit as exit_:
            return exit_.exit_code
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            return _report(error, output, arguments)
    except BrokenPipeError:  # the reader of our output has seen enough
        for stream in (sys.stdout, sys.stderr):
            discard_output(stream)
        return ExitStatus.UNEXPECTED
    except KeyboardInterrupt:  # again, while the first one was reported
        return ExitStatus.INTERRUPTED
    finally:
        if stores := sys.modules.get("holdfast.store.open"):
            stores.save_statistics()


def _run_here(arguments: Sequence[str], output: Output) -> int:
    if "GIT_DIR" in os.environ or calls.exists("HEAD"):
        _enter_git_directory()
    began = time.monotonic()
    status = _invoke(arguments, output)
    if output.verbose:
        output.diagnostic(f"holdfast: {time.monotonic() - began:.3f} s, exit status {int(status)}")
    return status


def _enter_git_directory() -> None:
    """If the current directory is in no workspace, let the environment name the git home that `GIT_DIR` belongs to, or
    the bare repository around that directory: hooks run there. So all commands work with the same repository."""
    from pathlib import Path

    from holdfast.git.checkout import find_checkout
    from holdfast.repository.locating import root_in
    from holdfast.repository.overview import find_workspace

    if os.environ.get(REPO):
        return
    try:
        find_workspace(Path(os.curdir))
    except NotInitialised:
        found = find_checkout(os.curdir, os.environ.get("GIT_DIR"))
        if root := found and root_in(found.common):
            os.environ[REPO] = root


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether `--json` is among our own arguments, which end at `--`."""
    return "--json" in itertools.takewhile(lambda each: each != "--", arguments)


def _invoke(arguments: Sequence[str], output: Output) -> int:
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return _complete(instruction)
    if address := os.environ.get(STORE):  # the user named it, so it may contain secrets
        from holdfast.store.addresses import remember

        with contextlib.suppress(Failure):  # an invalid address is refused where it is used
            remember(address)
    with root.make_context(NAME, list(arguments), obj=output) as context:
        status = root.invoke(context)
    return status if isinstance(status, int) else ExitStatus.OK


def _complete(instruction: str) -> int:
    """Print the completions that a shell asks for; nothing if something fails."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(root, {}, NAME, COMPLETION_VARIABLE, instruction)
    except Exception as error:  # the user is in the middle of typing
        if (lost := lost_output(error)) is not None:
            raise lost from None
        return ExitStatus.UNEXPECTED


def _report(error: BaseException, output: Output, arguments: Sequence[str]) -> int:
    if isinstance(error, CommandMissing) and not output.as_json:
        output.diagnostic(error.help)
        return ExitStatus.USAGE
    reported = _as_failure(error)
    reported.failure.hint = fitting_hint(reported.failure, command_in(arguments))
    if isinstance(reported.failure, Interrupted) and sys.stderr is not None and sys.stderr.isatty():
        output.diagnostic("")  # the terminal has shown ^C on this line
    try:
        output.failure(reported.failure, advice=reported.advice)
    except IoFailure:  # standard output cannot take the envelope; standard error may
        with contextlib.suppress(IoFailure):
            output.failure(reported.failure, advice=reported.advice)
    if (output.verbose or os.environ.get("HOLDFAST_DEBUG") == "1") and type(reported.failure) is Failure:
        import traceback

        output.diagnostic("".join(traceback.format_exception(error)).rstrip("\n"))
    return reported.exit_status


def command_in(arguments: Sequence[str]) -> click.Command:
    """The innermost command that the arguments name; the root if they name none."""
    command: click.Command = root
    with contextlib.suppress(Exception):  # perhaps it cannot be loaded: the failure says so
        for name in itertools.dropwhile(lambda each: each.startswith("-"), arguments):
            found = command.get_command(click.Context(command), name) if isinstance(command, Group) else None
            if found is None:
                break
            command = found
    return command


def fitting_hint(failure: Failure, command: click.Command) -> str:
    """The hint of a failure, without the sentences about options that this command does not have."""
    known = {"--help", *(option for each in command.params for option in each.opts)}
    for hint in (failure.hint, type(failure).hint):
        kept = [each for each in re.split(r"(?<=[.]) +(?=[A-Z'-])", hint) if known.issuperset(bare_options(each))]
        if kept:
            return " ".join(kept)
    return UsageFailure.hint


def bare_options(text: str) -> list[str]:
    """The options that a text names, except those of a command that it quotes."""
    return re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"'[^']*'|\$\([^)]*\)", "", text))


def _as_failure(error: BaseException) -> CommandFailed:
    if isinstance(error, CommandFailed):
        return error
    if isinstance(error, Failure):
        return CommandFailed(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return CommandFailed(Interrupted())
    if isinstance(error, click.UsageError):
        return _usage(error)
    if isinstance(error, OSError) and (lost := lost_output(error)) is not None:
        return CommandFailed(lost)
    if isinstance(error, FileNotFoundError):  # making a path absolute needs the current directory
        from holdfast.cli.repository import current_directory

        try:
            current_directory()
        except Failure as failure:
            return CommandFailed(failure)
    return CommandFailed(Failure(f"{type(error).__name__}: {error}"))


def _usage(error: click.UsageError) -> CommandFailed:
    message = " ".join(error.format_message().split())  # some list choices, a line each
    if isinstance(error, click.NoSuchOption) and (current := RETIRED_OPTIONS.get(error.option_name)):
        message = f"There is no option {error.option_name}: it is now {current}."
    if error.ctx is None:
        return CommandFailed(UsageFailure(message))
    hint = f"See '{error.ctx.command_path} --help'."
    failure = UsageFailure(message, hint=hint, command=error.ctx.command_path)
    return CommandFailed(failure, advice=f"{error.ctx.get_usage()}\n{hint}")
