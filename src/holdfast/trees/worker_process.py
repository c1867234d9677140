"""Starting a second process that takes a part of the work off the first one; nothing may depend on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from holdfast.fs import calls

TYPE_CHECKING = False

if TYPE_CHECKING:
    import subprocess

_PIPE = 1 << 20


def program_of(module: str) -> str:
    """What such a process runs: `serve` of a module that loads little."""
    return (
        "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv[1]);"
        f" from {module} import serve; serve(sys.argv[2:])"
    )


def start(
    program: str, arguments: Iterable[object], *, is_told: bool = False, inherits: Iterable[int] = ()
) -> subprocess.Popen[bytes] | None:
    """Start it; None where that cannot be, or where there is no second processor for it.

    The program gets our number and then the arguments. With `is_told` it has a pipe to read orders from.
    """
    if sys.platform == "win32" or not sys.executable or processors() < 2:
        return None
    import subprocess

    packages = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
    words = [packages, str(os.getpid()), *map(str, arguments)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, *words],
            stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=tuple(inherits),
            process_group=0,  # an interruption from the terminal is for the first process to deal with
        )
    except OSError:
        return None
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            calls.enlarge_pipe(pipe.fileno(), _PIPE)
    return process


def processors() -> int:
    """How many processors there are for us."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
