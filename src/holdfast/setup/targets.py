"""Which files of which program get what."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from holdfast.setup import texts
from holdfast.setup.json_entries import Entry
from holdfast.setup.text_blocks import HASH, MARKDOWN, Comment

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
    entries: tuple[Entry, ...]
    new: str | None = None


Part = TextPart | JsonPart

_AGENTS = TextPart("AGENTS.md", texts.AGENTS, MARKDOWN)
_WRITES = "Write|Edit|MultiEdit|NotebookEdit|apply_patch"


def parts(target: Target) -> tuple[Part, ...]:
    """What a program gets. Git is not among them: its hooks are not in the project; see `git_hooks`."""
    return _PARTS[target]


def _grouped_hook(target: Target, event: str, name: str, matcher: str | None = None) -> Entry:
    """A hook as Claude Code and Codex have it: groups with a matcher, each with a list of commands."""
    command = {"type": "command", "command": _command(target, name), "timeout": 30}
    group: dict[str, object] = {} if matcher is None else {"matcher": matcher}
    return Entry(("hooks", event), {**group, "hooks": [command]}, _is_our_group)


def _flat_hook(target: Target, event: str, name: str, matcher: str | None = None) -> Entry:
    """A hook as Cursor has it: one object each."""
    hook: dict[str, object] = {"command": _command(target, name), "timeout": 30}
    if matcher is not None:
        hook["matcher"] = matcher
    return Entry(("hooks", event), hook, _is_our_hook)


def _command(target: Target, name: str) -> str:
    return f"{HOOK}{name} --from {target}@{texts.VERSION}"


def _is_our_hook(value: object) -> bool:
    return isinstance(value, dict) and str(value.get("command", "")).startswith(HOOK)


def _is_our_group(value: object) -> bool:
    hooks = value.get("hooks") if isinstance(value, dict) else None
    return isinstance(hooks, list) and len(hooks) == 1 and _is_our_hook(hooks[0])


def _is_our_server(value: object) -> bool:
    return isinstance(value, dict) and value.get("command") == "holdfast"


_SERVER = Entry(
    ("mcpServers",), {"type": "stdio", "command": "holdfast", "args": ["mcp"]}, _is_our_server, "holdfast"
)


def _grouped_hooks(target: Target) -> tuple[Entry, ...]:
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
        TextPart("CLAUDE.md", texts.CLAUDE_POINTER, MARKDOWN),
        JsonPart(".claude/settings.json", _grouped_hooks(Target.CLAUDE)),
        JsonPart(".mcp.json", (_SERVER,)),
    ),
    Target.CODEX: (
        _AGENTS,
        JsonPart(".codex/hooks.json", _grouped_hooks(Target.CODEX)),
        TextPart(".codex/config.toml", texts.CODEX_MCP, HASH),
    ),
    Target.CURSOR: (
        _AGENTS,
        JsonPart(".cursor/hooks.json", _CURSOR_HOOKS, new='{\n  "version": 1\n}'),
        JsonPart(".cursor/mcp.json", (_SERVER,)),
    ),
    Target.GIT: (),
}
