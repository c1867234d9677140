"""The file edits that set up a program in a project, or that undo the setup.

All edits are planned before the first is applied: if one is refused, nothing has changed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from holdfast.errors import Failure, NotFound, Refused
from holdfast.fs import calls, durable
from holdfast.setup import targets
from holdfast.setup.edits import HASH, MOST_BYTES, FileEdit, find_block, read_unchanged, with_block, without_block
from holdfast.setup.json_entries import with_entry, without_entry
from holdfast.setup.targets import HOOK, PARTS, VERSION, Part, Target, TextPart

SHEBANG = b"#!/bin/sh\n"
MOVED_HOOK = "pre-commit.before-holdfast"
_SHELLS = (b"sh", b"bash", b"dash", b"ash", b"ksh", b"zsh")
_EXECUTABLE = 0o755
_SUPERPROJECT = "superproject-working-tree"


def edits(project: Path, target: Target, *, remove: bool) -> list[FileEdit]:
    """The edits that set up `target` in this project, or that undo it. Changes nothing. All paths are resolved."""
    project = Path(calls.realpath(project))
    if target is Target.GIT:
        planned = _git_edits(project, remove=remove)
    else:
        parts = _parts_by_file(project, target)
        needed = _needed_by_others(project, target) if remove else set[Path]()
        files = {path: part for path, part in parts.items() if path not in needed}
        planned = [_edit(part, read_unchanged(path), remove=remove) for path, part in files.items()]
    return [each for each in planned if each.changes]


def _parts_by_file(project: Path, target: Target) -> dict[Path, Part]:
    """The parts of a program by the file that each goes to; if two go to one file, the first wins."""
    found: dict[Path, Part] = {}
    for part in PARTS[target]:
        found.setdefault(_resolve(project, part.path), part)
    return found


def _resolve(project: Path, relative: str) -> Path:
    """The file behind symbolic links (`CLAUDE.md` often is one); `Refused` outside the project. Its directory may be a
    link too."""
    path = Path(calls.realpath(project / relative))
    if not path.is_relative_to(project):
        raise _leads_out(project / relative, path)
    return path


def _leads_out(path: Path, target: Path) -> Refused:
    return Refused(
        f"{path} cannot be changed: a link or a setting leads out of the project, to {target}",
        hint="Holdfast changes only files of the project. Replace the link with a file or directory of the project, or "
        "add the text by hand.",
        path=str(target),
    )


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
    """The guard as a pre-commit hook, and the merge driver: in git's own files, so that no project file changes."""
    hooks, common = _git_directories(project)
    driver = TextPart("config", targets.MERGE_DRIVER, HASH), TextPart("info/attributes", targets.MERGED, HASH)
    merging = [_edit(part, _git_file(common / part.path), remove=remove) for part in driver]
    return [*_hook_edits(hooks, remove=remove), *merging]


def _git_file(path: Path) -> FileEdit:
    if (real := Path(calls.realpath(path))) != path:
        raise _leads_out(path, real)
    return read_unchanged(path)


def _hook_edits(directory: Path, *, remove: bool) -> list[FileEdit]:
    """A block in the pre-commit hook. A hook that cannot take one is moved aside and called by ours."""
    hook, moved = _git_file(directory / "pre-commit"), _git_file(directory / MOVED_HOOK)
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


def _git_directories(project: Path) -> tuple[Path, Path]:
    """The directories of git's hooks for this project and of its repository. They may be in its working tree or that of
    its superproject, in the repository that has it as a linked worktree, or (hooks) where the user's own configuration
    says. `Refused` if the project itself, whose files may be a stranger's, leads anywhere else."""
    asked = _git(project, "rev-parse", "--path-format=absolute", "--git-path", "hooks", "--git-common-dir", "--git-dir")
    if asked.returncode != 0:
        raise NotFound(
            f"{project} is not in a git repository: {asked.stderr.strip()}",
            hint="Run 'git init' first, or name the project with --project.",
            path=str(project),
        )
    hooks, common, own = (Path(calls.realpath(line)) for line in asked.stdout.splitlines())
    trees = [_git(project, "rev-parse", f"--show-{each}").stdout.strip() for each in ("toplevel", _SUPERPROJECT)]
    trusted = [project, *(Path(calls.realpath(each)) for each in trees if each)]
    if trees[0] and own.parent == common / "worktrees":  # the repository must know this linked worktree
        with contextlib.suppress(Failure):
            linked = durable.read(own / "gitdir", limit=MOST_BYTES).decode("utf-8", "surrogateescape").strip()
            if calls.realpath(own / linked) == calls.realpath(os.path.join(trees[0], ".git")):
                trusted.append(common)
    scope = _git(project, "config", "--show-scope", "--get", "core.hooksPath").stdout.partition("\t")[0]
    if scope not in ("global", "system") and not any(hooks.is_relative_to(each) for each in trusted):
        raise _leads_out(project / ".git/hooks", hooks)
    if not any(common.is_relative_to(each) for each in trusted):
        raise _leads_out(project / ".git", common)
    return hooks, common


def _git(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(project), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotFound("git is not installed", hint="Install git.") from None


def _script(content: bytes | None, where: str, *, chained: bool) -> bytes:
    text = targets.PRE_COMMIT_CHAIN if chained else targets.PRE_COMMIT
    return with_block(content, text, version=VERSION, comment=HASH, where=where, first_line=SHEBANG)


def _takes_block(hook: FileEdit) -> bool:
    """Whether the hook already has our block, or is an executable shell script."""
    content = hook.before or b""
    if find_block(content, comment=HASH, where=str(hook.path)) is not None:
        return True
    first = content.partition(b"\n")[0]
    program = first[2:].split()[-1:] if first.startswith(b"#!") else []
    is_shell = bool(program) and program[0].rpartition(b"/")[2] in _SHELLS
    return is_shell and bool(hook.mode & 0o111)
