"""Many records of one numbered stream in one commit, with as few syncs and calls as there can be.

An intent, as for any commit to several documents (see `intents`); but as records never change once they
are there, three of its steps can be had for less:

1. The intent and all records are written under private names, and brought to the disk by one sync.
2. The intent gets its name, durably. This is the commit point.
3. Each record gets its number, by a rename that replaces nothing; then the names are synced, once.
4. The intent is removed, but not durably: should a power cut bring it back, then whoever comes by finds
   that all it asks for is there, and removes it again. Nobody can have changed that meanwhile.

Who is killed after 2 leaves drafts whose names follow from the intent: who finishes it clears them away.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.fs import calls, durable
from holdfast.fs.directory import Directory, io_failure
from holdfast.store.intents import (
    Intent,
    are_many,
    encode,
    intent_name,
    publish_number,
)
from holdfast.store.layout import Kind
from holdfast.store.plans import Planned


def is_batch(planned: Sequence[Planned]) -> bool:
    """Whether these are records for one and the same numbered stream, and nothing else."""
    place = planned[0].place
    return place.kind is Kind.NUMBERED and all(each.place is place for each in planned)


class Batch:
    """One such commit, in the hands of its author, who holds the guard of the stream."""

    def __init__(
        self, commit_id: str, planned: Sequence[Planned], records: Directory, intents: Directory
    ) -> None:
        """`records` is the directory of the stream, `intents` that of all intents."""
        self._id = commit_id
        self._planned = planned
        self._place = planned[0].place
        self._records = records
        self._intents = intents
        self._drafts: list[str] = []
        self._draft_of_intent = ""

    def write(self) -> None:
        """Step 1."""
        mark, numbered = durable.new_mark(), self._place.numbered
        intent = Intent(self._id, tuple(each.as_step() for each in self._planned), drafts=mark)
        content = encode(intent)
        try:
            bulk = are_many(len(self._planned)) and _on_one_file_system(self._records, self._intents)
            contents = ((numbered(each.at), each.content) for each in self._planned)
            if bulk:
                self._drafts = durable.write_drafts(self._records, contents, mark)
            else:
                for name, record in contents:
                    self._drafts.append(durable.write_draft(self._records, name, record, mark=mark))
            self._draft_of_intent = durable.write_draft(
                self._intents, intent_name(self._id), content, durable=not bulk, mark=mark
            )
            if bulk:
                _sync_file_system(self._records)
        except BaseException:
            self._discard()
            raise

    def decide(self) -> None:
        """Step 2: from here on it will be carried out, by us or by another."""
        draft, self._draft_of_intent = self._draft_of_intent, ""  # published or discarded
        try:
            durable.publish_new(self._intents, draft, intent_name(self._id), often=True)
            durable.sync_names(self._intents, intent_name(self._id))
        except BaseException:
            self._discard()
            raise

    def carry_out(self) -> list[int]:
        """Steps 3 and 4; the numbers that the records have now, in order."""
        numbers: list[int] = []
        numbered, rename = self._place.numbered, durable.rename_new
        number = 0
        try:
            for each, draft in zip(self._planned, self._drafts, strict=True):
                number = max(each.at, number + 1)
                try:
                    done = rename(self._records, draft, numbered(number))
                except FileExistsError:
                    done = False
                if not done:
                    number = publish_number(self._records, self._place, draft, number, each.content)
                numbers.append(number)
        except BaseException:
            self._discard()
            raise
        durable.sync_names(self._records)
        durable.remove_in(self._intents, intent_name(self._id), durable=False)
        return numbers

    def _discard(self) -> None:
        """Leave nothing behind; drafts that were published have another name by now."""
        if self._draft_of_intent:
            durable.discard(self._intents, self._draft_of_intent)
        for draft in self._drafts:
            durable.discard(self._records, draft)


def _on_one_file_system(one: Directory, other: Directory) -> bool:
    if one.fd is None or other.fd is None:
        return False
    try:
        return calls.fstat(one.fd).st_dev == calls.fstat(other.fd).st_dev
    except OSError as error:
        raise io_failure("look at", one.shown, error) from error


def _sync_file_system(directory: Directory) -> None:
    try:
        calls.sync_filesystem(directory.fd or 0)
    except OSError as error:
        raise io_failure("sync the file system of", directory.shown, error) from error
