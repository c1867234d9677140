"""The sweep of a content store: deletes the chunks that no snapshot and no upload needs.

The steps are those of `docs/decisions/0022-content-of-plain-homes.md`. The caller holds the collector's lock.

1. List the names that nothing needs. Uploads are read before descriptors: a publish turns one into the other.
2. Condemn some of them, and raise the epoch: from here on, no publish relies on them.
3. Look again: a publish before 2 has a descriptor by now. What is still needed is no longer condemned; the rest is
   *decided*.
4. Delete it, then empty the list.

A process that finds a list continues with 3, or with 4 if it was decided; it never takes a decision back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.clock import parse_instant
from holdfast.errors import LockConflict
from holdfast.repository.content import CONTENT, UPLOADS, Contents, ContentState, state_in
from holdfast.repository.context import DESCRIPTORS
from holdfast.store.content import hash_in, upload_in
from holdfast.store.model import Change, Create, Decision, Delete, Replace, View
from holdfast.trees.chunks import files_in, is_large

MOST_CONDEMNED = 2000  # names in one document, which every publish reads meanwhile


def sweep(contents: Contents) -> int:
    """Delete the chunks that nothing needs; return how many. After a kill, the next sweep continues."""
    need, deleted = Need(contents), 0
    forget_expired(contents)
    state = current(contents)
    if state.condemned:
        deleted += _finish(contents, need, state)
    need.read()
    garbage = [name for name in contents.store.every_name() if not need.includes(name)]  # 1
    for start in range(0, len(garbage), MOST_CONDEMNED):
        state = _condemn(contents, garbage[start : start + MOST_CONDEMNED])  # 2
        deleted += _finish(contents, need, state)
    return deleted


def _finish(contents: Contents, need: Need, state: ContentState) -> int:
    if not state.decided:
        need.read()
        doomed = tuple(name for name in state.condemned if not need.includes(name))
        state = _change(contents, state, msgspec.structs.replace(state, condemned=doomed, decided=True))  # 3
    contents.store.delete(state.condemned)  # 4
    _change(contents, state, ContentState(epoch=state.epoch))
    return len(state.condemned)


class Need:
    """The chunks that are needed: those of all descriptors, and those that unexpired uploads have stored."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._of_list: dict[str, frozenset[str]] = {}
        self._of_segment: dict[tuple[str, ...], frozenset[str]] = {}
        self._uploads: set[str] = set()
        self._hashes: set[str] = set()

    def read(self) -> None:
        """Read the uploads, then the descriptors. Raises if the needs of a snapshot cannot be read."""
        context = self._contents.context
        now = context.store.now()
        uploads = [document.record for _, document in context.store.scan(UPLOADS)]
        self._uploads = {each.upload_id for each in uploads if parse_instant(each.until) > now}
        found = {document.record.content for _, document in context.store.scan(DESCRIPTORS) if document.record.content}
        self._hashes = set().union(*(self._chunks(each) for each in found if each))

    def includes(self, name: str) -> bool:
        return hash_in(name) in self._hashes or upload_in(name) in self._uploads

    def _chunks(self, content: str) -> frozenset[str]:
        if content not in self._of_list:
            listed = self._contents.chunk_list(content)
            pieces = [piece for each in listed.large.values() for piece in each]
            files = [each for segment in listed.manifest for each in self._files(segment)]
            self._of_list[content] = frozenset([content, *pieces, *files])
        return self._of_list[content]

    def _files(self, segment: tuple[str, ...]) -> Collection[str]:
        """The chunks of a segment of a manifest, and of the small files in it."""
        if segment not in self._of_segment:
            found = files_in(self._contents.joined(segment))
            self._of_segment[segment] = frozenset([*segment, *(digest for digest, size in found if not is_large(size))])
        return self._of_segment[segment]


def current(contents: Contents) -> ContentState:
    document = contents.context.store.read(CONTENT)
    return ContentState() if document is None else document.record


def _condemn(contents: Contents, names: Sequence[str]) -> ContentState:
    before = current(contents)
    if before.condemned:
        raise _other()
    return _change(contents, before, ContentState(epoch=before.epoch + 1, condemned=tuple(names)))


def _change(contents: Contents, before: ContentState, after: ContentState) -> ContentState:
    def decide(view: View, now: float) -> Decision[ContentState]:
        if state_in(view) != before:
            raise _other()
        return Decision([(Create if view.get(CONTENT) is None else Replace)(CONTENT, after)], after)

    return contents.context.store.transact([CONTENT], decide).result


def _other() -> LockConflict:
    return LockConflict("another process is sweeping the content store", hint="Wait until it has finished.")


def forget_expired(contents: Contents) -> None:
    """Delete the documents of expired uploads."""
    store = contents.context.store
    for name, _ in store.scan(UPLOADS):
        key = UPLOADS.key(name)

        def decide(view: View, now: float) -> Decision[None]:
            found = view.get(key)  # noqa: B023 - the transaction ends before the next name
            is_expired = found is not None and parse_instant(found.until) <= now
            changes: list[Change] = [Delete(key)] if is_expired else []  # noqa: B023
            return Decision(changes, None)

        store.transact([key], decide)
