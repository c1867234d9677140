"""Checkpoints: how far a fold has come, so that the next one need not begin at the beginning.

A checkpoint is a cache. It names the event that it stands behind by a digest, and carries a digest of
itself: one that is torn, of another form, or of another ledger is as good as none. So it is written
without a sync, may be deleted at any time, and never decides anything but how long a replay takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast.errors import Failure
from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import safe_name

if TYPE_CHECKING:
    from holdfast.ledger.log import Event

FORMAT = 1
PLACE = ".holdfast/checkpoints"
"""Where the files of checkpoints are, below the root."""


class Checkpoint(NamedTuple):
    """The state of the fold `name` behind the event `sequence`, whose digest is `event`."""

    name: str
    version: str
    sequence: int
    event: str
    state: Any


class CheckpointStore(Protocol):
    """Where checkpoints are kept. What is put there may be gone, or another one, when it is asked for."""

    def load(self, name: str) -> bytes | None: ...

    def save(self, name: str, content: bytes) -> None: ...


class NoCheckpoints:
    """Keeps nothing: every fold begins at the beginning."""

    def load(self, name: str) -> bytes | None:
        return None

    def save(self, name: str, content: bytes) -> None:
        pass


class FileCheckpoints:
    """One file for each checkpoint. What cannot be read or written is left alone: it is a cache."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.path = Path(root) / PLACE

    def load(self, name: str) -> bytes | None:
        with contextlib.suppress(Failure), Directory.open(self.path) as directory:
            return durable.read_in(directory, _file(name))
        return None

    def save(self, name: str, content: bytes) -> None:
        with contextlib.suppress(Failure, OSError):
            make_directories(self.path)
            with Directory.open(self.path) as directory:
                draft = durable.write_draft(directory, _file(name), content, durable=False)
                durable.publish(directory, draft, _file(name))


def _file(name: str) -> str:
    return f"{safe_name(name, what='name of a fold')}.json"


def load(shelf: CheckpointStore, name: str, version: str) -> Checkpoint | None:
    """The checkpoint of a fold, if there is one that is whole and of this version."""
    content = shelf.load(name)
    if content is None:
        return None
    try:
        value = strictjson.decode(content.removesuffix(b"\n"))
        record = value["checkpoint"]
        if value["digest"] != _digest(strictjson.encode(record)):
            return None
        found = Checkpoint(
            str(record["name"]),
            str(record["version"]),
            int(record["sequence"]),
            str(record["event"]),
            record["state"],
        )
    except (Failure, KeyError, TypeError, ValueError):
        return None
    right = record.get("format") == FORMAT and (found.name, found.version) == (name, version)
    return found if right and found.sequence > 0 else None


def save(shelf: CheckpointStore, checkpoint: Checkpoint) -> None:
    """Keep a checkpoint for next time; a state that JSON cannot carry is not kept."""
    record = {"format": FORMAT, **checkpoint._asdict()}
    with contextlib.suppress(Failure):
        content = strictjson.encode(record)
        digest = _digest(content)
        shelf.save(checkpoint.name, b'{"digest":"' + digest.encode() + b'","checkpoint":' + content + b"}\n")


def digest_of(event: Event) -> str:
    """A short name for an event: another event, another name."""
    return _digest(strictjson.encode(event))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
