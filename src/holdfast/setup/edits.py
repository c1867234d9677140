"""File edits, planned first and then applied, and marked blocks in text files.

Each file is replaced in one step and keeps its mode. A file that is already up to date is left alone.
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
from holdfast.fs.directory import failing_to, make_directories

MOST_BYTES = 4 << 20
_OUR_DIRECTORIES = (".claude", ".codex", ".cursor")


class FileEdit(NamedTuple):
    """The content of one file, before and after; None if the file does not exist."""

    path: Path
    before: bytes | None
    after: bytes | None
    mode: int = 0o644

    @property
    def changes(self) -> bool:
        return self.before != self.after


def read_unchanged(path: Path) -> FileEdit:
    try:
        with failing_to("read", path):
            content = durable.read(path, limit=MOST_BYTES)
            mode = stat.S_IMODE(calls.stat(path).st_mode)
    except (FileNotFoundError, NotFound):
        return FileEdit(path, None, None)
    return FileEdit(path, content, content, mode)


def apply(project: Path, changes: Iterable[FileEdit]) -> None:
    """Apply the edits. Directories are created as needed; those of the agents are removed if a removal empties them."""
    for edit in changes:
        directory = edit.path.parent
        if edit.after is None:
            durable.remove(edit.path)
            if directory.parent == project and directory.name in _OUR_DIRECTORIES:
                with contextlib.suppress(OSError):  # it is not empty
                    calls.rmdir(directory)
            continue
        make_directories(directory)
        if edit.before is None:
            durable.create(edit.path, edit.after, mode=edit.mode)
        else:
            durable.replace(edit.path, edit.after, mode=edit.mode)


def summary(changes: Sequence[FileEdit], project: Path) -> list[dict[str, str]]:
    """The path and the action (`create`, `change` or `remove`) of each edit."""

    def summarized(edit: FileEdit) -> dict[str, str]:
        path = edit.path.relative_to(project) if edit.path.is_relative_to(project) else edit.path
        action = "create" if edit.before is None else "remove" if edit.after is None else "change"
        return {"path": str(path), "action": action}

    return list(map(summarized, changes))


class Comment(NamedTuple):
    before: str
    after: str = ""


MARKDOWN = Comment("<!-- ", " -->")
HASH = Comment("# ")


class FoundBlock(NamedTuple):
    start: int
    end: int
    version: int
    flags: tuple[str, ...]  # `alone`: the file was created for it; `joined`: a line break was added before it
    text: str


def with_block(
    content: bytes | None, text: str, *, version: int, comment: Comment, where: str, first_line: bytes = b""
) -> bytes:
    """The content with `text` in a marked block: in place of an existing block, else at the end.

    `content` is None for a new file. With a `first_line`, which a new file starts with, the block goes
    after the first line instead.
    """
    if content is None:
        return first_line + _block(text, version, comment, ("alone",))
    if (found := find_block(content, comment=comment, where=where)) is not None:
        return content[: found.start] + _block(text, version, comment, found.flags) + content[found.end :]
    at = content.find(b"\n") + 1 if first_line and b"\n" in content else len(content)
    joined = at > 0 and content[at - 1 : at] != b"\n"
    return content[:at] + _block(text, version, comment, ("joined",) if joined else ()) + content[at:]


def without_block(content: bytes, *, comment: Comment, where: str, first_line: bytes = b"") -> bytes | None:
    """The content without the block; None if the file was created for it and has nothing else."""
    found = find_block(content, comment=comment, where=where)
    if found is None:
        return content
    rest = content[: found.start] + content[found.end :]
    return None if "alone" in found.flags and rest == first_line else rest


def find_block(content: bytes, *, comment: Comment, where: str) -> FoundBlock | None:
    """The block in this content, or None; `Refused` if the markers do not enclose exactly one block."""
    before, after = re.escape(comment.before.encode()), re.escape(comment.after.encode())
    begin = rb"^%bholdfast:begin v(?P<version>\d{1,9})(?P<flags>[ a-z]*?)%b\r?\n" % (before, after)
    end = rb"^%bholdfast:end%b(?:\r?\n|\Z)" % (before, after)
    begins = list(re.finditer(begin, content, re.MULTILINE))
    ends = list(re.finditer(end, content, re.MULTILINE))
    if not begins and not ends:
        return None
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise Refused(
            f"{where} cannot be changed: its Holdfast markers do not enclose one block",
            hint="Repair the markers by hand, or delete them with the text between them, and try again.",
            path=where,
        )
    flags = tuple(begins[0]["flags"].decode().split())
    start = begins[0].start()
    start -= "joined" in flags and content[:start].endswith(b"\n")
    text = content[begins[0].end() : ends[0].start()].decode("utf-8", "replace")
    return FoundBlock(start, ends[0].end(), int(begins[0]["version"]), flags, text)


def _block(text: str, version: int, comment: Comment, flags: tuple[str, ...]) -> bytes:
    words = " ".join(("holdfast:begin", f"v{version}", *flags))
    begin, end = (f"{comment.before}{each}{comment.after}\n" for each in (words, "holdfast:end"))
    body = text.strip("\n") + "\n"
    return (("\n" if "joined" in flags else "") + begin + body + end).encode()
