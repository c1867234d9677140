"""Capture of a directory as a tree: its payload, its manifest, and last the mark that both are complete.

The steps have the numbers of docs/protocols/snapshot-trees.md. Nothing is synced or visible to others: the caller syncs
once and publishes the tree by renaming it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.errors import ConsistencyUnavailable, EngineUnavailable, Failure, NotFound
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import Directory, failing_to, opened, parent_of
from holdfast.trees.capture_directories import CapturedDirectory, DirectoryCapture, SourceWatch, start_scan_worker
from holdfast.trees.capture_files import Base, CaptureStats, RecentFile
from holdfast.trees.copy import hash_file
from holdfast.trees.engines import (
    Engine,
    choose_engine,
    cleans_each_file,
    clone_whole,
    close_clone,
    differing,
    is_whole,
    times_tell,
)
from holdfast.trees.manifest import (
    HOMES,
    MANIFEST,
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    raw_entries,
    write_manifest,
)
from holdfast.trees.payload import READ, EarlySync, Payload
from holdfast.trees.results import Captured
from holdfast.trees.scan import (
    UNTIMED,
    Progress,
    StatCache,
    append_to_cache,
    marks_by_name,
    scan_directory,
    write_cache,
)
from holdfast.trees.shared_dirs import Stored, link_or_copy_file, write_file, write_shared_directories
from holdfast.trees.walker import DIRECTORY, GONE, TreeWalker, joined, remove_tree, shown, unreadable, writing

_CLOCK_STEP = 0.02
_MANY_OBJECTS = 100_000
_MOST_CHANGES = 100
_MOST_NAMED = 5
_WORTH_SYNCING_EARLY = 256  # new directories
_SAMPLED_DIRECTORIES, _SAMPLED_FILES, _SAMPLED_BYTES = 32, 128, 4 << 20  # of the base, compared with every capture
_MOST_CLEANED = 1000  # files


def capture_best(
    source: Path,
    tree: Path,
    *,
    beside: Path,
    wanted: Engine | str | None = None,
    base: Path | None = None,
    cache: Path | None = None,
    quiesced: bool,
    progress: Progress | None = None,
) -> Captured:
    """Capture `source` as the new tree `tree`, which will be stored on the filesystem of `beside`.

    Uses the `wanted` engine or fails; by default the best one. If that turns out not to work, the next best is used.
    """
    engine = choose_engine(source, beside, wanted)
    try:
        return capture(source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress)
    except EngineUnavailable:
        if wanted is not None:
            raise
    remove_tree(tree)
    engine = choose_engine(source, beside, but=engine)
    return capture(source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress)


def capture(
    source: Path,
    tree: Path,
    *,
    engine: Engine,
    base: Path | None = None,
    cache: Path | None = None,
    quiesced: bool,
    progress: Progress | None = None,
) -> Captured:
    """Capture the directory `source` as the new tree `tree`: `payload/`, `manifest`, and last `.READY`.

    `base` is the tree of another snapshot in the same directory: unchanged directories are shared with it; in others,
    unchanged files are hard-linked. `cache` is the stat cache of the source; it is updated. With `quiesced`, the tree
    holds the source as of one instant, or `ConsistencyUnavailable` is raised; without, each file is as it was at some
    instant. On failure, the caller removes the tree.
    """
    with ExitStack() as stack:
        stack.enter_context(_rare_garbage_collection())
        walker = stack.enter_context(TreeWalker(source))
        return _Capture(stack, walker, tree, engine, quiesced=quiesced).run(base, cache, CaptureStats(progress))


class _Capture:
    def __init__(self, stack: ExitStack, source: TreeWalker, tree: Path, engine: Engine, *, quiesced: bool) -> None:
        self.stack, self.source, self.tree, self.engine, self.quiesced = stack, source, tree, engine, quiesced
        self.device = source.root_status().st_dev
        self.captured: list[CapturedDirectory] = []
        self.base: Base | None = None
        self._early_sync: EarlySync | None = None
        self._clock_offset = _clock_offset()
        self._until_sync = _MOST_CLEANED if cleans_each_file(source.root) else 0

    def run(self, base: Path | None, cache: Path | None, stats: CaptureStats) -> Captured:
        now = _make_tree(self.tree)  # 1. the tree, and the time by the clock of its filesystem
        now = now if times_tell(Path(self.source.root), self.tree) else UNTIMED
        clones_later = self.engine is Engine.JUICEFS_CLONE and self.quiesced
        frozen = is_whole(self.engine) and not clones_later
        scanned = self._clone() if frozen else self.source  # 2. clone everything at once, if the engine does
        watch = SourceWatch(self.source.root) if self.quiesced and not frozen else None
        if watch is not None:
            self.stack.enter_context(watch)
        if now == UNTIMED or (self.engine is Engine.JUICEFS_CLONE and frozen):
            cache = None  # in the second case, it has the inodes of the source, not those of the clone
        if is_whole(self.engine) or self.engine is Engine.COPY:
            base = None  # nothing is linked from it
        worker = None
        if base is not None or is_whole(self.engine):
            worker = start_scan_worker(self.stack, scanned, cache, watch)
        self.base = None if base is None else self._open_base(base)
        known = StatCache.read(cache, self.device)
        payload = None if is_whole(self.engine) else Payload(self.tree / PAYLOAD)
        if payload is not None:
            self.stack.enter_context(payload)
        directories = DirectoryCapture(
            scanned,
            cache=known,
            stats=stats,
            payload=payload,
            base=self.base,
            watch=watch,
            worker=worker,
            now=now,
            clones=self.engine is Engine.REFLINK,
            retry=not self.quiesced,
            clean=None if frozen or now == UNTIMED else self._clean,
        )
        self.captured += directories.capture_all()  # 3. every directory: shared as a whole, or read
        if not self.captured:
            raise NotFound(f"there is no directory {self.source.root}", path=self.source.root)
        if clones_later:
            stats.changed += differing(self._clone(), ((each.encoded, each.body) for each in self.captured))
        if watch is not None:
            self._require_no_change(watch, stats)  # 4. everything was so at one instant
        self._sync_early()
        payload_hash = self._write_manifest()  # 5. the manifest and the list of shared directories
        if cache is not None:
            self._update_cache(cache, known)  # 6. what the next capture does not read
        self._finish_payload(payload)  # 7. the attributes of directories
        counts = stats.files, stats.directories, stats.bytes, stats.stored_bytes
        not_preserved, special = tuple(sorted(stats.not_preserved)), tuple(sorted(stats.special))
        damaged = () if self.base is None else tuple(shown(os.fsdecode(each)) or "." for each in self.base.damaged)
        result = Captured(self.engine, payload_hash, *counts, not_preserved, special, damaged)
        self._write_ready(result)  # 8. complete
        return result

    def _clean(self, reading: int) -> None:
        """Let later writes to a file through a mapping change its times: the system notices those to clean pages only.

        It cleans a page when it begins to write it to the disk. For many files one sync of all is cheaper.
        """
        if self._until_sync < 0:
            return
        self._until_sync -= 1
        with failing_to("sync", self.source.root):
            if self._until_sync < 0:
                calls.sync_filesystem(self.source.top())
            else:
                calls.start_writing(reading, 0, 0)

    def _clone(self) -> TreeWalker:
        """Clone the source as a whole; return the clone, which no longer changes."""
        payload = self.tree / PAYLOAD
        clone_whole(self.engine, self.source.root, os.fspath(payload))
        return self.stack.enter_context(TreeWalker(payload))

    def _open_base(self, base: Path) -> Base | None:
        """The base; None if it is damaged or on another filesystem."""
        try:
            stored = self.stack.enter_context(Stored(base))
            with parent_of(self.tree / PAYLOAD) as (here, _):
                if calls.fstat(stored.own.top()).st_dev != calls.fstat(here).st_dev:
                    return None
            manifest = Manifest.read(base)
            return Base(manifest, stored, frozenset(_damaged_sample(manifest, stored)))
        except (Failure, OSError, ValueError, struct.error):
            return None

    def _require_no_change(self, watch: SourceWatch, stats: CaptureStats) -> None:
        """Refuse a source that changed since the capture began.

        The watch reports changes after the scan; an earlier change left a time that is not older than the beginning.
        Where one of the two is not reliable, scan again.
        """
        everything = stats.any_recent or abs(_clock_offset() - self._clock_offset) > _CLOCK_STEP
        if not stats.changed:
            again = (each for each in self.captured if everything or not each.watched)
            scan_again(self.source, again, stats)
        changed = sorted({*stats.changed, *watch.changed()})
        if changed:
            named = [shown(path) or "." for path in changed[:_MOST_NAMED]]
            more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
            message = f"{self.source.root} changed while it was captured: {', '.join(named)}{more}"
            raise ConsistencyUnavailable(message, paths=named)

    def _sync_early(self) -> None:
        """Start to sync the directories written so far, if there are many."""
        created = 0 if is_whole(self.engine) else sum(each.shared is None for each in self.captured)
        self._early_sync = EarlySync.start(self.tree) if created >= _WORTH_SYNCING_EARLY else None
        if self._early_sync is not None:
            self.stack.callback(self._early_sync.close)

    def _write_manifest(self) -> str:
        """Write the list of shared directories and the manifest; link the base's manifest if it is equal."""
        write_shared_directories(self.tree, ((each.encoded, each.shared) for each in self.captured if each.shared))
        base = self.base
        if base is not None and self._equals(base):
            with writing(self.tree / MANIFEST):
                link_or_copy_file(base.stored.tree / MANIFEST, self.tree / MANIFEST)
            return base.manifest.payload_hash
        return write_manifest(self.tree / MANIFEST, ((each.encoded, each.body) for each in self.captured))

    def _equals(self, base: Base) -> bool:
        """Whether the base has all directories, at the same paths."""
        return len(base.manifest) == len(self.captured) and all(
            each.shared is not None and each.shared == base.stored.location(each.encoded) for each in self.captured
        )

    def _update_cache(self, cache: Path, before: StatCache) -> None:
        """Append the changes, or write a new cache if too much changed or is gone."""
        changed = [each for each in self.captured if each.kept and not each.from_cache]
        is_current = bool(before.parts) and not changed
        if len(before) > 2 * len(self.captured) or not (is_current or append_to_cache(cache, before, _known(changed))):
            write_cache(cache, self.device, _known(self.captured))

    def _finish_payload(self, payload: Payload | None) -> None:
        """Complete the directories, to which nothing more is added; wait for the early sync."""
        if payload is None:
            with TreeWalker(self.tree / PAYLOAD) as clone, writing(self.tree):
                close_clone(clone, ((each.path, each.identity) for each in self.captured if each.identity))
        else:
            for each in self.captured:
                if each.shared is None:
                    payload.finish_directory(each.path, each.body)
                elif payload.has(each.path):
                    payload.finish_parent(each.path, each.body)
        if self._early_sync is not None:
            self._early_sync.finish()

    def _write_ready(self, captured: Captured) -> None:
        fields = {"format": 1, "payload_hash": captured.payload_hash, "engine": str(captured.engine)}
        fields |= {"files": captured.files, "directories": captured.directories, "bytes": captured.bytes}
        fields[HOMES] = any(each.shared is not None for each in self.captured)
        with writing(self.tree / READY):
            write_file(self.tree / READY, strictjson.encode(fields) + b"\n")


