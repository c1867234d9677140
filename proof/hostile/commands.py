"""Every command of Holdfast with plausible arguments, for harnesses that run them all in a hostile repository."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from proof.hostile.victim import Victim

_REQUESTS = {
    "before-write": {"tool_input": {"file_path": "{main}/top"}, "cwd": "{main}"},
    "after-tool": {"cwd": "{side}"},
    "session-start": {"cwd": "{main}"},
    "session-end": {"cwd": "{main}"},
}

_LINES = """
init {out}/made
init
init {place}
info
run --no-chdir -- true
run --worktree spare --snapshot -- touch more
worktree create made --from head
worktree create empty --label x
worktree create beside --shared --from v1
worktree list
worktree show side
worktree path side
worktree rename spare other
worktree rename open other --force
worktree remove spare
worktree remove open --force --no-snapshot
worktree remove spare --dry-run
worktree adopt {side}
snapshot push
snapshot fetch
deinit
config list
config get worktree.setup
config set worktree.copy .env
config unset worktree.copy
prime
prime --issue {issue}
lease acquire --ttl 5m --purpose x
lease acquire --worktree side --wait 1ms
lease steal --worktree side
lease renew --lock-id x
lease release --worktree side --lock-id x
lease status --worktree side
trust --show
lease list
snapshot -m x
snapshot --worktree side --consistency best_effort
snapshot --worktree open --engine copy --tag t
history --all
history --graph --worktree side
show head --files
status
status --worktree side
diff --patch
diff v1 head --patch --all
verify head
verify --all
restore head restored
restore v1 --inplace --reason x
restore v1 --inplace --worktree spare --reason x
restore head --inplace --path src --reason x --no-snapshot
restore head --inplace --dry-run --reason x
export head {out}/exported
export v1 {out}/part --path src
ref create w1 head
ref list
ref delete v1
pin add head --reason x
pin list
pin remove {pin}
gc plan
gc plan --dry-run
gc run --plan {plan}
gc policy --keep-last 2
gc policy
audit
audit --verify
audit archive --keep 1 --to {out}/archive
doctor
doctor --strict
doctor --fix
metrics
metrics --json
agent run --next --ttl 5s -- true
agent run --issue {issue} --gate tests -- true
land side --no-wait
land side --dry-run
land --all
landing list --all
landing show x
landing cancel x
landing retry x
landing log x
conflicts
issue init
issue create x --depends-on {issue} --gate tests
issue list --json
issue search first
issue show {issue}
issue update {issue} --title y --state ready
issue delete {second}
issue claim {second} --ttl 5m
issue claim-next --ttl 5m
issue heartbeat {issue} --claim {issue}.1.x
issue finish {issue} --claim {issue}.1.x
issue release {issue} --claim {issue}.1.x
issue work --next --ttl 5s -- true
issue breakdown {second} --part a --part b
issue import {main}/top
issue export
issue validate
issue validate --fix
issue locks
dep add {issue} {second}
dep remove {second} {issue}
dep tree {second}
gate define more --checker true --replace
gate list
gate require {issue} review
gate check {second} tests
gate pass {issue} review
gate fail {issue} review --force
ready
blocked
graph
graph --all --format dot
events --limit 5
ledger init
ledger append {event}
ledger log
ledger log --node 1.2 --json
ledger watch --limit 1 --wait 1ms
ledger show 1
ledger status
ledger verify
ledger archive --keep 1 --to {out}/archive
ledger unlock --identity x
ledger claim 1.3 --actor agent:me --ttl 5s
ledger claim 1.2 --actor agent:me --wait 1ms
ledger claims
ledger extend 1.2 --actor agent:other
ledger release 1.2 --actor agent:other
ledger reap
ledger claim-history 1.2
who
top --limit 1
guard {main}/top {side}/mine
guard --json {side}/mine
mcp
setup claude
setup codex
setup cursor
setup git
setup claude --remove
join file://{out}/store
migrate --to file://{out}/store
migrate --to file://{out}/store --dry-run
lock run {root}/.jvs/guards/format.lock --wait 1ms -- true
lock status {root}/.jvs/guards/format.lock
repo-lock run x --wait 1ms -- true
repo-lock status
repo-lock break x --identity y
completion bash
hook before-write
hook after-tool
hook session-start
hook session-end
hook pre-commit
"""

EXEMPT = {
    "demo": "it makes a repository of its own",
    "demo-task": "a part of the demo",
    "demo-faulty-agent": "a part of the demo",
    "demo-landing-task": "a part of the demo",
    "help": "it reads no repository",
    "web": "a server that runs until it is stopped; `tests/web` attacks it",
}
"""Commands that no hostile repository reaches, with the reason."""

_MCP: list[dict[str, Any]] = [
    {"id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18", "capabilities": {}}},
    {"method": "notifications/initialized"},
    {"id": 1, "method": "tools/call", "params": {"name": "who", "arguments": {}}},
    {"id": 2, "method": "tools/call", "params": {"name": "snapshot", "arguments": {}}},
]


class CommandLine(NamedTuple):
    """A command, as typed, and its standard input."""

    arguments: tuple[str, ...]
    stdin: str = ""

    def __str__(self) -> str:
        return " ".join(self.arguments)


def facts_of(victim: Victim) -> dict[str, str]:
    """The ids in a sound repository that the command lines name."""
    root = victim.root
    issues = {json.loads(each.read_text())["title"]: each.stem for each in (root / ".jit/issues").glob("*.json")}
    return {
        "root": str(root),
        "place": str(victim.place),
        "main": str(victim.repository / "main"),
        "side": str(victim.worktree("side")),
        "out": str(victim.out),
        "pin": _first(root / ".jvs/pins"),
        "plan": next(each.stem for each in (root / ".jvs/plans").glob("*.json") if "proposed" in each.read_text()),
        "issue": issues["first"],
        "second": issues["second"],
        "event": '{"type":"note"}',
    }


def _first(directory: Path) -> str:
    return min(name for name in os.listdir(directory) if name.endswith(".json")).removesuffix(".json")


def command_lines(facts: Mapping[str, str]) -> list[CommandLine]:
    """All command lines, for a repository with these facts."""
    return [filled(line.split(), facts) for line in _LINES.strip().splitlines()]


def filled(words: list[str], facts: Mapping[str, str]) -> CommandLine:
    arguments = tuple(_fill(word, facts) for word in words)
    if arguments[0] == "hook":
        request = json.dumps(_REQUESTS.get(arguments[1], {}))
        return CommandLine(arguments, _fill(request, facts))
    if arguments[0] == "mcp":
        return CommandLine(arguments, "".join(json.dumps({"jsonrpc": "2.0", **each}) + "\n" for each in _MCP))
    return CommandLine(arguments)


def _fill(word: str, facts: Mapping[str, str]) -> str:
    for name, value in facts.items():
        word = word.replace("{" + name + "}", value)
    return word


def leaves() -> Iterator[str]:
    """Every command of the program, by its path in the tree of commands."""
    from holdfast.cli.entry import root

    waiting: list[tuple[str, click.Command, click.Context]] = [("", root, click.Context(root, info_name="holdfast"))]
    while waiting:
        path, command, context = waiting.pop()
        if not isinstance(command, click.Group):
            yield path
            continue
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                waiting.append((f"{path} {name}".strip(), child, click.Context(child, info_name=name, parent=context)))
