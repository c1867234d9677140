"""From the arguments to an exit status: runs a command and reports whatever comes of it.

What is expected to go wrong is a `Failure`, and is shown as one. Anything else is a defect: it is
shown as `E_UNEXPECTED`, with a traceback only if `HOLDFAST_DEBUG=1` asks for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import click

from holdfast.cli.ending import Terminated, end_by, ending_raises
from holdfast.cli.group import CommandMissing
from holdfast.cli.output import CommandFailed, Output, discard_output
from holdfast.cli.root import root
from holdfast.errors import ExitStatus, Failure, Interrupted, IoFailure, UsageFailure

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
