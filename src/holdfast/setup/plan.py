"""From what a program needs to the changes of files that this comes to.

All changes are worked out before the first is made: whatever cannot be done is refused with nothing
changed.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from holdfast.errors import NotFound, Refused
from holdfast.fs import calls
from holdfast.setup import targets
from holdfast.setup.edits import HASH, FileEdit, find_block, look, with_block, without_block
from holdfast.setup.json_entries import with_entry, without_entry
from holdfast.setup.targets import HOOK, VERSION, JsonPart, Part, Target, TextPart, parts

FIRST_LINE = b"#!/bin/sh\n"
ASIDE = "pre-commit.before-holdfast"
_SHELLS = (b"sh", b"bash", b"dash", b"ash", b"ksh", b"zsh")
_EXECUTABLE = 0o755


def pre_commit_edits(project: Path, *, remove: bool) -> list[FileEdit]:
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


def _in(hook: FileEdit, aside: FileEdit) -> list[FileEdit]:
    where = str(hook.path)
    chained = aside.before is not None
    if hook.before is not None and not chained and not _takes_a_block(hook):
        moved = aside._replace(after=hook.before, mode=hook.mode)
        return [moved, hook._replace(after=_script(None, where, chained=True), mode=_EXECUTABLE)]
    mode = _EXECUTABLE if hook.before is None else hook.mode
    return [hook._replace(after=_script(hook.before, where, chained=chained), mode=mode)]


def _out(hook: FileEdit, aside: FileEdit) -> list[FileEdit]:
    if hook.before is None:
        return []
    rest = without_block(hook.before, comment=HASH, where=str(hook.path), first_line=FIRST_LINE)
    if rest is None and aside.before is not None:
        return [hook._replace(after=aside.before, mode=aside.mode), aside._replace(after=None)]
    return [hook._replace(after=rest)]


def _script(content: bytes | None, where: str, *, chained: bool) -> bytes:
    text = targets.PRE_COMMIT_CHAIN if chained else targets.PRE_COMMIT
    return with_block(
        content, text, version=targets.VERSION, comment=HASH, where=where, first_line=FIRST_LINE
    )


def _takes_a_block(hook: FileEdit) -> bool:
    """Whether the hook runs, and is a shell script or ours already."""
    content = hook.before or b""
    if find_block(content, comment=HASH, where=str(hook.path)) is not None:
        return True
    first = content.partition(b"\n")[0]
    program = first[2:].split()[-1:] if first.startswith(b"#!") else []
    named = bool(program) and program[0].rpartition(b"/")[2] in _SHELLS
    return named and bool(hook.mode & 0o111)


def edits(project: Path, target: Target, *, remove: bool) -> list[FileEdit]:
    """The changes that set a program up in this project, or that undo it. Nothing is changed yet."""
    if target is Target.GIT:
        return [each for each in pre_commit_edits(project, remove=remove) if each.changes]
    wanted = _resolved(project, target)
    if remove:
        needed = _needed_by_others(project, target)
        wanted = {path: part for path, part in wanted.items() if path not in needed}
    changes = (
        edit._replace(after=_changed(part, edit, remove=remove))
        for part, edit in ((part, look(path)) for path, part in wanted.items())
    )
    return [each for each in changes if each.changes]


def _resolved(project: Path, target: Target) -> dict[Path, Part]:
    """The parts of a program by the files that they are in: of two that lead to one file, the first."""
    found: dict[Path, Part] = {}
    for part in parts(target):
        found.setdefault(_followed(project, part.path), part)
    return found


def _changed(part: Part, edit: FileEdit, *, remove: bool) -> bytes | None:
    where = str(edit.path)
    if isinstance(part, TextPart):
        if remove:
            return edit.after and without_block(edit.after, comment=part.comment, where=where)
        return with_block(edit.after, part.text, version=VERSION, comment=part.comment, where=where)
    text = None if edit.after is None else _text(edit.after, where)
    changed = _without_entries(part, text, where) if remove else _with_entries(part, text, where)
    return None if changed is None else changed.encode()


def _with_entries(part: JsonPart, text: str | None, where: str) -> str | None:
    text = part.new if text is None else text
    for entry in part.entries:
        text = with_entry(text, entry, where=where)
    return text


def _without_entries(part: JsonPart, text: str | None, where: str) -> str | None:
    for entry in reversed(part.entries):
        text = text and without_entry(text, entry, where=where)
    return None if text == part.new else text


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{where} is not UTF-8", hint="Convert it first.", path=where) from None


def _needed_by_others(project: Path, target: Target) -> set[Path]:
    """The files that another program, which is still set up, shares with this one."""
    others = {other: _resolved(project, other) for other in Target if other is not target}
    own = _resolved(project, target).keys()
    return {
        path
        for wanted in others.values()
        if any(path not in own and _is_there(part, look(path)) for path, part in wanted.items())
        for path in wanted
    }


def _is_there(part: Part, edit: FileEdit) -> bool:
    if edit.before is None:
        return False
    try:
        if isinstance(part, TextPart):
            return find_block(edit.before, comment=part.comment, where=str(edit.path)) is not None
        return _changed(part, edit, remove=True) != edit.before
    except Refused:  # another program's file that cannot be understood is no reason to do nothing here
        return HOOK.encode() in edit.before


def _followed(project: Path, relative: str) -> Path:
    """The file itself if the path is a symbolic link (`CLAUDE.md` often is), within the project only."""
    path = project / relative
    for _ in range(8):
        try:
            if not stat.S_ISLNK(calls.stat(path, follow_symlinks=False).st_mode):
                break
        except FileNotFoundError:
            break
        path = Path(os.path.normpath(path.parent / os.fsdecode(calls.readlink(path))))
    if not path.is_relative_to(project):
        raise Refused(
            f"{project / relative} is a link that leads out of the project, to {path}",
            hint="Holdfast changes files of the project only. Put the text there by hand.",
            path=str(path),
        )
    return path
