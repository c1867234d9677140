"""Recovery: finishing the intents of dead processes, whatever other programs did meanwhile.

A program that knows the document locks but not the intents may have changed something since the author died. Recovery
does not overwrite such changes, and they do not block it:

- A line goes to the current end of its stream. Lines that are already in the stream are recognised by their content.
- A document whose draft is gone was published before the other program changed it: that program's change is kept.
- Otherwise both programs changed the same old content, and neither saw the other's change. In documents that other
  programs share, both changes are kept, field by field (`_merged`); where they clash, the other program's wins: its
  author was told that it succeeded. A removal wins, too. Any other document stays as the other program left it.

Each conflict is recorded, with both contents, as an event of the tracker. If a commit has no such events, nothing is
removed, and the intent is set aside for `doctor` to report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import dropwhile
from typing import Any, NamedTuple

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import Corrupt, NotFound, UsageFailure
from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory
from holdfast.store.intents import (
    Intent,
    Intents,
    Prepared,
    Step,
    StepTarget,
    digest,
    end_before,
    lines_of,
    name_draft,
    numbered,
    publish_all,
    read_if_exists,
    together,
)
from holdfast.store.layout import SHARED, Kind, Location, OpenDirectories
from holdfast.store.lines import published_lines, search_from, write_missing
from holdfast.store.merge import Path, merged

_EVENTS = "jit/events"
_INDEX = "jit/index"
_LONGEST_EVENT = 2 << 20  # bytes
_NO_LIMIT = 1 << 40  # bytes: another program's content must not block recovery, however large it is
_SET_BY_EVERY_CHANGE = ("updated_at",)


class Resolution(NamedTuple):
    """The content that a document gets, and the fields that two programs changed differently."""

    content: bytes | None
    clashes: Sequence[str] = ()


class Recovery:
    """Finishes one intent. The caller holds the document locks of everything that it touches."""

    def __init__(self, intents: Intents, opened: OpenDirectories, now: float) -> None:
        self._intents = intents
        self._opened = opened
        self._now = now
        self._events: dict[str, bytes] = {}  # of conflicts, by id
        self._keeps_intent = False

    def finish(self, intent: Intent) -> None:
        """Steps 3 and 4 of `intents`, unless they are done: finished parts are synced again, the rest is applied."""
        if not self._intents.needs_applying(intent):
            return
        publish_all(self._prepared(intent))
        self._intents.discard_drafts(intent, self._opened)
        self._intents.drop(intent, keep=self._keeps_intent)

    def _prepared(self, intent: Intent) -> Iterator[Prepared]:
        numbers: dict[str, int] = {}
        for targets in together(self._intents.targets(intent, self._opened)):
            if targets[0].location.kind is Kind.DOCUMENT:
                yield self._document(targets[0])
            elif targets[0].location.kind is Kind.NUMBERED:
                yield numbered(targets[0], numbers)
            else:
                directory, location, _, _ = targets[0]
                yield Prepared(None, partial(self._write_lines, directory, location, [each.step for each in targets]))

    def _document(self, target: StepTarget) -> Prepared:
        directory, file = target.directory, target.location.file
        published, current = target.was_published(), read_if_exists(directory, file)
        if published and current is None and self._was_deleted(target):
            return Prepared(directory)
        outcome, clashes = resolve(target, current, published=published)
        if clashes:
            self._record(target, current, clashes)
        if outcome == current:
            return Prepared(directory)
        if outcome is None:
            return Prepared(directory, lambda: durable.remove_in(directory, file, durable=False))
        draft, discard = target.draft, lambda: None
        if outcome != target.step.document or read_if_exists(directory, draft) != outcome:
            draft = durable.write_draft(directory, file, outcome)
            discard = partial(durable.discard, directory, draft)
        return Prepared(directory, partial(name_draft, directory, draft, file, is_new=current is None), discard)

    def _was_deleted(self, target: StepTarget) -> bool:
        """Whether a document that does not exist was published and then deleted by another program. After a power cut,
        a missing draft does not prove that; but then, no later step in another directory was published."""
        steps = self._intents.targets(target.intent, self._opened)
        following = dropwhile(lambda each: each.step is not target.step, steps)
        others = (each for each in following if each.directory is not target.directory and each.step.before)
        return any(
            each.was_published() and digest(read_if_exists(each.directory, each.location.file)) != each.step.before
            for each in others
        )

    def _record(self, target: StepTarget, found: bytes | None, clashes: Sequence[str]) -> None:
        name, key = target.step.name, digest(f"{target.intent.id} {target.step.name}".encode())
        event: dict[str, Any] = {
            "type": "change_conflict",
            "id": "-".join((key[:8], key[8:12], key[12:16], key[16:20], key[20:])),
            "issue_id": name.removeprefix("jit/issues/") if name.startswith("jit/issues/") else "",
            "timestamp": format_instant(self._now),
            "document": target.location.path,
            "fields": clashes,
            "decided": _as_json(target.step.document),
            "found": _as_json(found),
            "commit": target.intent.id,
        }
        line = strictjson.encode(event, limit=_NO_LIMIT)
        if _tells_of(target) and (len(line) <= _LONGEST_EVENT or target.step.document is None):
            self._events[event["id"]] = line
        else:
            self._keeps_intent = True

    def _write_lines(self, directory: Directory, location: Location, steps: Sequence[Step]) -> None:
        """Append the lines of one stream that it does not have yet to its current end. The caller holds its lock."""
        after = search_from(directory, location, end_before(steps))
        write_missing(directory, location, after, lines_of(steps))
        if location.name == _EVENTS and self._events:
            untold = {key.encode(): line for key, line in self._events.items()}
            for _, line in published_lines(directory, location, after):
                untold = {key: each for key, each in untold.items() if key not in line}
            if untold:
                durable.append_in(directory, location.file, *untold.values())


def outcome(intents: Intents, intent: Intent, step: Step, opened: OpenDirectories) -> bytes | None:
    """The content of a document once its pending intent is applied. Takes no lock."""
    location = intents.layout.locate(step.name)
    try:
        directory = opened.get(location.directory)
    except NotFound:
        return step.document
    target = StepTarget(directory, location, step, intent)
    published = target.was_published()  # before it is read: it may be published in between
    content = read_if_exists(directory, location.file)
    if content == step.document or digest(content) == step.before:
        return step.document
    if not published and intent in intents.pending():
        return resolve(target, content, published=False).content  # another program has changed it
    return read_if_exists(directory, location.file)  # it has been applied, and perhaps changed again


def resolve(target: StepTarget, current: bytes | None, *, published: bool) -> Resolution:
    """The content of a document once the intent is applied, if it holds `current` now."""
    step, clashes = target.step, list[str]()
    if current == step.document or digest(current) == step.before:
        return Resolution(step.document)
    if published:
        return Resolution(current)  # changed by a program that saw this commit
    if step.document is None and _tells_of(target):
        return Resolution(None, ["*"])
    was_large = step.before and not step.old
    if None in (step.document, current) or not step.name.startswith(SHARED) or (was_large and step.name != _INDEX):
        return Resolution(current, ["*"])
    try:
        contents = step.old.encode() or b"{}", step.content.encode(), current or b""
        old, ours, theirs = (strictjson.decode(each, limit=_NO_LIMIT) for each in contents)
        if was_large:
            old = {"all_ids": _deleted_ids(ours) + _deleted_ids(theirs)}  # other differences are additions
        content = strictjson.encode(_merged(old, ours, theirs, clashes), limit=_NO_LIMIT, string_keys=True)
    except (Corrupt, UsageFailure):
        return Resolution(current, ["*"])
    return Resolution(msgspec.json.format(content, indent=2) + b"\n", clashes)


def _tells_of(target: StepTarget) -> bool:
    """Whether the tracker's events can record a conflict: their lock is held only if the intent appends some."""
    return target.step.name.startswith("jit/") and any(step.name == _EVENTS for step in target.intent.steps)


def _deleted_ids(index: Any) -> list[Any]:
    found = index.get("deleted_ids") if isinstance(index, dict) else None
    return found if isinstance(found, list) else []


def _merged(old: Any, ours: Any, theirs: Any, clashes: list[str]) -> Any:
    """Both changes. Where they clash, theirs wins, and the name of the field is added to `clashes`."""

    def decide(path: Path, ours: Any, theirs: Any) -> Any:
        if path != _SET_BY_EVERY_CHANGE:
            clashes.append(".".join(path))
        return theirs

    return merged(old, ours, theirs, decide)


def _as_json(content: bytes | None) -> object:
    """The content as a JSON value or, if it is not JSON that fits into an event, as text."""
    try:
        value = None if content is None else strictjson.decode(content)
        strictjson.encode([value])  # not nested too deeply
        return value
    except (Corrupt, UsageFailure):
        return (content or b"").decode("utf-8", "backslashreplace")
