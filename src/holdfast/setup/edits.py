"""Changes of files: worked out first, then made, each file in one step.

A file keeps its mode, and is left alone if it is right already.
"""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import NotFound, Refused
from holdfast.fs import calls, durable
from holdfast.fs.directory import make_directories

MOST_BYTES = 4 << 20
_OUR_DIRECTORIES = (".claude", ".codex", ".cursor")


class FileEdit(NamedTuple):
    """One file, before and after; None where there is none."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int = 0o644

    @property
    def changes(self) -> bool:
        return self.before != self.after


def look(path: Path) -> FileEdit:
    """A file as it is, with no change to it yet."""
    try:
        mode = stat.S_IMODE(calls.stat(path).st_mode)
        content = durable.read(path, limit=MOST_BYTES)
    except (FileNotFoundError, NotFound):
        return FileEdit(path, None, None)
    return FileEdit(path, content, content, mode)


def apply(project: Path, changes: Iterable[FileEdit]) -> None:
    """Make the changes, each file in one step; directories that were made for them go with them."""
    for edit in changes:
        if edit.after is None:
            durable.remove(edit.path)
            _remove_if_empty(project, edit.path.parent)
            continue
        make_directories(edit.path.parent)
        if edit.before is None:
            durable.create(edit.path, edit.after, mode=edit.mode)
        else:
            durable.replace(edit.path, edit.after, mode=edit.mode)


def _remove_if_empty(project: Path, directory: Path) -> None:
    if directory.parent == project and directory.name in _OUR_DIRECTORIES:
        with contextlib.suppress(OSError):
            calls.rmdir(directory)


def summary(changes: Sequence[FileEdit], project: Path) -> list[dict[str, str]]:
    """What will be or was done to which file, for people and programs."""
    return [
        {
            "path": str(edit.path.relative_to(project) if edit.path.is_relative_to(project) else edit.path),
            "action": "create" if edit.before is None else "remove" if edit.after is None else "change",
        }
        for edit in changes
    ]


class Comment(NamedTuple):
    """How a kind of file marks a comment."""

    before: str
    after: str = ""


MARKDOWN = Comment("<!-- ", " -->")
HASH = Comment("# ")


class FoundBlock(NamedTuple):
    """Where a block is, what it says, and what else belongs to it."""

    start: int
    end: int
    version: int
    text: str
    alone: bool


def with_block(
    content: bytes | None,
    text: str,
    *,
    version: int,
    comment: Comment,
    where: str,
    first_line: bytes = b"",
) -> bytes:
    """The content with the block in it: at its place if it is there already, else at the end.

    `content` is None if there is no such file; `text` is what stands between the markers. With a
    `first_line` (which a new file begins with) the block goes behind the first line instead.
    """
    if content is None:
        return first_line + _block(text, version, comment, ("alone",))
    found = find_block(content, comment=comment, where=where)
    if found is not None:
        flags = _flags(content[found.start : found.end], comment)
        return content[: found.start] + _block(text, version, comment, flags) + content[found.end :]
    at = content.find(b"\n") + 1 if first_line and b"\n" in content else len(content)
    joined = at > 0 and content[at - 1 : at] != b"\n"
    return content[:at] + _block(text, version, comment, ("joined",) if joined else ()) + content[at:]


def without_block(content: bytes, *, comment: Comment, where: str, first_line: bytes = b"") -> bytes | None:
    """The content without the block: None if the file was ours and nothing else is in it."""
    found = find_block(content, comment=comment, where=where)
    if found is None:
        return content
    rest = content[: found.start] + content[found.end :]
    return None if found.alone and rest == first_line else rest


def find_block(content: bytes, *, comment: Comment, where: str) -> FoundBlock | None:
    """The block in this content, or None; markers that do not make exactly one block are refused."""
    begins = list(_begin(comment).finditer(content))
    ends = list(_end(comment).finditer(content))
    if not begins and not ends:
        return None
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise Refused(
            f"the markers of Holdfast in {where} do not make one whole block",
            hint="Put the markers right by hand, or delete them with what is between them; then try again.",
            path=where,
        )
    begin, end = begins[0], ends[0]
    flags = begin["flags"].split()
    joined = b"joined" in flags and content[: begin.start()].endswith(b"\n")
    text = content[begin.end() : end.start()].decode("utf-8", "replace")
    return FoundBlock(begin.start() - joined, end.end(), int(begin["version"]), text, b"alone" in flags)


def _block(text: str, version: int, comment: Comment, flags: tuple[str, ...]) -> bytes:
    words = " ".join(("holdfast:begin", f"v{version}", *flags))
    lines = [
        f"{comment.before}{words}{comment.after}",
        *text.strip("\n").split("\n"),
        f"{comment.before}holdfast:end{comment.after}",
    ]
    return (("\n" if "joined" in flags else "") + "\n".join(lines) + "\n").encode()


def _flags(block: bytes, comment: Comment) -> tuple[str, ...]:
    begin = _begin(comment).search(block)
    return tuple(begin["flags"].decode().split()) if begin else ()


def _begin(comment: Comment) -> re.Pattern[bytes]:
    before, after = re.escape(comment.before.encode()), re.escape(comment.after.encode())
    return re.compile(
        rb"^%bholdfast:begin v(?P<version>\d+)(?P<flags>[ a-z]*?)%b\r?\n" % (before, after), re.MULTILINE
    )


def _end(comment: Comment) -> re.Pattern[bytes]:
    before, after = re.escape(comment.before.encode()), re.escape(comment.after.encode())
    return re.compile(rb"^%bholdfast:end%b(?:\r?\n|\Z)" % (before, after), re.MULTILINE)
