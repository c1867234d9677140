"""The programs that can be set up, and the text and entries that go into each of their files."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from holdfast.git import configured
from holdfast.setup.edits import HASH, MARKDOWN, Comment
from holdfast.setup.json_entries import JsonEntry

VERSION = 3

AGENTS = """
## Working beside others: Holdfast

Several agents and people work in this repository at the same time. Holdfast keeps them apart.

- Before you start, see who holds what: `holdfast who`.
- Acquire the lease of a worktree before you write to it:
  `holdfast lease acquire --worktree NAME --ttl 15m --purpose "what for" --field lock_id` prints its id. Pass
  the id to later commands: `export HOLDFAST_LOCK_ID=ID`, or `--lock-id ID` with each of them if your shell
  forgets variables. `holdfast lease renew` before it expires; `holdfast lease release` when you are done.
  Or do it all with one command: `holdfast run --worktree NAME --snapshot -- COMMAND`.
- For a directory of your own: `holdfast worktree create NAME --from head` (without `--from`, it is empty
  or, in a git checkout, starts at the tip of the branch), then `cd "$(holdfast worktree path NAME)"`.
- Take a snapshot of your work: `holdfast snapshot -m "what changed"`. Nobody can overwrite a snapshot.
- Take work from the queue instead of choosing it: `holdfast issue claim-next` prints the id of your claim.
  Pass it on (`--claim`, or `HOLDFAST_CLAIM_ID`) when you are done: `holdfast issue finish ID`; or give the
  work back: `holdfast issue release ID`.
- `E_LOCK_CONFLICT` names the holder: wait (`--wait 5m`), or take other work. Do not delete lock files.
- `E_FENCING_MISMATCH` or `E_LOCK_EXPIRED` means that your lease was taken over: stop writing, acquire it
  again, look at what changed, then go on.
- Every command takes `--json`; every failure has a code and a hint.
"""

CLAUDE_POINTER = "@AGENTS.md"
CODEX_MCP = """
[mcp_servers.holdfast]
command = "holdfast"
args = ["mcp"]
"""

PRE_COMMIT = "if command -v holdfast >/dev/null 2>&1; then holdfast hook pre-commit || exit $?; fi"
PRE_COMMIT_CHAIN = f"""{PRE_COMMIT}
if [ -x "$(dirname "$0")/pre-commit.before-holdfast" ]; then
    exec "$(dirname "$0")/pre-commit.before-holdfast" "$@"
fi
"""

MERGE_DRIVER = f"""\
[merge "holdfast"]
	name = issues of Holdfast, field by field
	driver = "{configured.MERGE_DRIVER}"
"""

MERGED = """\
**/.jit/issues/*.json merge=holdfast
**/.jit/index.json merge=holdfast
**/.jit/gates.json merge=holdfast
"""

HOOK = "holdfast hook "  # the start of our hooks' commands, by which they are recognised


class Target(StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"
    CURSOR = "cursor"
    GIT = "git"


class TextPart(NamedTuple):
    path: str
    text: str
    comment: Comment


class JsonPart(NamedTuple):
    path: str
    entries: tuple[JsonEntry, ...]  # in the order of insertion
    new: str | None = None  # a new file's content; without a final line break, no user's file is mistaken for it


Part = TextPart | JsonPart

_HOOKS = {  # the hook and the matcher for each event
    "SessionStart": ("session-start", None),
    "PreToolUse": ("before-write", "Write|Edit|MultiEdit|NotebookEdit|apply_patch"),
    "PostToolUse": ("after-tool", None),
    "SessionEnd": ("session-end", None),
}


def _is_our_hook(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("command", "")).startswith(HOOK)


def _is_our_group(value: object) -> bool:
    hooks = value.get("hooks") if isinstance(value, dict) else None
    return isinstance(hooks, list) and len(hooks) == 1 and _is_our_hook(hooks[0])


def _grouped_hooks(target: Target) -> tuple[JsonEntry, ...]:
    """Hooks of Claude Code and Codex: groups with a matcher, each with a list of commands."""
    entries = []
    for event, (name, matcher) in _HOOKS.items():
        command = {"type": "command", "command": _command(target, name), "timeout": 30}
        group = {"hooks": [command]} if matcher is None else {"matcher": matcher, "hooks": [command]}
        entries.append(JsonEntry(("hooks", event), group, _is_our_group))
    return tuple(entries)


def _flat_hooks(target: Target) -> tuple[JsonEntry, ...]:
    """Hooks of Cursor: one object each, and events that start with a lowercase letter."""
    entries = []
    for event, (name, matcher) in _HOOKS.items():
        hook: dict[str, object] = {"command": _command(target, name), "timeout": 30}
        hook |= {} if matcher is None else {"matcher": matcher}
        entries.append(JsonEntry(("hooks", event[0].lower() + event[1:]), hook, _is_our_hook))
    return tuple(entries)


def _command(target: Target, name: str) -> str:
    return f"{HOOK}{name} --from {target}@{VERSION}"


_AGENTS = TextPart("AGENTS.md", AGENTS, MARKDOWN)
_SERVER = JsonEntry(
    ("mcpServers",),
    {"type": "stdio", "command": "holdfast", "args": ["mcp"]},
    lambda value: isinstance(value, dict) and value.get("command") == "holdfast",
    "holdfast",
)

PARTS: dict[Target, tuple[Part, ...]] = {
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
        JsonPart(".cursor/hooks.json", _flat_hooks(Target.CURSOR), new='{\n  "version": 1\n}'),
        JsonPart(".cursor/mcp.json", (_SERVER,)),
    ),
    Target.GIT: (),
}
"""The parts of each program. The hooks and settings of git are not in the project: see `plan`."""
