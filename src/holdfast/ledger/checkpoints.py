"""Checkpoints: the saved states of folds, so that the next fold need not start at the first event.

A checkpoint is a cache. It names the event that it follows by a digest, and carries a digest of itself: if it
is torn, of another form, or of another ledger, it is ignored. So it is written without a sync, may be deleted
at any time, and decides nothing but how long a replay takes.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Failure
from holdfast.fs import durable, strictjson
from holdfast.fs.directory import Directory, make_directories
from holdfast.fs.names import safe_name

if TYPE_CHECKING:
    from holdfast.ledger.log import Event

FORMAT = 1
DIRECTORY = ".holdfast/checkpoints"
"""The directory of the checkpoint files, below the root."""


class Checkpoint(NamedTuple):
    """The state of the fold `name` after the event `sequence`, whose digest is `event`."""

    name: str
    version: str
    sequence: int
    event: str
    state: Any


def load(root: Path, name: str, version: str) -> Checkpoint | None:
    """The checkpoint of a fold, if there is one that is whole and of this version."""
    try:
        with Directory.open(root / DIRECTORY) as directory:
            content = durable.read_in(directory, _file(name))
        value = strictjson.decode(content.removesuffix(b"\n"))
        record = value["checkpoint"]
        if value["digest"] != _digest(strictjson.encode(record)) or record.get("format") != FORMAT:
            return None
        names = (str(record["name"]), str(record["version"]))
        found = Checkpoint(*names, int(record["sequence"]), str(record["event"]), record["state"])
    except (Failure, KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if names == (name, version) and found.sequence > 0 else None


def save(root: Path, checkpoint: Checkpoint) -> None:
    """Save a checkpoint; nothing happens if it cannot be written, or its state cannot be encoded."""
    with contextlib.suppress(Failure, OSError):
        file = _file(checkpoint.name)
        content = strictjson.encode({"format": FORMAT, **checkpoint._asdict()})
        whole = b'{"digest":"' + _digest(content).encode() + b'","checkpoint":' + content + b"}\n"
        make_directories(root / DIRECTORY)
        with Directory.open(root / DIRECTORY) as directory:
            draft = durable.write_draft(directory, file, whole, durable=False)
            durable.publish(directory, draft, file)


def digest_of(event: Event) -> str:
    return _digest(strictjson.encode(event))


def _file(name: str) -> str:
    return f"{safe_name(name, what='name of a fold')}.json"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
