"""The content of a plain home in a content store: sending it before a publish, and fetching it when a tree is not here.

The publisher and the collector (`content_sweep`) meet in one document, `jvs/content`. Sending a snapshot:

1. An upload document protects what is about to be stored.
2. Read the epoch, and which chunks are condemned. Store the chunks that are missing or condemned, and the chunk list.
3. The publishing transaction compares the epoch, deletes the upload document, and puts the hash of the chunk list into
   the descriptor. **Commit point.** If the epoch has changed, start over at 1.

`docs/decisions/0022-content-of-plain-homes.md` explains why no chunk of a visible snapshot is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast.clock import format_instant
from holdfast.errors import AlreadyExists, Corrupt, Failure, NotFound
from holdfast.repository.context import DESCRIPTORS, RepositoryContext
from holdfast.repository.history import reading
from holdfast.repository.payloads import scratch
from holdfast.store.content import POSTGRES, ChunkName, ContentStore, hash_in
from holdfast.store.model import (
    Change,
    Create,
    Decision,
    Delete,
    Family,
    Instant,
    Key,
    Replace,
    SafeName,
    StructCodec,
    View,
)
from holdfast.store.open import open_content
from holdfast.trees.chunks import (
    CHUNK_LIST,
    ChunkList,
    hash_of,
    is_large,
    pieces_of,
    segments,
    stored_files,
)
from holdfast.trees.manifest import Manifest
from holdfast.trees.rebuild import rebuild
from holdfast.trees.shared_dirs import Stored
from holdfast.trees.walker import synced

UPLOAD_TTL = 24 * 3600.0  # how long an upload protects its chunks; after that, some may have to be sent again
_BATCH_CHUNKS, _BATCH_BYTES = 256, 4 << 20
_MOST_ANCESTORS = 100
_CHUNKS_AT_ONCE = 8

Published = TypeVar("Published")


class ContentState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that publishers and the collector share. The epoch rises whenever chunks are condemned; once that is
    `decided`, they are deleted, and nobody takes it back."""

    epoch: int = 0
    condemned: tuple[ChunkName, ...] = ()
    decided: bool = False


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Protects the chunks whose names end in its id, until it expires."""

    upload_id: SafeName
    snapshot_id: SafeName
    until: Instant
    holder_id: str


CONTENT: Key[ContentState] = Key("jvs/content", StructCodec(ContentState))
UPLOADS: Family[UploadRecord] = Family("jvs/uploads", StructCodec(UploadRecord), id_field="upload_id")


class EpochChanged(Exception):
    """Chunks were condemned since the upload looked for missing ones."""


def state_in(view: View) -> ContentState:
    return view.get(CONTENT) or ContentState()


class Contents:
    """The content store of one repository. It is contacted when it is first used."""

    def __init__(self, context: RepositoryContext, address: str) -> None:
        self.context, self.address = context, address

    @cached_property
    def store(self) -> ContentStore:
        if self.address != POSTGRES:
            require_approved(self.context.paths.root, self.address)
        return open_content(self.address, self.context.store)

    # --- Reading -----------------------------------------------------------------------------------

    def chunks(self, hashes: Collection[str], known: Mapping[str, Sequence[str]] | None = None) -> dict[str, bytes]:
        """The chunks with these hashes, each compared with its hash. `known` are their names, if these have been looked
        up; one of them may vanish while another stays."""
        found: dict[str, bytes] = {}
        for again in (False, True):
            missing = [each for each in hashes if each not in found]
            is_known = known is not None and not again and known.keys() >= set(missing)
            names = {each: known[each] for each in missing} if known and is_known else self.store.names(missing)
            for choice in range(max(map(len, names.values()), default=0)):
                wanted = [each[choice] for digest, each in names.items() if digest not in found and choice < len(each)]
                for name, data in self.store.get(wanted).items():
                    if hash_of(data) == hash_in(name):
                        found[hash_in(name)] = data
            if len(found) == len(set(hashes)) or again:
                break
        if missing := sorted(set(hashes) - found.keys()):
            message = f"the content store has lost or changed the chunk {missing[0]}"
            hint = "If a machine still has the snapshot: 'holdfast snapshot push ID' there. Or restore a backup."
            raise Corrupt(message, hint=hint, chunks=missing[:100])
        return found

    def joined(self, hashes: Sequence[str]) -> bytes:
        """Chunks one after the other."""
        known, found = self.store.names(set(hashes)), dict[str, bytes]()
        for at in range(0, len(hashes), _CHUNKS_AT_ONCE):
            found |= self.chunks(hashes[at : at + _CHUNKS_AT_ONCE], known)
        return b"".join(found[each] for each in hashes)

    def chunk_list(self, content: str) -> ChunkList:
        found = CHUNK_LIST.decode(self.chunks([content])[content], f"the chunk list {content}")
        if found.schema_version != 1:
            raise Corrupt(f"the chunk list {content} has the unknown version {found.schema_version}")
        return found

    def fetch(self, snapshot_id: str) -> None:
        """Build the tree of a snapshot that is not here, if the store has it. It appears complete or not at all."""
        context = self.context
        base = self._nearest_here(snapshot_id)
        with scratch(context, "fetch", uses=[base] if base else []) as room, reading(context, snapshot_id):
            descriptor = context.descriptor(snapshot_id)
            if descriptor is None or not descriptor.content or context.home.is_here(snapshot_id):
                return
            listed = self.chunk_list(descriptor.content)
            manifest = self.joined([each for segment in listed.manifest for each in segment])
            if hashlib.sha256(manifest).hexdigest() != descriptor.payload_hash:
                raise Corrupt(f"the content store has another manifest for {snapshot_id}", snapshot_id=snapshot_id)
            fields = {"format": 1, "payload_hash": descriptor.payload_hash, "engine": descriptor.engine}
            fields |= {"files": descriptor.files, "bytes": descriptor.bytes}
            beside = self._shareable(base)  # now that our intent names it
            with synced(room.path):
                rebuild(room.tree, manifest, fields, _Source(self, listed), base=beside)
            with contextlib.suppress(AlreadyExists):  # another process was faster
                context.home.publish(room, snapshot_id)

    def _shareable(self, snapshot_id: str | None) -> Path | None:
        """The tree of a snapshot that is here and is not being deleted."""
        found = None if snapshot_id is None else self.context.descriptor(snapshot_id)
        if found is None or found.doomed_by is not None or not self.context.home.is_here(found.snapshot_id):
            return None
        return self.context.paths.tree(found.snapshot_id)

    def _nearest_here(self, snapshot_id: str) -> str | None:
        """The nearest ancestor whose tree is here, to share directories with."""
        found = self.context.descriptor(snapshot_id)
        for _ in range(_MOST_ANCESTORS):
            if found is None or found.parent_id is None:
                return None
            if self.context.home.is_here(found.parent_id):
                return found.parent_id
            found = self.context.descriptor(found.parent_id)
        return None

    # --- Sending -----------------------------------------------------------------------------------

    def sending(
        self, snapshot_id: str, payload_hash: str, parent: str | None, publish: Callable[[Upload], Published]
    ) -> Published:
        """Send the content of a tree that is here, and publish it: `publish` commits the changes of the upload."""
        upload = Upload(self, snapshot_id, payload_hash, parent)
        try:
            while True:
                upload.send()
                with contextlib.suppress(EpochChanged):
                    return publish(upload)
        except BaseException:
            with contextlib.suppress(Failure):
                upload.forget()
            raise

    def send_existing(self, snapshot_id: str, *, again: bool = False) -> bool:
        """Send the content of a visible snapshot whose tree is here; False if its descriptor says that the store has
        it, unless `again`."""
        key = DESCRIPTORS.key(snapshot_id)
        found = self.context.descriptor(snapshot_id)
        if found is None or found.doomed_by is not None or (found.content and not again):
            return False

        def publish(upload: Upload) -> bool:
            def decide(view: View, now: float) -> Decision[bool]:
                current, changes = view.get(key), upload.changes(view)
                if current is None or current.doomed_by is not None:
                    raise NotFound(f"the snapshot {snapshot_id} was deleted meanwhile", snapshot_id=snapshot_id)
                sent = msgspec.structs.replace(current, content=upload.content)
                facts = {"snapshot_id": snapshot_id, "content": upload.content}
                entry = self.context.audit(view, now, "snapshot_sent", **facts)
                return Decision([*changes, Replace(key, sent), entry], True)

            return self.context.store.transact([key, *upload.keys, self.context.trail.stream], decide).result

        return self.sending(snapshot_id, found.payload_hash, None if again else found.parent_id, publish)


class _Source:
    """The chunks of one snapshot, for `rebuild`."""

    def __init__(self, contents: Contents, listed: ChunkList) -> None:
        self._contents, self._listed = contents, listed
        self._names: Mapping[str, Sequence[str]] = {}

    def expect(self, hashes: Collection[str]) -> None:
        self._names = self._contents.store.names(hashes)

    def chunks(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return self._contents.chunks(hashes, self._names)

    def pieces(self, file: str) -> Sequence[str]:
        try:
            return self._listed.large[file]
        except KeyError:
            raise Corrupt(f"a chunk list lacks the file {file}") from None


class Upload:
    """The upload of one snapshot: it may take several attempts, each with an upload document of its own."""

    content = ""

    def __init__(self, contents: Contents, snapshot_id: str, payload_hash: str, parent: str | None) -> None:
        self._contents, self._context = contents, contents.context
        self._snapshot_id, self._payload_hash, self._parent = snapshot_id, payload_hash, parent
        self._ids: list[str] = []
        self._epoch = 0

    @property
    def keys(self) -> list[Key[Any]]:
        """The documents that the publishing transaction must name."""
        return [CONTENT, *(UPLOADS.key(each) for each in self._ids)]

    def changes(self, view: View) -> list[Change]:
        """The changes to publish; raises `EpochChanged` if sent chunks may have been condemned. Pure."""
        if state_in(view).epoch != self._epoch:
            raise EpochChanged
        return self._forgetting(view)

    def _forgetting(self, view: View) -> list[Change]:
        return [Delete(key) for key in map(UPLOADS.key, self._ids) if view.get(key) is not None]

    def forget(self) -> None:
        """Let the collector have the chunks of a failed upload."""
        keys = [UPLOADS.key(each) for each in self._ids]
        self._context.store.transact(keys, lambda view, now: Decision(self._forgetting(view), None))

    def send(self) -> None:
        """Steps 1 and 2."""
        self._begin()
        document = self._context.store.read(CONTENT)
        state = ContentState() if document is None else document.record
        self._epoch, condemned = state.epoch, frozenset(state.condemned)
        tree = self._context.paths.tree(self._snapshot_id)
        manifest = Manifest.read(tree)
        known, large = self._of_parent({hash_in(each) for each in condemned})
        sender = _Sender(self._contents.store, self._ids[-1], condemned, known)
        listed: list[tuple[str, ...]] = []
        digest = hashlib.sha256()
        for segment in segments(manifest):
            digest.update(segment)
            listed.append(tuple(map(sender.add, pieces_of(segment))))
        if digest.hexdigest() != self._payload_hash:
            raise Corrupt(f"{manifest.where} has changed: it has another hash", path=manifest.where)
        with Stored(tree) as stored:
            found = dict(_large_files(manifest, stored, sender, large))
            sender.add_files(manifest, stored)
        self.content = sender.add(CHUNK_LIST.encode(ChunkList(manifest=tuple(listed), large=found)))
        sender.flush()

    def _begin(self) -> None:
        upload_id, context = secrets.token_hex(8), self._context

        def decide(view: View, now: float) -> Decision[None]:
            until, holder_id = format_instant(now + UPLOAD_TTL), context.holder.holder_id
            record = UploadRecord(upload_id=upload_id, snapshot_id=self._snapshot_id, until=until, holder_id=holder_id)
            return Decision([Create(UPLOADS.key(upload_id), record)], None)

        self._ids.append(upload_id)
        context.store.transact([UPLOADS.key(upload_id)], decide)

    def _of_parent(self, condemned: Collection[str]) -> tuple[set[str], Mapping[str, tuple[str, ...]]]:
        """The chunks that the store has because of the parent, except condemned ones; and its large files."""
        context, parent = self._context, self._parent
        found = None if parent is None else context.descriptor(parent)  # after the epoch was read
        if parent is None or found is None or not found.content or not context.home.is_here(parent):
            return set(), {}
        manifest = Manifest.read(context.paths.tree(parent))
        if manifest.payload_hash != found.payload_hash:
            return set(), {}  # damaged
        known = {hash_of(piece) for segment in segments(manifest) for piece in pieces_of(segment)}
        known |= {each.digest for each in stored_files(manifest) if not is_large(each.size)}
        is_needed = any(is_large(each.size) for each in stored_files(manifest))
        large = self._contents.chunk_list(found.content).large if is_needed else {}
        known |= {piece for pieces in large.values() for piece in pieces}
        return known - set(condemned), large


def _large_files(
    manifest: Manifest, stored: Stored, sender: _Sender, known: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The pieces of each large file; only files that the parent does not have are read."""
    for each in stored_files(manifest):
        if is_large(each.size):
            pieces = known.get(each.digest)
            if pieces is None or not sender.has(pieces):
                pieces = tuple(sender.add(piece) for piece in each.read(stored))
            yield each.digest, pieces


