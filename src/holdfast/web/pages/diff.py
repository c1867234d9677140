"""The diff of any two snapshots, or of a snapshot and a worktree: coloured, folded per file, and bounded."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Any

from holdfast.fs.names import counted
from holdfast.repository.compare import Comparison, Patch
from holdfast.trees.manifest import escaped
from holdfast.trees.results import Change
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import Page, PageRequest, empty, section, table

MOST_FILES, MOST_LINES, MOST_COLOURED = 200, 2_000, 4_000  # files; lines of one file; lines of all files
LONGEST_LINE = 2_000
_KINDS = {"+": "add", "-": "del", "@": "hunk"}
_CLASSES = (
    ("Keyword", "k"),
    ("Literal.String", "s"),
    ("Comment", "c"),
    ("Literal.Number", "m"),
    ("Name.Function", "f"),
    ("Name.Class", "f"),
    ("Name.Decorator", "f"),
)


def diff_page(asked: PageRequest) -> Page:
    query = asked.query
    worktree = query.get("worktree") or "main"
    old, new = query.get("old") or None, query.get("new") or None
    with asked.workspace.repository() as repository:
        found = repository.snapshots.compare(worktree, old, new)
        patches = list(islice(repository.snapshots.patches(found), MOST_FILES))
    coloured = _Colours()
    files = [_file(each, coloured, opened=len(patches) <= 12) for each in patches]
    shown = {each.change.path for each in patches}
    others = [each for each in found.changes if each.path not in shown]
    added, removed = sum(each.added for each in patches), sum(each.removed for each in patches)
    lead = join(
        counted(len(found.changes), "change"),
        " ",
        h("span", f"+{added}", class_="good"),
        " ",
        _minus(removed),
    )
    if not found.changes:
        body: Child = empty("There are no differences.")
    else:
        body = join(files, _others(others))
    words = [*filter(None, (old, new)), "--patch", "--worktree", worktree]
    return Page(_title(found), "worktrees", body, shlex.join(["holdfast", "diff", *words]), lead)


def _minus(count: int) -> Html:
    return h("span", f"\N{MINUS SIGN}{count}", class_="bad")


def _title(found: Comparison) -> str:
    def name(label: str) -> str:
        return label[:8] if len(label) == 16 else label

    return f"{name(found.old.label)} → {name(found.new.label)}"


def _others(changes: list[Change]) -> Html | None:
    """Changes without lines: directories, modes, links; and files beyond the limit."""
    if not changes:
        return None
    rows: list[list[Child]] = [
        [h("code", escaped(each.path) or "."), each.what, ", ".join(each.aspects)] for each in changes[:1000]
    ]
    return section("Other changes", table(("Path", "What", "How"), rows, label="Other changes"), count=len(changes))


def _file(patch: Patch, colours: _Colours, *, opened: bool) -> Html:
    path = escaped(patch.change.path)
    counts = join(h("span", f"+{patch.added}", class_="good"), " ", _minus(patch.removed))
    summary = h("summary", h("code", path), " ", h("span", patch.change.what, class_="dim"), " ", counts)
    if patch.lines is None:
        size = f"{patch.change.size} bytes" if patch.change.size else "not text, or too large"
        return h("details", summary, h("p", f"Not shown: {size}.", class_="dim"), class_="file")
    lines = patch.lines[2:]
    rows = list(_lines(path, lines[:MOST_LINES], colours))
    if len(lines) > MOST_LINES:
        rows.append(h("tr", h("td", f"… and {len(lines) - MOST_LINES} more lines", colspan=3, class_="hunk")))
    code = h(
        "div", h("table", h("tbody", rows), class_="code"), class_="scroll", tabindex=0, role="region", aria_label=path
    )
    return h("details", summary, code, class_="file", open=opened, id=f"file-{path}")


def _lines(path: str, lines: tuple[str, ...], colours: _Colours) -> Iterator[Html]:
    old = new = 0
    for line in lines:
        kind = _KINDS.get(line[:1], "")
        if kind == "hunk":
            old, new = _starts(line)
            yield h("tr", h("td", line, colspan=3), class_="hunk")
            continue
        if line.startswith("\\"):
            yield h("tr", h("td", line, colspan=3), class_="dim")
            continue
        numbers = ("" if kind == "add" else str(old)), ("" if kind == "del" else str(new))
        old, new = old + (kind != "add"), new + (kind != "del")
        text = colours.line(path, line[1 : LONGEST_LINE + 1])
        yield h("tr", [h("td", each, class_="no") for each in numbers], h("td", text), class_=kind or None)


def _starts(line: str) -> tuple[int, int]:
    """The first line numbers of a hunk: `@@ -12,7 +13,8 @@`."""
    words = line.split()
    try:
        return int(words[1].lstrip("-").split(",")[0]), int(words[2].lstrip("+").split(",")[0])
    except (IndexError, ValueError):
        return 0, 0


class _Colours:
    """Colours lines by the language of their file, as long as there are not too many."""

    def __init__(self) -> None:
        self._left = MOST_COLOURED

    def line(self, path: str, text: str) -> Child:
        lexer = _lexer(path)
        if lexer is None or self._left <= 0:
            return text
        self._left -= 1
        return [_token(str(kind), part) for kind, part in lexer.get_tokens(text) if part != "\n"]


def _token(kind: str, text: str) -> Child:
    text = text.removesuffix("\n")
    for name, class_ in _CLASSES:
        if kind.startswith(f"Token.{name}"):
            return h("span", text, class_=class_)
    return text


@functools.lru_cache(maxsize=128)
def _lexer(path: str) -> Any:
    from pygments.lexers import get_lexer_for_filename
    from pygments.util import ClassNotFound

    try:
        return get_lexer_for_filename(path, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None
