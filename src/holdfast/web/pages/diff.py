"""The diff of any two snapshots, or of a snapshot and a worktree: coloured, folded per file, and bounded."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from holdfast.fs.names import counted
from holdfast.repository.compare import Comparison
from holdfast.repository.patches import Patch
from holdfast.trees.manifest import escaped
from holdfast.trees.results import Change
from holdfast.web.html import Child, Html, h, join
from holdfast.web.layout import Page, PageRequest, empty, section, table

MOST_FILES, MOST_LINES = 200, 2_000  # files; lines of one file
MOST_SHOWN, MOST_COLOURED = 2_000_000, 200_000  # characters of all files
MOST_STEPS = 4_000_000  # of comparing the lines of all files, about a second
FEW_FILES = 12  # are unfolded at first
LONGEST_LINE = 2_000
_ROW = 80  # characters that a line counts as, beside its text
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
        shown = _shown(repository.snapshots.patches(found, steps=MOST_STEPS), len(found.changes) <= FEW_FILES)
    if not found.changes:
        body: Child = empty("There are no differences.")
    else:
        body = join(shown.files, _others([each for each in found.changes if each.path not in shown.paths]))
    counts = h("span", f"+{shown.added}", class_="good"), " ", _minus(shown.removed)
    words = [*filter(None, (old, new)), "--patch", "--worktree", worktree]
    return Page(
        _title(found),
        "worktrees",
        body,
        shlex.join(["holdfast", "diff", *words]),
        join(counted(len(found.changes), "change"), " ", counts),
        is_final=_is_final(found, old, new),
    )


class _Shown(NamedTuple):
    """The files that are shown with their lines."""

    files: list[Html]
    paths: set[bytes]
    added: int
    removed: int


def _shown(patches: Iterable[Patch], opened: bool) -> _Shown:
    """The files, as many as a page can have. Only one patch at a time is in memory."""
    files, paths, added, removed = list[Html](), set[bytes](), 0, 0
    limits = _Limits()
    for each in patches:
        files.append(_file(each, limits, opened=opened))
        paths.add(each.change.path)
        added, removed = added + each.added, removed + each.removed
        if len(files) == MOST_FILES or limits.shown <= 0:
            break
    return _Shown(files, paths, added, removed)


def _is_final(found: Comparison, old: str | None, new: str | None) -> bool:
    """Whether the page never changes: both sides are snapshots that the address names by their ids."""
    return (old, new) == (found.old.label, found.new.label) and found.new.descriptor is not None


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


def _file(patch: Patch, limits: _Limits, *, opened: bool) -> Html:
    path = escaped(patch.change.path)
    counts = join(h("span", f"+{patch.added}", class_="good"), " ", _minus(patch.removed))
    summary = h("summary", h("code", path), " ", h("span", patch.change.what, class_="dim"), " ", counts)
    if patch.lines is None:
        size = f"{patch.change.size} bytes" if patch.change.size else "not text, or too large"
        return h("details", summary, h("p", f"Not shown: {size}.", class_="dim"), class_="file")
    lines = patch.lines[2:]
    rows = list(_lines(path, lines[:MOST_LINES], limits))
    if len(lines) > len(rows):
        rows.append(h("tr", h("td", f"… and {len(lines) - len(rows)} more lines", colspan=3, class_="hunk")))
    code = h(
        "div", h("table", h("tbody", rows), class_="code"), class_="scroll", tabindex=0, role="region", aria_label=path
    )
    return h("details", summary, code, class_="file", open=opened, id=f"file-{path}")


def _lines(path: str, lines: tuple[str, ...], limits: _Limits) -> Iterator[Html]:
    old = new = 0
    for line in lines:
        if not limits.allow(line):
            return
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
        text = limits.coloured(path, line[1 : LONGEST_LINE + 1])
        yield h("tr", [h("td", each, class_="no") for each in numbers], h("td", text), class_=kind or None)


def _starts(line: str) -> tuple[int, int]:
    """The first line numbers of a hunk: `@@ -12,7 +13,8 @@`."""
    words = line.split()
    try:
        return int(words[1].lstrip("-").split(",")[0]), int(words[2].lstrip("+").split(",")[0])
    except (IndexError, ValueError):
        return 0, 0


class _Limits:
    """The number of characters that the page may still show and colour; each line counts for a few extra."""

    def __init__(self) -> None:
        self.shown, self._coloured = MOST_SHOWN, MOST_COLOURED

    def allow(self, line: str) -> bool:
        """Count a line that is shown; False if there is no room for it."""
        self.shown -= min(len(line), LONGEST_LINE) + _ROW
        return self.shown > 0

    def coloured(self, path: str, text: str) -> Child:
        """The line in colours, by the language of its file, as long as there are not too many."""
        lexer = _lexer(path)
        if lexer is None or self._coloured <= 0:
            return text
        self._coloured -= len(text) + 1
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
