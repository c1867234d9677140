"""The guard in git's pre-commit hook, in front of whatever hook is there.

A hook that is a shell script gets our block behind its first line (at the end it might never be
reached). Any other one is moved aside under another name, byte for byte, and called by ours.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.setup import texts
from holdfast.setup.edits import Edit, look
from holdfast.setup.text_blocks import HASH, find_block, with_block, without_block

FIRST_LINE = b"#!/bin/sh\n"
ASIDE = "pre-commit.before-holdfast"
_SHELLS = (b"sh", b"bash", b"dash", b"ash", b"ksh", b"zsh")
_EXECUTABLE = 0o755


def pre_commit_edits(project: Path, *, remove: bool) -> list[Edit]:
    """The changes of git's hooks that put the guard in or take it out."""
    directory = hooks_directory(project)
    hook, aside = look(directory / "pre-commit"), look(directory / ASIDE)
    return _out(hook, aside) if remove else _in(hook, aside)


def hooks_directory(project: Path) -> Path:
    """Where git looks for the hooks of this project, whatever its configuration says."""
    try:
        found = subprocess.run(
            ["git", "-C", str(project), "rev-parse", "--path-format=absolute", "--git-path", "hooks"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise NotFound("git is not installed", hint="Install git, or leave this out.") from None
    if found.returncode != 0:
        raise NotFound(
            f"{project} is not in a git repository: {found.stderr.strip()}",
            hint="Run 'git init' first, or name the project with --project.",
            path=str(project),
        )
    return Path(found.stdout.strip())


def _in(hook: Edit, aside: Edit) -> list[Edit]:
    where = str(hook.path)
    chained = aside.before is not None
    if hook.before is not None and not chained and not _takes_a_block(hook):
        moved = aside._replace(after=hook.before, mode=hook.mode)
        return [moved, hook._replace(after=_script(None, where, chained=True), mode=_EXECUTABLE)]
    mode = _EXECUTABLE if hook.before is None else hook.mode
    return [hook._replace(after=_script(hook.before, where, chained=chained), mode=mode)]


def _out(hook: Edit, aside: Edit) -> list[Edit]:
    if hook.before is None:
        return []
    rest = without_block(hook.before, comment=HASH, where=str(hook.path), first_line=FIRST_LINE)
    if rest is None and aside.before is not None:
        return [hook._replace(after=aside.before, mode=aside.mode), aside._replace(after=None)]
    return [hook._replace(after=rest)]


def _script(content: bytes | None, where: str, *, chained: bool) -> bytes:
    text = texts.PRE_COMMIT_CHAIN if chained else texts.PRE_COMMIT
    return with_block(content, text, version=texts.VERSION, comment=HASH, where=where, first_line=FIRST_LINE)


def _takes_a_block(hook: Edit) -> bool:
    """Whether the hook runs, and is a shell script or ours already."""
    content = hook.before or b""
    if find_block(content, comment=HASH, where=str(hook.path)) is not None:
        return True
    first = content.partition(b"\n")[0]
    program = first[2:].split()[-1:] if first.startswith(b"#!") else []
    named = bool(program) and program[0].rpartition(b"/")[2] in _SHELLS
    return named and bool(hook.mode & 0o111)