def _damaged_sample(manifest: Manifest, stored: Stored) -> Iterator[bytes]:
    """The directories with a damaged file in a random sample, so that decay does not spread into new snapshots.

    A file that is too large for the sample is not read; its size and time tell whether a program has changed it.
    """
    files, size = _SAMPLED_FILES, _SAMPLED_BYTES
    for path in _rotated(list(manifest.paths()))[:_SAMPLED_DIRECTORIES]:
        for raw in _rotated(list(raw_entries(manifest.body(path) or b"").values()))[:files]:
            entry, files = decode_entry(path, raw), files - 1
            if entry.kind == "f" and not _is_sound(stored, path, entry, size):
                yield path
                break
            size -= entry.size if entry.size <= size else 0


def _rotated(items: list[bytes]) -> list[bytes]:
    start = int.from_bytes(os.urandom(4)) % max(1, len(items))
    return items[start:] + items[:start]


def _is_sound(stored: Stored, path: bytes, entry: ManifestEntry, most: int) -> bool:
    try:
        with opened(os.fsdecode(entry.name), READ, dir_fd=stored.enter(os.fsdecode(path))) as reading:
            status = calls.fstat(reading)
            is_same = (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns)
            if entry.size > most or not is_same:
                return is_same
            content = b"".join(iter(partial(calls.read, reading, entry.size + 1), b""))
            return hashlib.sha256(content).hexdigest() == entry.sha256
    except OSError as error:
        return isinstance(error, PermissionError)  # it belongs to another user


