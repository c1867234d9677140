"""Running a command as if it had been started directly, and ending as it has ended.

The command inherits what we were given and nothing of ours: no lock, no descriptor, no signal that is
blocked. On Linux the kernel kills it if we die without having waited for it, because the lock that it
relies on dies with us.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import psutil

from holdfast.cli.output import Output
from holdfast.errors import CommandNotFound
from holdfast.fs import calls
from holdfast.fs.directory import io_failure

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_PAUSE = 0.05
_LAST_ROUNDS = 20


class ProcessTree:
    """A command and what it has started, as far as it can be found."""

    def __init__(self, child: subprocess.Popen[bytes], mark: Mark | None = None) -> None:
        self._child = child
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}

    def end(self, grace: float) -> None:
        """Ask all of them to end; after `grace` seconds force them."""
        deadline = time.monotonic() + grace
        asked: set[psutil.Process] = set()
        self._find()
        with contextlib.suppress(OSError):
            self._child.terminate()
        while True:
            for each in self._alive() - asked:
                _signal(each, psutil.Process.terminate)
                asked.add(each)
            if self._child.poll() is not None and not self._alive():
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
            self._find()
        self._force()

    def _force(self) -> None:
        """Kill until nobody is left who could have started another one meanwhile."""
        self._child.kill()
        for _ in range(_LAST_ROUNDS):
            self._find()
            left = self._alive()
            for each in left:
                _signal(each, psutil.Process.kill)
            if not left:
                break
            time.sleep(_PAUSE)
        self._child.wait()

    def _find(self) -> None:
        """Add whoever is below those that are known, or carries the mark."""
        with contextlib.suppress(psutil.Error):
            self._add(psutil.Process(self._child.pid).children(recursive=True))
        for each in list(self._known.values()):
            with contextlib.suppress(psutil.Error):
                self._add(each.children(recursive=True))
        self._add(self._marked())

    def _add(self, found: Iterable[psutil.Process]) -> None:
        for each in found:
            if each.pid not in (os.getpid(), self._child.pid):
                self._known[each.pid] = each

    def _marked(self) -> Iterator[psutil.Process]:
        if self._mark is None:
            return
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = each.environ().get(self._mark.name) == self._mark.value
                if marked and _works_in(each, self._mark.place):
                    yield each

    def _alive(self) -> set[psutil.Process]:
        return {each for each in self._known.values() if _is_alive(each)}


def _works_in(process: psutil.Process, place: Path) -> bool:
    """Whether a process stands in a directory, or has a file open in it."""
    paths = [Path(process.cwd()), *(Path(each.path) for each in process.open_files())]
    return any(path.is_relative_to(place) for path in paths)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(process: psutil.Process, how: Callable[[psutil.Process], None]) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended, or runs with rights that we do not have
        how(process)


Child = subprocess.Popen[bytes]

FORWARDED = frozenset(
    number
    for name in "SIGHUP SIGINT SIGQUIT SIGTERM SIGUSR1 SIGUSR2 SIGALRM SIGWINCH SIGPWR".split()
    if (number := getattr(signal, name, None)) is not None
)


class SignalForwarding(NamedTuple):
    """Something to do every so often while a command runs; if it raises, the command is ended."""

    every: float
    do: Callable[[], object]


if sys.platform == "win32":

    @contextlib.contextmanager
    def kept_back() -> Iterator[frozenset[int]]:
        """A Ctrl-C reaches every process at the console: the command acts on it, we wait for that."""
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            yield frozenset()
        finally:
            signal.signal(signal.SIGINT, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        """Nothing has to be done in the child: it is not a copy of us."""
        return None

else:

    @contextlib.contextmanager
    def kept_back() -> Iterator[frozenset[int]]:
        """Block the signals that concern us, from before the command exists until its end is known.

        Yields what was blocked before, which is what the command is to inherit.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, exit statuses are lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
        try:
            yield frozenset(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def before_exec(mask: frozenset[int]) -> Callable[[], None] | None:
        """What the child has to do before it becomes the command: die with us, and listen again."""
        parent = os.getpid()
        if sys.platform == "linux":
            from holdfast.fs.native import die_with_parent

        def prepare() -> None:
            if sys.platform == "linux":
                die_with_parent()
                if os.getppid() != parent:  # it died before we could ask for that
                    os.kill(os.getpid(), signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):  # ours: what it does is not for the command
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        return prepare


if sys.platform == "win32":

    def attend(child: Child, duty: SignalForwarding | None) -> int:
        """Wait for the child, doing the duty meanwhile; return its code."""
        return _wait(child, duty)

elif sys.platform == "darwin":

    def attend(child: Child, duty: SignalForwarding | None) -> int:
        """Wait for the child, forwarding signals and doing the duty meanwhile; return its code."""

        def forward(number: int, frame: object) -> None:
            if number not in (signal.SIGINT, signal.SIGQUIT) or not _in_foreground():
                child.send_signal(number)

        before = {each: signal.getsignal(each) for each in FORWARDED}
        wanted = [each for each in FORWARDED if before[each] is not signal.SIG_IGN]
        for each in wanted:
            signal.signal(each, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            return _wait(child, duty)
        finally:
            for each in wanted:
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

    def attend(child: Child, duty: SignalForwarding | None) -> int:
        """Wait for the child, forwarding signals and doing the duty meanwhile; return its code."""
        due = time.monotonic() + duty.every if duty else None
        while (code := child.poll()) is None:
            arrived = _next_signal(due)
            if arrived and arrived.si_signo in FORWARDED and not _reached_already(child, arrived):
                child.send_signal(arrived.si_signo)
            if duty and due is not None and time.monotonic() >= due:
                duty.do()
                due = time.monotonic() + duty.every
        while signal.sigtimedwait(FORWARDED, 0):  # too late for the child, and not meant for us
            pass
        return code

    def _next_signal(due: float | None) -> signal.struct_siginfo | None:
        """Wait for the next of the signals that are kept back; None if `due` comes first."""
        watched = FORWARDED | {signal.SIGCHLD}
        if due is None:
            return signal.sigwaitinfo(watched)
        return signal.sigtimedwait(watched, max(0.0, due - time.monotonic()))

    def _reached_already(child: Child, arrived: signal.struct_siginfo) -> bool:
        """Whether the terminal sent this, to us and to the child alike."""
        from_the_kernel = arrived.si_code > 0
        try:
            return from_the_kernel and os.getpgid(child.pid) == os.getpgrp()
        except OSError:
            return True


if sys.platform in ("win32", "darwin"):

    def _wait(child: Child, duty: SignalForwarding | None) -> int:
        while True:
            try:
                return child.wait(duty.every if duty else None)
            except subprocess.TimeoutExpired:
                if duty:
                    duty.do()


GRACE = 10.0
"""How long a command that is to end may take to do so by itself."""

_NOT_RUNNABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC, errno.EISDIR)


class CommandExit(NamedTuple):
    """How a command ended: with an exit status of its own, or by a signal."""

    exit_status: int | None
    signal_number: int | None

    def as_record(self) -> dict[str, object]:
        """Plain values."""
        return {"exit_status": self.exit_status, "signal": self.signal_name}

    @property
    def signal_name(self) -> str | None:
        """The name of the signal, if there was one."""
        if self.signal_number is None:
            return None
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:  # most real-time signals have none
            return f"SIG{self.signal_number}"


class Mark(NamedTuple):
    """What is in the environment of the command, and of nobody that was not started by it; and which
    directory nobody may write into any more."""

    name: str
    value: str
    place: Path


def run(
    command: Sequence[str],
    *,
    duty: SignalForwarding | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    mark: Mark | None = None,
) -> CommandExit:
    """Run a command to its end; raise `CommandNotFound` if there is no such command.

    It gets our environment and current directory unless others are given. If `duty` raises, the command
    is ended first, with all that it has started: asked to, and forced after `GRACE` seconds. By the `mark`
    those are found who have left the family.
    """
    with kept_back() as mask:
        child = _start(command, mask, environment, directory)
        try:
            code = attend(child, duty)
        except BaseException:
            ProcessTree(child, mark).end(GRACE)
            raise
    return CommandExit(None, -code) if code < 0 else CommandExit(code, None)


def end_like(ended: CommandExit) -> int:
    """End this process by the signal that ended the command, or return the command's exit status.

    We leave no core file: if there is to be one, the command has left its own.
    """
    number = ended.signal_number
    if number is None:
        return ended.exit_status or 0
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler that could be in the way
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        signal.raise_signal(number)
    return 128 + number  # still here: the first process of a container does not die of its own signals


def _start(
    command: Sequence[str],
    mask: frozenset[int],
    environment: Mapping[str, str] | None,
    directory: Path | None,
) -> Child:
    try:
        return subprocess.Popen(
            command,
            close_fds=False,  # what is open to be inherited was opened by whoever started us, for the command
            env=environment,
            cwd=directory,
            preexec_fn=before_exec(mask),  # noqa: PLW1509 (needs no lock of a thread)
        )
    except OSError as error:
        if error.errno not in _NOT_RUNNABLE:
            raise io_failure("run", command[0], error) from error
        raise CommandNotFound(
            f"cannot run {command[0]}: {error.strerror}", command=command[0], reason=error.strerror
        ) from None


class RunCommand(click.Command):
    """A command that runs another one, which is everything after `--`. It gets it as `command`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the arguments apart at `--`: ours before it, the command to run after it."""
        if isinstance(ctx.obj, Output):
            ctx.obj.leave_stdout_to_the_command()
        cut = args.index("--") if "--" in args else len(args)
        command = tuple(args[cut + 1 :])
        ctx.allow_extra_args = ctx.ignore_unknown_options = not command  # they are its words, misplaced
        rest = super().parse_args(ctx, args[:cut])
        if not command and not ctx.resilient_parsing:
            raise click.UsageError("There is no command to run: write it after '--'.", ctx)
        ctx.params["command"] = command
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Our options; otherwise files, as for any word of a command."""
        from click.shell_completion import CompletionItem

        found = super().shell_complete(ctx, incomplete)
        return found if found or incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line, with the command at its end."""
        return [*super().collect_usage_pieces(ctx), "--", "COMMAND..."]
