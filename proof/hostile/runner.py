"""Runs commands with limits: each in a forked process, with a limit of its own time, memory and file size.

A `Runner` is a server process that has loaded every module of Holdfast, so a command costs a fork and not the start
of an interpreter. `execute` forks from the calling process, for harnesses that run thousands of cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from holdfast.errors import ExitStatus
from proof.forked import exit_with
from proof.hostile.patience import ends_in_time

if sys.platform != "win32":
    import resource

TIME_LIMIT = 10.0
"""Seconds of its own time until a command counts as hanging: hundreds of times what the slowest one needs."""
MEMORY_LIMIT = 1 << 30  # beyond the memory of the process that forks the command
FILE_LIMIT = 64 << 20
MOST_OUTPUT = 1 << 20
HUNG = "it hangs"
_SERVE = "from proof.hostile.runner import serve; serve()"
_STATUSES = frozenset({*map(int, ExitStatus), 126, 127})


class Job(NamedTuple):
    """A command line of `holdfast`, and the process that it runs in. `stdout` names a file instead of a capture; `call`
    names a function (`module:name`) that gets the arguments in place of the command line. `group` is another group of
    the user."""

    arguments: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    stdin: str = ""
    stdout: str = ""
    user: int | None = None
    limit: float = TIME_LIMIT
    call: str = ""
    group: int | None = None
    umask: int = 0o022


class Outcome(NamedTuple):
    """How a command ended; `status` is None if it had to be killed."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def problem(self) -> str:
        """Why no command may end like this; empty if it may."""
        if self.status is None:
            return HUNG
        if self.status < 0:
            return f"it died of signal {-self.status}"
        said = f"{self.out}\n{self.err}"
        if "Traceback (most recent call last)" in said or "E_UNEXPECTED" in said:
            return f"unexpected: {_last_line(said)}"
        return "" if self.status in _STATUSES else f"its status {self.status} is not one of Holdfast's"

    @property
    def code(self) -> str:
        """The code of the failure that it printed; empty if it printed none."""
        for text in (self.err, self.out):
            if "Code: E_" in text:
                return text.rpartition("Code: ")[2].split()[0]
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(text)["error"]["code"])
        return ""


def _last_line(text: str) -> str:
    """The line of a traceback or of a report that names the error, and where the error came from."""
    lines = [line for line in text.splitlines() if line.strip()]
    places = [line.strip() for line in lines if line.lstrip().startswith("File ") and "/holdfast/" in line]
    named = [line for line in lines if "Error" in line and not line.startswith(" ")]
    where = ""
    if places:
        file, _, rest = places[-1].removeprefix('File "').partition('", ')
        where = f" at {file.rpartition('/holdfast/')[2]}, {rest}"
    return f"{(named or lines or ['nothing'])[-1][:200]}{where}"


def execute(job: Job, *, prepare: Callable[[], object] | None = None) -> Outcome:
    """Run a command in a process forked from this one; `prepare` runs there first, as the job's user."""
    return execute_function(job, lambda: _called(job) if job.call else _main(job.arguments), prepare=prepare)


def execute_function(job: Job, work: Callable[[], int], *, prepare: Callable[[], object] | None = None) -> Outcome:
    """Like `execute`, for any function that returns an exit status."""
    if sys.platform != "linux":
        raise NotImplementedError
    given, out, err = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
    try:
        os.write(given, job.stdin.encode("utf-8", "surrogateescape"))
        os.lseek(given, 0, os.SEEK_SET)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(job, (given, out, err), work, prepare)
        status = _wait(child, job.limit)
        seconds = time.monotonic() - started
        return Outcome(status, _content(out), _content(err), seconds)
    finally:
        for each in (given, out, err):
            os.close(each)


def _content(descriptor: int) -> str:
    if sys.platform == "win32":
        raise NotImplementedError
    return os.pread(descriptor, MOST_OUTPUT, 0).decode("utf-8", "backslashreplace")


def _wait(child: int, limit: float) -> int | None:
    """The exit status of a child; None if it had to be killed. Its descendants are killed in any case."""
    if sys.platform != "linux":
        raise NotImplementedError
    ended = ends_in_time(child, limit)
    if not ended:
        os.kill(child, signal.SIGUSR2)  # it writes down what its threads do, and ends
        ends_in_time(child, 1.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _become(job: Job, streams: Sequence[int], work: Callable[[], int], prepare: Callable[[], object] | None) -> None:
    """Be the process of a job; never returns."""
    if sys.platform != "linux":
        raise NotImplementedError

    def live() -> object:
        os.setsid()
        for number, each in enumerate(streams):
            os.dup2(each, number)
        if job.stdout:
            os.dup2(os.open(job.stdout, os.O_WRONLY), 1)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
            for number, mode, errors in ((0, "r", "surrogateescape"), (1, "w", "strict"), (2, "w", "backslashreplace"))
        )
        _become_user(job.user, job.group)
        os.umask(job.umask)
        os.environ.clear()
        os.environ.update(job.env)
        if prepare is not None:
            prepare()
        faulthandler.register(signal.SIGUSR2, file=streams[2], chain=True)
        _limit()
        os.chdir(job.cwd)
        return work()

    exit_with(live)


def _limit() -> None:
    if sys.platform == "linux":
        own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # of the forking process
        resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_LIMIT, own + MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _become_user(user: int | None, group: int | None) -> None:
    if sys.platform != "linux":
        raise NotImplementedError
    if user is None:
        return
    os.setgroups([] if group is None else [group])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    candidates = (sys.executable, getattr(sys, "_base_executable", ""), "/usr/bin/python3")
    # Ours may be in a directory that only we may enter.
    sys.executable = next((each for each in candidates if os.access(each, os.X_OK)), sys.executable)


def _called(job: Job) -> int:
    from importlib import import_module

    module, _, name = job.call.partition(":")
    return int(getattr(import_module(module), name)(*job.arguments))


def _main(arguments: Sequence[str]) -> int:
    from holdfast.__main__ import main

    sys.argv = ["holdfast", *arguments]
    return main()


def die_in_commit(*arguments: str) -> int:
    """A command that is killed right after the commit point of its first commit of several documents."""
    from holdfast.__main__ import main
    from holdfast.store.intents import Intents

    def apply(*_: object) -> list[int]:
        os.kill(os.getpid(), 9)
        return []

    setattr(Intents, "apply", apply)  # noqa: B010 - another signature
    sys.argv = ["holdfast", *arguments]
    return main()


def load_everything() -> None:
    """Import every module of Holdfast, so that forked commands need not."""
    import encodings
    import pkgutil
    from importlib import import_module

    import holdfast

    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.startswith("holdfast.testing"):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                import_module(module.name)
    import_module("mmap")  # another user may not read the library
    for codec in pkgutil.iter_modules(encodings.__path__, "encodings."):
        with contextlib.suppress(ImportError):
            import_module(codec.name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


# --- The server -------------------------------------------------------------------------------------


class Runner:
    """A server process that runs one command after the other. A context manager."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))  # jobs run elsewhere
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def run(self, job: Job) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job._asdict()) + "\n")
        self._process.stdin.flush()
        fields: dict[str, Any] = json.loads(self._process.stdout.readline())
        return Outcome(**fields)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def serve() -> None:
    """Be the server: run the job of each line of standard input, and print its outcome as a line."""
    load_everything()
    requests, answers = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "r"), (1, "w")))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for line in requests:
        outcome = execute(Job(**json.loads(line)))
        answers.write(json.dumps(outcome._asdict()) + "\n")
        answers.flush()
