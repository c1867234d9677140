"""On whose behalf a command runs: an agent runs every command as a new process, mostly in a new shell.

The process that ran a command may be gone a moment later, and says nothing about who stands behind it.
So we look upwards past shells that exist for this one command only (`sh -c ...`): what is above them is
the agent, the script or the person's own shell.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterable

from holdfast.locks.holders import Holder, current_holder, current_vantage, holder_with_pid
from holdfast.locks.processes import ancestors, words_of

MOST_ABOVE = 16
"""How far up it is looked for those on whose behalf a command runs."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "fish")


def calling_agent() -> Holder:
    """Who runs this command; this process itself if that cannot be seen."""
    if sys.platform == "win32":
        return current_holder()
    for process in ancestors(os.getppid()):
        if process.pid > 1 and not _is_passing_shell(words_of(process.pid)):
            return holder_with_pid(process.pid) or current_holder()
    return current_holder()


@functools.lru_cache(maxsize=1)
def _above(pid: int) -> tuple[str, ...]:  # by pid, for a forked child has another parent
    here = current_holder()
    found = itertools.islice(ancestors(pid), 1, 1 + MOST_ABOVE)
    return tuple(
        here._replace(pid=each.pid, start_time=each.start_time).holder_id for each in found if each.pid > 1
    )


def processes_above() -> tuple[str, ...]:
    """The ids of the holders that the processes above this one would be, the nearest first."""
    return _above(os.getpid())


def is_ours(holder: Holder) -> bool:
    """Whether this command runs on behalf of `holder`: it is this process, or one that it descends from."""
    if holder.pid <= 1 or holder.vantage != current_vantage():
        return False
    return any(
        (process.pid, process.start_time) == (holder.pid, holder.start_time)
        for process in ancestors(os.getpid())
    )


def acts_under(holders: Iterable[Holder | None], named: str | None, actor: str | None) -> bool:
    """Whether this command, run in the name of `actor`, acts under what `holders` have.

    It does if it runs on behalf of one of them. But one process may be the home of several agents, which
    descent cannot tell apart: so who says its name is not taken for another one that said its own
    (`named`, when it took what it holds). Who says none is known by its process.
    """
    if named and actor and named != actor:
        return False
    return any(holder is not None and is_ours(holder) for holder in holders)


def _is_passing_shell(words: list[str]) -> bool:
    """Whether this is a shell that carries out one command line and is gone then."""
    if not words or words[0].lstrip("-").rpartition("/")[2] not in _SHELLS:
        return False
    options = [word for word in words[1:] if word.startswith("-") and not word.startswith("--")]
    return any("c" in option for option in options[:3])
