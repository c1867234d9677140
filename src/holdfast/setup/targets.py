"""What `holdfast setup` writes into which file of which program."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from holdfast.setup.edits import HASH, MARKDOWN, Comment
from holdfast.setup.json_entries import JsonEntry

VERSION = 2

AGENTS = """
## Working beside others: Holdfast

Several agents and people work in this repository at the same time. Holdfast keeps them apart.

- See who holds what before you start: `holdfast who`.
- Acquire the lease of a worktree before you write to it:
  `holdfast lease acquire --worktree NAME --ttl 15m --purpose "what for" --field lock_id` prints its id. Name
  it to later commands: `export HOLDFAST_LOCK_ID=ID`, or `--lock-id ID` with each of them if your shell
  forgets variables. `holdfast lease renew` before it expires; `holdfast lease release` when you are done.
  Or let one command do it all: `holdfast run --worktree NAME --snapshot -- COMMAND`.
- To get a directory of your own: `holdfast worktree create NAME --from head` (without `--from` it is empty),
  then `cd "$(holdfast worktree path NAME)"`.
- Save your work: `holdfast snapshot -m "what changed"`. A snapshot is never overwritten.
- Take work from the queue: `holdfast issue claim-next` prints the id of your claim. Name it (`--claim`, or
  `HOLDFAST_CLAIM_ID`) when you are done: `holdfast issue finish ID`; or return the work to the queue:
  `holdfast issue release ID`.
- `E_LOCK_CONFLICT` names the holder: wait (`--wait 5m`) or take other work. Do not delete lock files.
- `E_FENCING_MISMATCH` or `E_LOCK_EXPIRED` means that your lease was taken over: stop writing, acquire it
  again, check what changed, then continue.
- Every command takes `--json`; every failure has a code and a hint.
"""

CLAUDE_POINTER = """
@AGENTS.md
"""

CODEX_MCP = """
[mcp_servers.holdfast]
command = "holdfast"
args = ["mcp"]
"""

PRE_COMMIT = """
if command -v holdfast >/dev/null 2>&1; then holdfast hook pre-commit || exit $?; fi
"""

PRE_COMMIT_CHAIN = """
if command -v holdfast >/dev/null 2>&1; then holdfast hook pre-commit || exit $?; fi
if [ -x "$(dirname "$0")/pre-commit.before-holdfast" ]; then
    exec "$(dirname "$0")/pre-commit.before-holdfast" "$@"
fi
"""


HOOK = "holdfast hook "
"""What the commands of our hooks begin with: that is how they are known again."""


class Target(StrEnum):
    """The programs that can be set up."""

    CLAUDE = "claude"
    CODEX = "codex"
    CURSOR = "cursor"
    GIT = "git"


class TextPart(NamedTuple):
    """A marked block in a text file."""

    path: str
    text: str
    comment: Comment


class JsonPart(NamedTuple):
    """Entries in a JSON file, in the order in which they are put in. `new` is what a file that is not
    there begins with: without a final line break, so that nobody's own file is taken for it."""

    path: str
    entries: tuple[JsonEntry, ...]
    new: str | None = None


Part = TextPart | JsonPart

_AGENTS = TextPart("AGENTS.md", AGENTS, MARKDOWN)
_WRITES = "Write|Edit|MultiEdit|NotebookEdit|apply_patch"


def parts(target: Target) -> tuple[Part, ...]:
    """What a program gets. Git is not among them: its hooks are not in the project; see `git_hooks`."""
    return _PARTS[target]


def _grouped_hook(target: Target, event: str, name: str, matcher: str | None = None) -> JsonEntry:
    """A hook as Claude Code and Codex have it: groups with a matcher, each with a list of commands."""
    command = {"type": "command", "command": _command(target, name), "timeout": 30}
    group: dict[str, object] = {} if matcher is None else {"matcher": matcher}
    return JsonEntry(("hooks", event), {**group, "hooks": [command]}, _is_our_group)


def _flat_hook(target: Target, event: str, name: str, matcher: str | None = None) -> JsonEntry:
    """A hook as Cursor has it: one object each."""
    hook: dict[str, object] = {"command": _command(target, name), "timeout": 30}
    if matcher is not None:
        hook["matcher"] = matcher
    return JsonEntry(("hooks", event), hook, _is_our_hook)


def _command(target: Target, name: str) -> str:
    return f"{HOOK}{name} --from {target}@{VERSION}"


def _is_our_hook(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("command", "")).startswith(HOOK)


def _is_our_group(value: object) -> bool:
    hooks = value.get("hooks") if isinstance(value, dict) else None
    return isinstance(hooks, list) and len(hooks) == 1 and _is_our_hook(hooks[0])


def _is_our_server(value: object) -> bool:
    return isinstance(value, dict) and value.get("command") == "holdfast"


_SERVER = JsonEntry(
    ("mcpServers",), {"type": "stdio", "command": "holdfast", "args": ["mcp"]}, _is_our_server, "holdfast"
)


def _grouped_hooks(target: Target) -> tuple[JsonEntry, ...]:
    return (
        _grouped_hook(target, "SessionStart", "session-start"),
        _grouped_hook(target, "PreToolUse", "before-write", _WRITES),
        _grouped_hook(target, "PostToolUse", "after-tool"),
        _grouped_hook(target, "SessionEnd", "session-end"),
    )


_CURSOR_HOOKS = (
    _flat_hook(Target.CURSOR, "sessionStart", "session-start"),
    _flat_hook(Target.CURSOR, "preToolUse", "before-write", _WRITES),
    _flat_hook(Target.CURSOR, "postToolUse", "after-tool"),
    _flat_hook(Target.CURSOR, "sessionEnd", "session-end"),
)

_PARTS: dict[Target, tuple[Part, ...]] = {
    Target.CLAUDE: (
        _AGENTS,
        TextPart("CLAUDE.md", CLAUDE_POINTER, MARKDOWN),
        JsonPart(".claude/settings.json", _grouped_hooks(Target.CLAUDE)),
        JsonPart(".mcp.json", (_SERVER,)),
    ),
    Target.CODEX: (
        _AGENTS,
        JsonPart(".codex/hooks.json", _grouped_hooks(Target.CODEX)),
        TextPart(".codex/config.toml", CODEX_MCP, HASH),
    ),
    Target.CURSOR: (
        _AGENTS,
        JsonPart(".cursor/hooks.json", _CURSOR_HOOKS, new='{\n  "version": 1\n}'),
        JsonPart(".cursor/mcp.json", (_SERVER,)),
    ),
    Target.GIT: (),
}