class _Sender:
    """Stores the chunks that are missing, in batches."""

    def __init__(self, store: ContentStore, upload_id: str, condemned: frozenset[str], known: set[str]) -> None:
        self._store, self._upload_id, self._condemned, self._known = store, upload_id, condemned, known
        self._missing: set[str] = set()
        self._waiting: dict[str, bytes] = {}
        self._bytes = 0

    def has(self, hashes: Collection[str]) -> bool:
        """Whether the store has all of these chunks."""
        self._known |= self._usable([each for each in hashes if each not in self._known])
        return self._known.issuperset(hashes)

    def add(self, chunk: bytes) -> str:
        """Store a chunk, unless it is there; return its hash."""
        digest = hash_of(chunk)
        if digest not in self._known and digest not in self._waiting:
            if self._bytes + len(chunk) > _BATCH_BYTES or len(self._waiting) >= _BATCH_CHUNKS:
                self.flush()
            self._waiting[digest] = chunk
            self._bytes += len(chunk)
        return digest

    def add_files(self, manifest: Manifest, stored: Stored) -> None:
        """Store the small files of a tree. Only those that the store does not have are read."""
        small = (each for each in stored_files(manifest) if not is_large(each.size))
        unknown = [each for each in small if each.digest not in self._known]
        self._known |= self._usable([each.digest for each in unknown])
        for each in unknown:
            if each.digest not in self._known:
                self.add(b"".join(each.read(stored)))

    def flush(self) -> None:
        here = self._usable([each for each in self._waiting if each not in self._missing])
        missing = {digest: chunk for digest, chunk in self._waiting.items() if digest not in here}
        if missing:
            self._store.put({f"{digest}-{self._upload_id}": chunk for digest, chunk in missing.items()})
        self._known |= self._waiting.keys()
        self._waiting, self._bytes = {}, 0

    def _usable(self, hashes: Collection[str]) -> set[str]:
        """Those that the store has under a name that is not condemned."""
        found = self._store.names(hashes) if hashes else {}
        usable = {digest for digest, names in found.items() if not self._condemned.issuperset(names)}
        self._missing |= set(hashes) - usable
        return usable


# --- Settings -----------------------------------------------------------------------------------------


def approve(root: Path, address: str) -> None:
    from holdfast.store import approvals

    approvals.approve(root, commands=[_text(address)])


def is_approved(root: Path, address: str) -> bool:
    from holdfast.store import approvals

    return address == POSTGRES or all(approvals.are_approved(root, [_text(address)]))


def require_approved(root: Path, address: str) -> None:
    from holdfast.store.approvals import require_command

    require_command(root, _text(address), f"the content store {address}", content=address)


def _text(address: str) -> str:
    return msgspec.json.encode(["content", address]).decode()
