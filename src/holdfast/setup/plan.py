"""The file edits that set a program up in a project, or undo that.

All edits are planned before the first is applied: if one is refused, nothing has changed.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from holdfast.errors import NotFound, Refused
from holdfast.fs import calls
from holdfast.setup import targets
from holdfast.setup.edits import HASH, FileEdit, find_block, read_unchanged, with_block, without_block
from holdfast.setup.json_entries import with_entry, without_entry
from holdfast.setup.targets import HOOK, PARTS, VERSION, Part, Target, TextPart

SHEBANG = b"#!/bin/sh\n"
MOVED_HOOK = "pre-commit.before-holdfast"
_SHELLS = (b"sh", b"bash", b"dash", b"ash", b"ksh", b"zsh")
_EXECUTABLE = 0o755


def edits(project: Path, target: Target, *, remove: bool) -> list[FileEdit]:
    """The edits that set `target` up in this project, or that undo it. Changes nothing."""
    if target is Target.GIT:
        planned = _git_edits(project, remove=remove)
    else:
        parts = _parts_by_file(project, target)
        needed = _needed_by_others(project, target) if remove else set[Path]()
        files = {path: part for path, part in parts.items() if path not in needed}
        planned = [_edit(part, read_unchanged(path), remove=remove) for path, part in files.items()]
    return [each for each in planned if each.changes]


def _parts_by_file(project: Path, target: Target) -> dict[Path, Part]:
    """The parts of a program by the files that they go to; if two go to one file, the first counts."""
    found: dict[Path, Part] = {}
    for part in PARTS[target]:
        found.setdefault(_resolve(project, part.path), part)
    return found


def _resolve(project: Path, relative: str) -> Path:
    """The file behind symbolic links (`CLAUDE.md` often is one); `Refused` outside the project."""
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
            f"{project / relative} cannot be changed: it is a link that leads out of the project, to {path}",
            hint="Holdfast changes only files of the project. Add the text by hand.",
            path=str(path),
        )
    return path


def _edit(part: Part, edit: FileEdit, *, remove: bool) -> FileEdit:
    where, content = str(edit.path), edit.after
    if isinstance(part, TextPart):
        if remove:
            return edit._replace(after=content and without_block(content, comment=part.comment, where=where))
        text = with_block(content, part.text, version=VERSION, comment=part.comment, where=where)
        return edit._replace(after=text)
    try:
        document = None if content is None else content.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(f"{where} is not UTF-8", hint="Convert it first.", path=where) from None
    if remove:
        for entry in reversed(part.entries):
            document = document and without_entry(document, entry, where=where)
        document = None if document == part.new else document
    else:
        document = part.new if document is None else document
        for entry in part.entries:
            document = with_entry(document, entry, where=where)
    return edit._replace(after=None if document is None else document.encode())


def _needed_by_others(project: Path, target: Target) -> set[Path]:
    """The files that this program shares with others that are still set up."""
    own = _parts_by_file(project, target).keys()
    others = [_parts_by_file(project, other) for other in Target if other is not target]
    return {
        path
        for files in others
        if any(path not in own and _is_set_up(part, read_unchanged(path)) for path, part in files.items())
        for path in files
    }


def _is_set_up(part: Part, edit: FileEdit) -> bool:
    if edit.before is None:
        return False
    try:
        if isinstance(part, TextPart):
            return find_block(edit.before, comment=part.comment, where=str(edit.path)) is not None
        return _edit(part, edit, remove=True).changes
    except Refused:  # an unreadable file of another program must not stop this one
        return HOOK.encode() in edit.before


def _git_edits(project: Path, *, remove: bool) -> list[FileEdit]:
    """A block in the pre-commit hook. A hook that cannot take one is moved aside and called by ours."""
    directory = _hooks_directory(project)
    hook, moved = read_unchanged(directory / "pre-commit"), read_unchanged(directory / MOVED_HOOK)
    where = str(hook.path)
    if remove:
        if hook.before is None:
            return []
        rest = without_block(hook.before, comment=HASH, where=where, first_line=SHEBANG)
        if rest is None and moved.before is not None:
            return [hook._replace(after=moved.before, mode=moved.mode), moved._replace(after=None)]
        return [hook._replace(after=rest)]
    if hook.before is not None and moved.before is None and not _takes_block(hook):
        aside = moved._replace(after=hook.before, mode=hook.mode)
        return [aside, hook._replace(after=_script(None, where, chained=True), mode=_EXECUTABLE)]
    script = _script(hook.before, where, chained=moved.before is not None)
    return [hook._replace(after=script, mode=_EXECUTABLE if hook.before is None else hook.mode)]


def _hooks_directory(project: Path) -> Path:
    """Where git looks for the hooks of this project, whatever its configuration says."""
    command = ["git", "-C", str(project), "rev-parse", "--path-format=absolute", "--git-path", "hooks"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotFound("git is not installed", hint="Install git.") from None
    if found.returncode != 0:
        raise NotFound(
            f"{project} is not in a git repository: {found.stderr.strip()}",
            hint="Run 'git init' first, or name the project with --project.",
            path=str(project),
        )
    return Path(found.stdout.strip())


def _script(content: bytes | None, where: str, *, chained: bool) -> bytes:
    text = targets.PRE_COMMIT_CHAIN if chained else targets.PRE_COMMIT
    return with_block(content, text, version=VERSION, comment=HASH, where=where, first_line=SHEBANG)


def _takes_block(hook: FileEdit) -> bool:
    """Whether the hook has our block already, or is an executable shell script."""
    content = hook.before or b""
    if find_block(content, comment=HASH, where=str(hook.path)) is not None:
        return True
    first = content.partition(b"\n")[0]
    program = first[2:].split()[-1:] if first.startswith(b"#!") else []
    is_shell = bool(program) and program[0].rpartition(b"/")[2] in _SHELLS
    return is_shell and bool(hook.mode & 0o111)
