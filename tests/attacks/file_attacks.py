"""Attacks by kinds of files: links in place of directories and files, and fifos, devices and huge files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from proof.hostile.victim import Victim, write
from tests.attacks.planting import Attack, device, directory, fifo, huge, link

DIRECTORIES = (
    *(".jvs/audit", ".jvs/cache", ".jvs/descriptors", ".jvs/guards", ".jvs/locks", ".jvs/operations", ".jvs/pins"),
    *(".jvs/plans", ".jvs/quarantine", ".jvs/queues", ".jvs/refs", ".jvs/remnants", ".jvs/reserve", ".jvs/snapshots"),
    *(".jvs/tmp", ".jvs/tokens", ".jvs/waits", ".jvs/worktrees", ".jvs/worktrees/spare", ".jvs"),
    *(".jit", ".jit/issues", ".jit/claims", ".jit/dependents", ".jit/gate-runs"),
    *(".holdfast", ".holdfast/intents", ".holdfast/checkpoints", "ledger", "locks", "main", "worktrees"),
)
"""Every directory of a repository that Holdfast uses."""

FILES = (
    *(".jvs/format.json", ".jvs/worktrees/main/config.json", ".jvs/locks/side.json", ".jvs/tokens/main.json"),
    *(".jvs/queues/main.json", ".jvs/operations/main.json", ".jvs/retention.json", ".jvs/audit/audit.jsonl"),
    *(".jvs/cache/main.stat", ".jvs/refs/v1.json", ".jvs/waits/00aa.json", ".jvs/tmp/00000000000000aa/intent.json"),
    *(".jvs/reserve/0", ".jit/index.json", ".jit/graph.json", ".jit/gates.json", ".jit/events.jsonl"),
    *(".holdfast/config.json", ".holdfast/intents/00aa.json", ".holdfast/intents/00aa.done"),
    *("meta.json", "ledger/event-000001.json", "ledger/event-000003.json", "ledger/ledger.lock", "locks/1.2.lock"),
    *(".holdfast/checkpoints/claims.json", ".jvs/tmp/00000000000000aa/lock"),
)
"""One file of every kind that Holdfast reads."""

LOCKS = (
    *(".jvs/guards/format.lock", ".jvs/guards/worktree-main.lock", ".jvs/guards/worktree-made.lock"),
    *(".jvs/guards/payload-main.lock", ".jvs/guards/payload-spare.lock", ".jvs/guards/refs.lock"),
    *(".jvs/guards/retention.lock", ".jvs/guards/collector.lock", ".jvs/audit/.audit.lock"),
    *(".jit/.index.lock", ".jit/.gates.lock", ".jit/.events.lock", "ledger/.meta.lock", "locks/.guard"),
    *(
        "ledger/.ledger.lock.end",
        "ledger/.ledger.lock.guard",
        "ledger/.ledger.lock.turnstile",
        "ledger/.ledger.lock.turnstile.queue",
    ),
)
"""Lock files, which commands create where they are missing."""

AIMS = (
    *("doctor --fix", "who", "snapshot -m x", "worktree create made --from head", "worktree remove spare"),
    *("gc plan", "gc run --plan {plan}", "lease acquire --ttl 5m", "restore v1 --inplace --reason x"),
    *("issue create x", "issue claim-next", "ledger append {event}", "ledger claim 1.3 --actor agent:me"),
)
READING = ("info", "who", "doctor", "history", "issue list", "ledger log", "guard worktrees/side/mine main/top")


def _target(victim: Victim, path: str) -> Path:
    """What a link in place of a directory leads to: a directory in which there is much to lose."""
    return victim.trap


def linked_directories() -> Iterator[Attack]:
    for path in DIRECTORIES:
        yield Attack(f"{path} is a link to a trap", _linked(path, absolute=True), AIMS)
    for path in (".jvs/tmp", ".jvs/snapshots", ".jvs/waits", "worktrees", ".holdfast/intents", ".jit"):
        yield Attack(f"{path} is a relative link to a trap", _linked(path, absolute=False), AIMS)
    for path in (".jvs/tmp", ".jvs/guards", ".jvs/reserve", "ledger", "locks", ".holdfast/checkpoints"):
        yield Attack(f"{path} is a link to an empty directory", _linked_to_empty(path), AIMS)
        yield Attack(f"{path} is a link to itself", _looped(path), AIMS)


def _linked(path: str, *, absolute: bool) -> Callable[[Victim], None]:
    def plant(victim: Victim) -> None:
        place, target = victim.root / path, victim.trap
        link(place, target if absolute else os.path.relpath(target, place.parent))

    return plant


def _linked_to_empty(path: str) -> Callable[[Victim], None]:
    return lambda victim: link(victim.root / path, victim.home / "docs/empty")


def _looped(path: str) -> Callable[[Victim], None]:
    return lambda victim: link(victim.root / path, Path(path).name)


def linked_files() -> Iterator[Attack]:
    for path in (*FILES, *LOCKS):
        yield Attack(f"{path} is a link to a sentinel", _file_linked(path, "docs/letter"), (*AIMS, *READING))
    for path in (*LOCKS, ".jvs/audit/audit.jsonl", ".jit/events.jsonl", ".jvs/cache/main.stat", ".jvs/reserve/0"):
        yield Attack(f"{path} is a link to nothing", _file_linked(path, "planted"), AIMS)


def _file_linked(path: str, target: str) -> Callable[[Victim], None]:
    return lambda victim: link(victim.root / path, victim.home / target)


_KINDS: dict[str, Callable[[Path], None]] = {"a fifo": fifo, "a directory": directory, "a huge file": huge}
if sys.platform == "linux" and os.geteuid() == 0:
    _KINDS["an endless device"] = device


def kinds() -> Iterator[Attack]:
    for path in FILES:
        for kind, make in _KINDS.items():
            yield Attack(f"{path} is {kind}", _made(path, make), READING)
    for path in LOCKS:
        for kind in ("a fifo", "a directory"):
            yield Attack(f"{path} is {kind}", _made(path, _KINDS[kind]), AIMS)


def _made(path: str, make: Callable[[Path], None]) -> Callable[[Victim], None]:
    return lambda victim: make(victim.root / path)


# --- Setup ------------------------------------------------------------------------------------------

PROGRAMS = ("claude", "codex", "cursor")


def setups() -> Iterator[Attack]:
    for program in PROGRAMS:
        aims = (f"setup {program}", f"setup {program} --remove", f"setup {program} --dry-run")
        yield Attack(f".{program} is a link out of the project", _linked_setup(program), aims)
        yield Attack(f".{program} is a link to an empty directory", _linked_to_empty(f".{program}"), aims)
        yield Attack(f"AGENTS.md is a link out, for {program}", _file_linked("AGENTS.md", "docs/letter"), aims)
        yield Attack(f"AGENTS.md is a fifo, for {program}", _made("AGENTS.md", fifo), aims)
    yield Attack("a link in the project leads to a linked directory", _chained, ("setup claude",))
    yield Attack("git's hooks are outside of the project", _hooks_elsewhere, ("setup git", "setup git --remove"))
    yield Attack("git's hooks are a link out", _hooks_linked, ("setup git", "setup git --remove"))


def _linked_setup(program: str) -> Callable[[Victim], None]:
    return lambda victim: link(victim.root / f".{program}", victim.trap)


def _chained(victim: Victim) -> None:
    link(victim.root / "aside", victim.home)
    link(victim.root / "CLAUDE.md", "aside/planted")
    link(victim.root / ".mcp.json", "aside/docs/letter")


def _hooks_elsewhere(victim: Victim) -> None:
    _git(victim)
    config = victim.root / ".git/config"
    write(config, f"{config.read_text()}[core]\n\thooksPath = {victim.trap}\n")


def _hooks_linked(victim: Victim) -> None:
    _git(victim)
    link(victim.root / ".git/hooks", victim.trap)


def _git(victim: Victim) -> None:
    """A git repository, as far as git needs it to be one."""
    for name in ("objects", "refs"):
        (victim.root / ".git" / name).mkdir(parents=True)
    write(victim.root / ".git/HEAD", "ref: refs/heads/main\n")
    write(victim.root / ".git/config", "[core]\n\trepositoryformatversion = 0\n\tbare = false\n")


ATTACKS = [*linked_directories(), *linked_files(), *kinds(), *setups()]
