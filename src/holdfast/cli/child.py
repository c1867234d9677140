"""Running a command as if it had been started directly, and ending as it has ended.

The command inherits what we were given and nothing of ours: no lock, no descriptor, no signal that is
blocked. On Linux the kernel kills it if we die without having waited for it, because the lock that it
relies on dies with us.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.cli import signals
from holdfast.errors import CommandNotFound
from holdfast.fs.directory import io_failure

GRACE = 10.0
"""How long a command that is to end may take to do so by itself."""

_NOT_RUNNABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOEXEC, errno.EISDIR)


class Ended(NamedTuple):
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
    duty: signals.Duty | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    mark: Mark | None = None,
) -> Ended:
    """Run a command to its end; raise `CommandNotFound` if there is no such command.

    It gets our environment and current directory unless others are given. If `duty` raises, the command
    is ended first, with all that it has started: asked to, and forced after `GRACE` seconds. By the `mark`
    those are found who have left the family.
    """
    with signals.kept_back() as mask:
        child = _start(command, mask, environment, directory)
        try:
            code = signals.attend(child, duty)
        except BaseException:
            from holdfast.cli.family import Family

            Family(child, mark).end(GRACE)
            raise
    return Ended(None, -code) if code < 0 else Ended(code, None)


def end_like(ended: Ended) -> int:
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
) -> signals.Child:
    try:
        return subprocess.Popen(
            command,
            close_fds=False,  # what is open to be inherited was opened by whoever started us, for the command
            env=environment,
            cwd=directory,
            preexec_fn=signals.before_exec(mask),  # noqa: PLW1509 (needs no lock of a thread)
        )
    except OSError as error:
        if error.errno not in _NOT_RUNNABLE:
            raise io_failure("run", command[0], error) from error
        raise CommandNotFound(
            f"cannot run {command[0]}: {error.strerror}", command=command[0], reason=error.strerror
        ) from None