def _make_tree(tree: Path) -> int:
    """Create the directory of the tree, if necessary; return the time by the clock of its filesystem."""
    with writing(tree), Directory.open(tree.parent) as parent:
        is_new = parent.make(tree.name, mode=0o700, durable=False)
        with opened(parent.at(tree.name), DIRECTORY, dir_fd=parent.fd) as descriptor:
            if not is_new:
                calls.utime(descriptor)
            return calls.fstat(descriptor).st_ctime_ns


def _known(captured: list[CapturedDirectory]) -> Iterator[tuple[bytes, bytes, bytes]]:
    return ((each.encoded, each.kept, each.body) for each in captured if each.kept)


def _clock_offset() -> float:
    """The wall clock minus the monotonic clock: a difference means that the wall clock was set."""
    clock = SystemClock()
    return clock.wall() - clock.monotonic()


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Let the interpreter collect reference cycles rarely.

    The records of all directories live until the end. Traversing them repeatedly would find nothing, and take time that
    grows faster than their number.
    """
    import gc

    before = gc.get_threshold()
    if not 0 < before[0] < _MANY_OBJECTS:  # another capture has set it
        yield
        return
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def scan_again(source: TreeWalker, captured: Iterable[CapturedDirectory], stats: CaptureStats) -> None:
    """Add to `stats.changed` the paths that changed since they were captured."""
    with TreeWalker(source.root) as walker:
        for each in captured:
            if each.identity:
                stats.changed += _changed(walker, each)
            if len(stats.changed) > _MOST_CHANGES:
                return
        stats.changed += [joined(each.path, each.name) for each in stats.recent if not _is_unchanged(walker, each)]


def _changed(walker: TreeWalker, captured: CapturedDirectory) -> list[str]:
    try:
        found = scan_directory(walker.enter(captured.path))
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(walker.where(captured.path), error) from error
        return [captured.path]
    if found.identity == captured.identity:
        return []
    before, after = marks_by_name(captured.identity), marks_by_name(found.identity)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return [joined(captured.path, os.fsdecode(name)) for name in names] or [captured.path]


def _is_unchanged(walker: TreeWalker, recent: RecentFile) -> bool:
    """Read a file again whose times cannot show whether it changed."""
    try:
        with opened(recent.name, READ, dir_fd=walker.enter(recent.path)) as reading:
            return hash_file(reading, calls.fstat(reading).st_size).digest == recent.digest
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(walker.where(recent.path, recent.name), error) from error
        return False
