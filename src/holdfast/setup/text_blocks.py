"""A marked block in somebody else's text file, which can be put in, brought up to date and taken out.

Everything outside the markers stays as it is, byte for byte: taking the block out gives back the very
file that was there before. To that end the first marker says what else belongs to the block: `joined`
if the line break before it is ours (the last line had none), `alone` if the file is ours altogether.

    <!-- holdfast:begin v1 joined -->
    ...
    <!-- holdfast:end -->
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.errors import Refused


class Comment(NamedTuple):
    """How a kind of file marks a comment."""

    before: str
    after: str = ""


MARKDOWN = Comment("<!-- ", " -->")
HASH = Comment("# ")


class Found(NamedTuple):
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


def find_block(content: bytes, *, comment: Comment, where: str) -> Found | None:
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
    return Found(begin.start() - joined, end.end(), int(begin["version"]), text, b"alone" in flags)


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
