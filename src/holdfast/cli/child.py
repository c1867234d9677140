"""Child processes: run a command as if it had been started directly, and end as it ended.

The command inherits everything that this process inherited, but no lock, descriptor or blocked signal of its own. On
Linux the kernel kills the command if this process dies first, because the lock that the command relies on dies with it.
The password of the store stays here, unless `--pass-store-secrets` passes it on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from holdfast.cli import STORE
from holdfast.cli.output import CommandFailed, Output
from holdfast.errors import CommandNotFound, NotFound, SettingInvalid
from holdfast.fs import calls
from holdfast.fs.directory import io_failure
from holdfast.locks.process_tree import Mark, ProcessTree

if TYPE_CHECKING:
    import subprocess
    from typing import TypeAlias

    from click.shell_completion import CompletionItem

    Child: TypeAlias = subprocess.Popen[bytes]

FORWARDED = frozenset(
    number
    for name in "SIGHUP SIGINT SIGQUIT SIGTERM SIGUSR1 SIGUSR2 SIGALRM SIGWINCH SIGPWR".split()
    if (number := getattr(signal, name, None)) is not None
)


class Periodic(NamedTuple):
    """A check to repeat while a command runs; if it raises, the command is stopped."""

    every: float
    run: Callable[[], object]


if sys.platform == "win32":

    @contextlib.contextmanager
    def block_signals() -> Iterator[frozenset[int]]:
        """Ignore Ctrl-C: it reaches every process at the console, and the command acts on it."""
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield frozenset()
        finally:
            signal.signal(signal.SIGINT, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        return None  # the child is not a copy of this process

else:

    @contextlib.contextmanager
    def block_signals() -> Iterator[frozenset[int]]:
        """Block the forwarded signals; yields the mask from before, which the command inherits."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit statuses are lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
        try:
            yield frozenset(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        """The child's last steps before it becomes the command: it asks to die with us, and unblocks signals."""
        parent = os.getpid()
        if sys.platform == "linux":
            from holdfast.fs.native import die_with_parent

        def prepare() -> None:
            if sys.platform == "linux":
                die_with_parent()
                if os.getppid() != parent:  # the parent died before that took effect
                    os.kill(os.getpid(), signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):  # our own handler, not the command's
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        return prepare


if sys.platform in ("win32", "darwin"):

    def _wait(child: Child, check: Periodic | None) -> int:
        """Wait for the child, repeating the check; return its code."""
        import subprocess

        while True:
            try:
                return child.wait(check.every if check else None)
            except subprocess.TimeoutExpired:
                if check:
                    check.run()


if sys.platform == "win32":
    attend = _wait
elif sys.platform == "darwin":

    def attend(child: Child, check: Periodic | None) -> int:
        """Wait for the child, forwarding signals and repeating the check; return its code."""

        def forward(number: int, frame: object) -> None:
            if number not in (signal.SIGINT, signal.SIGQUIT) or not _in_foreground():
                child.send_signal(number)

        before = {each: signal.getsignal(each) for each in FORWARDED}
        forwarded = [each for each in FORWARDED if before[each] is not signal.SIG_IGN]
        for each in forwarded:
            signal.signal(each, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            return _wait(child, check)
        finally:
            for each in forwarded:
                signal.signal(each, before[each])

    def _in_foreground() -> bool:
        """Whether the keys of the terminal reach our process group."""
        try:
            terminal = calls.open("/dev/tty", os.O_RDONLY)
        except OSError:
            return False
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        except OSError:
            return False
        finally:
            calls.close(terminal)

else:
    _LONGEST_SLEEP = 1.0  # seconds; a thread that does not block signals may take the SIGCHLD before we wait for it

    def attend(child: Child, check: Periodic | None) -> int:
        """Wait for the child, forwarding signals and repeating the check; return its code."""
        watched = FORWARDED | {signal.SIGCHLD}
        due = time.monotonic() + check.every if check else None
        while (code := child.poll()) is None:
            left = _LONGEST_SLEEP if due is None else min(_LONGEST_SLEEP, max(0.0, due - time.monotonic()))
            arrived = signal.sigtimedwait(watched, left)
            if arrived and arrived.si_signo in FORWARDED and not _reached(child, arrived):
                child.send_signal(arrived.si_signo)
            if check and due is not None and time.monotonic() >= due:
                check.run()
                due = time.monotonic() + check.every
        while signal.sigtimedwait(FORWARDED, 0):  # too late for the child, and not meant for us
            pass
        return code

    def _reached(child: Child, arrived: signal.struct_siginfo) -> bool:
        """Whether the terminal sent this signal, to us and to the child alike."""
        try:
            return arrived.si_code > 0 and os.getpgid(child.pid) == os.getpgrp()  # positive: from the kernel
        except OSError:
            return True


GRACE = 10.0
"""How long a command has to end after SIGTERM."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # exit statuses, as shells have them
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)  # ENOTDIR: the last entry of PATH is not a directory
_NOT_EXECUTABLE = (errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR)


class CommandExit(NamedTuple):
    """How a command ended: with an exit status, or by a signal."""

    exit_status: int | None
    signal_number: int | None

    def as_record(self) -> dict[str, object]:
        return {"exit_status": self.exit_status, "signal": self.signal_name}

    @property
    def signal_name(self) -> str | None:
        if self.signal_number is None:
            return None
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:  # most real-time signals have no name
            return f"SIG{self.signal_number}"


def run(
    command: Sequence[str],
    *,
    check: Periodic | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    mark: Mark | None = None,
) -> CommandExit:
    """Run a command to its end; a command that cannot be started ends with 127 or 126.

    The command gets our environment and current directory unless others are given. If `check` raises, the command and
    its descendants are stopped first; `mark` finds descendants that have left the process tree.
    """
    with block_signals() as mask:
        child = _start(command, mask, environment, directory)
        try:
            code = attend(child, check)
        except BaseException:
            ProcessTree(child, mark).end(GRACE)
            raise
    return CommandExit(None, -code) if code < 0 else CommandExit(code, None)


def end_like(ended: CommandExit) -> int:
    """End this process by the signal that ended the command, or return the command's exit status.

    This process leaves no core file; the command may have left its own.
    """
    number = ended.signal_number
    if number is None:
        return ended.exit_status or 0
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        signal.raise_signal(number)
    return 128 + number  # the first process of a container survives its own signals


def _start(
    command: Sequence[str], mask: frozenset[int], environment: Mapping[str, str] | None, directory: Path | None
) -> Child:
    import subprocess  # slow to load, and `status` does not need it

    try:
        return subprocess.Popen(
            command,
            close_fds=False,  # inheritable descriptors come from our caller, for the command
            env=_for_command(os.environ if environment is None else environment),
            cwd=directory,
            preexec_fn=before_exec(mask),  # noqa: PLW1509 (needs no lock of a thread)
        )
    except OSError as error:
        if directory is not None and error.filename == str(directory):
            raise NotFound(f"cannot enter {directory}: {error.strerror}", path=str(directory)) from None
        if error.errno not in _NOT_FOUND + _NOT_EXECUTABLE:
            raise io_failure("run", command[0], error) from error
        message = f"cannot run {command[0]}: {error.strerror}"
        failure = CommandNotFound(message, command=command[0], reason=error.strerror)
        status = NOT_FOUND if error.errno in _NOT_FOUND else NOT_EXECUTABLE
        raise CommandFailed(failure, exit_status=status) from None


PASS_SECRETS, PASSWORD = "holdfast.pass_store_secrets", "PGPASSWORD"


def _pass_secrets(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[PASS_SECRETS] = value


def _for_command(environment: Mapping[str, str]) -> Mapping[str, str]:
    context = click.get_current_context(silent=True)
    passed = context is not None and context.meta.get(PASS_SECRETS)
    return environment if passed else without_store_secrets(environment)


def without_store_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: with secrets removed from `HOLDFAST_STORE`, and without `PGPASSWORD` if the store
    is on PostgreSQL. Otherwise, that password is not Holdfast's, and stays."""
    kept = dict(environment)
    if kept.keys() & {STORE, PASSWORD}:
        from holdfast.store.addresses import opened, without_secrets

        if opened & {"postgresql", "postgres"}:
            kept.pop(PASSWORD, None)
        if address := kept.pop(STORE, ""):
            with contextlib.suppress(SettingInvalid):
                kept[STORE] = without_secrets(address)
    return kept


class RunCommand(click.Command):
    """A command that runs another one: everything after `--`, which it gets as `command`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        help = "Let COMMAND inherit the password of the store: from HOLDFAST_STORE and PGPASSWORD."
        self.params.append(
            click.Option(["--pass-store-secrets"], is_flag=True, expose_value=False, help=help, callback=_pass_secrets)
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if isinstance(ctx.obj, Output):
            ctx.obj.leave_stdout_to_the_command()
        cut = args.index("--") if "--" in args else len(args)
        command = tuple(args[cut + 1 :])
        ctx.allow_extra_args = ctx.ignore_unknown_options = not command  # words of a command without `--`
        rest = super().parse_args(ctx, args[:cut])
        if not command and not ctx.resilient_parsing:
            if not ctx.args:
                raise click.UsageError("No command to run: write it after '--'.", ctx)
            from shlex import join

            raise click.UsageError(f"Put '--' before the command: -- {join(ctx.args)}", ctx)
        ctx.params["command"] = command
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Our options; otherwise files, as for any word of a command."""
        from click.shell_completion import CompletionItem

        found = super().shell_complete(ctx, incomplete)
        return found if found or incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "--", "COMMAND..."]
