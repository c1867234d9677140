"""Capturing a directory as a snapshot's tree: a payload, a manifest, and last a mark that both are complete.

The steps have the numbers of docs/protocols/snapshot-trees.md. Nothing here is synced, and nothing is
visible to anybody: the caller syncs once and renames the tree to its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from holdfast.clock import SystemClock
from holdfast.errors import ConsistencyUnavailable, EngineUnavailable, Failure, NotFound
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import close_quietly, write_all
from holdfast.trees.capture_directories import CapturedDirectory, DirectoryCapture
from holdfast.trees.capture_files import GONE, Base
from holdfast.trees.copy import hash_file
from holdfast.trees.engines import Engine, choose_engine, clone_whole, is_whole
from holdfast.trees.manifest import HOMES, MANIFEST, PAYLOAD, READY, Manifest, write_manifest
from holdfast.trees.payload import READ, EarlySync, Payload
from holdfast.trees.remove import remove_tree
from holdfast.trees.scan import (
    NOFOLLOW,
    CaptureStats,
    Progress,
    Recent,
    TreeWalker,
    joined,
    look,
    marks_by_name,
    shown,
    unreadable,
    unwritable,
)
from holdfast.trees.scan_worker import ScanWorker
from holdfast.trees.shared_dirs import Stored, link_or_copy_file, write_homes
from holdfast.trees.stat_cache import KnownDirectory, SourceWatch, StatCache, append_to_cache, write_cache

_ENOUGH = 100


def second_look(source: TreeWalker, taken: Iterable[CapturedDirectory], tally: CaptureStats) -> None:
    """Note in `tally.changed` what is not as it was taken in."""
    with TreeWalker(source.root) as way:
        for each in taken:
            if each.identity:
                tally.changed += _changed(way, each)
            if len(tally.changed) > _ENOUGH:
                return
        tally.changed += [joined(each.path, each.name) for each in tally.recent if not _is_same(way, each)]


def _changed(way: TreeWalker, taken: CapturedDirectory) -> list[str]:
    try:
        seen = look(way.enter(taken.path))
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(way.where(taken.path), error) from error
        return [taken.path]
    if seen.identity == taken.identity:
        return []
    before, after = marks_by_name(taken.identity), marks_by_name(seen.identity)
    names = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return [joined(taken.path, os.fsdecode(name)) for name in names] or [taken.path]


def _is_same(way: TreeWalker, recent: Recent) -> bool:
    """Read a file again whose times cannot show whether it changed."""
    try:
        reading = calls.open(recent.name, READ, dir_fd=way.enter(recent.path))
        try:
            return hash_file(reading, calls.fstat(reading).st_size).digest == recent.digest
        finally:
            close_quietly(reading)
    except OSError as error:
        if error.errno not in GONE:
            raise unreadable(way.where(recent.path, recent.name), error) from error
        return False


_STEP = 0.02
_MANY_OBJECTS = 100_000
_NAMED = 5
_WORTH_SYNCING_EARLY = 256  # directories that were made


class Captured(NamedTuple):
    """What a capture made. `stored_bytes` were written anew; the rest is shared with what was there."""

    engine: Engine
    payload_hash: str
    files: int
    directories: int
    bytes: int
    stored_bytes: int
    not_preserved: tuple[str, ...]
    special: tuple[str, ...]


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

    `base` is the tree of another snapshot, beside which this one will stand: directories that are the same
    stay there and are only noted; in others, files that are the same are hard-linked. `cache` is what is
    known of the source from the last capture; it is replaced. With `quiesced` the tree is the source as it
    was at one moment, and a source that changes meanwhile is `ConsistencyUnavailable`; without, every file is
    as it was at some moment. If it fails, what it has made so far is the caller's to remove.
    """
    with ExitStack() as stack:
        stack.enter_context(_collecting_rarely())
        way = stack.enter_context(TreeWalker(source))
        return _Capture(stack, way, tree, engine, quiesced=quiesced).run(base, cache, CaptureStats(progress))


class _Capture:
    def __init__(
        self, stack: ExitStack, source: TreeWalker, tree: Path, engine: Engine, *, quiesced: bool
    ) -> None:
        self.stack, self.source, self.tree, self.engine, self.quiesced = stack, source, tree, engine, quiesced
        self.device = calls.fstat(source.enter("")).st_dev
        self.taken: list[CapturedDirectory] = []
        self.base: Base | None = None
        self._syncing: EarlySync | None = None
        self._steps = _clock_steps()

    def run(self, base: Path | None, cache: Path | None, tally: CaptureStats) -> Captured:
        """Carry out the steps."""
        now = _make_tree(self.tree)  # 1. the tree, and what time it is for its file system
        clones_later = self.engine is Engine.JUICEFS_CLONE and self.quiesced
        frozen = is_whole(self.engine) and not clones_later
        scanned = self._clone() if frozen else self.source  # 2. all at once, if it can be
        watch = SourceWatch(self.source.root) if self.quiesced and not frozen else None
        if watch is not None:
            self.stack.enter_context(watch)
        if self.engine is Engine.JUICEFS_CLONE and frozen:
            cache = None  # it is about the inodes of the source, and they are not those of the clone
        if is_whole(self.engine) or self.engine is Engine.COPY:
            base = None  # of which nothing is linked
        scout = self._send_scout(scanned, cache, watch) if base is not None or is_whole(self.engine) else None
        if base is not None:
            self.base = self._open_base(base)
        known = StatCache.read(cache, self.device)
        if scout is not None:
            scout.use(known)
        intake = DirectoryCapture(
            scanned,
            cache=known,
            tally=tally,
            payload=None if is_whole(self.engine) else self._make_payload(),
            base=self.base,
            watch=watch,
            scout=scout,
            now=now,
            clones=self.engine is Engine.REFLINK,
            retry=not self.quiesced,
        )
        self.stack.callback(intake.files.close)
        self._take(intake)  # 3. every directory: shared as a whole, or read
        if scout is not None:
            scout.stop()
        if clones_later:
            tally.changed += self._differing(self._clone())
        if watch is not None:
            self._require_no_change(watch, tally)  # 4. the source was all so at one moment
        self._sync_early()
        payload_hash = self._write_manifest()  # 5. what there is
        if cache is not None:
            self._update_cache(cache, known)  # 6. what need not be read the next time
        self._finish_payload(intake)  # 7. all that is in the payload, and its directories as they were
        captured = _captured(self.engine, payload_hash, tally)
        shares = any(each.home is not None for each in self.taken)
        _write_ready(self.tree, captured, shares=shares)  # 8. complete
        return captured

    def _clone(self) -> TreeWalker:
        """Let an engine that clones all at once do so; return the clone, which does not change any more."""
        payload = self.tree / PAYLOAD
        clone_whole(self.engine, self.source.root, os.fspath(payload))
        return self.stack.enter_context(TreeWalker(payload))

    def _differing(self, clone: TreeWalker) -> list[str]:
        """What a clone that was made after the reading holds otherwise than it was read."""
        from holdfast.trees.engines import differing

        return differing(clone, ((each.encoded, each.body) for each in self.taken))

    def _send_scout(
        self, scanned: TreeWalker, cache: Path | None, watch: SourceWatch | None
    ) -> ScanWorker | None:
        """Let somebody look at the source from its other end meanwhile, if it is large."""
        scout = ScanWorker.start(scanned, cache, watch)
        return None if scout is None else self.stack.enter_context(scout)

    def _make_payload(self) -> Payload:
        return self.stack.enter_context(Payload.begin(self.tree / PAYLOAD, kept=True))

    def _open_base(self, base: Path) -> Base | None:
        """The base, unless nothing can be linked from it; a damaged one is as good as none."""
        try:
            stored = self.stack.enter_context(Stored(base))
            if calls.fstat(stored.own.top()).st_dev != calls.stat(self.tree).st_dev:
                return None
            return Base(Manifest.read(base), stored)
        except (Failure, OSError):
            return None

    def _take(self, intake: DirectoryCapture) -> None:
        self.taken += intake.take_all()
        if not self.taken:
            raise NotFound(f"there is no directory {self.source.root}", path=self.source.root)

    def _sync_early(self) -> None:
        """Begin to bring to the disk what there is so far, if it is much."""
        made = 0 if is_whole(self.engine) else sum(each.home is None for each in self.taken)
        self._syncing = EarlySync.start(self.tree) if made >= _WORTH_SYNCING_EARLY else None
        if self._syncing is not None:
            self.stack.callback(self._syncing.close)

    def _finish_payload(self, intake: DirectoryCapture) -> None:
        """Wait for the links that are still being made; then nothing more is put into the directories."""
        intake.files.finish()
        if intake.payload is not None:
            for each in self.taken:
                if each.path in intake.payload.complete:
                    continue
                if each.home is None:
                    intake.payload.finish_directory(each.path, each.body)
                elif intake.payload.has(each.path):
                    intake.payload.finish_way(each.path, each.body)
        if self._syncing is not None:
            self._syncing.finish()

    def _require_no_change(self, watch: SourceWatch, tally: CaptureStats) -> None:
        """Refuse a source that changed since the capture began.

        We are told of changes where we listen; and whatever changed before we looked at it has a time that
        is not older than the beginning. Where one of the two cannot be relied on, look again.
        """
        everything = tally.any_recent or abs(_clock_steps() - self._steps) > _STEP
        if not tally.changed:
            again = (each for each in self.taken if everything or not each.watched)
            second_look(self.source, again, tally)
        changed = sorted({*tally.changed, *watch.changed()})
        if changed:
            named = [shown(path) or "." for path in changed[:_NAMED]]
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ConsistencyUnavailable(
                f"{self.source.root} changed while it was captured: {', '.join(named)}{more}", paths=named
            )

    def _write_manifest(self) -> str:
        """Write the manifest, or link that of the base if it is the same; and where directories are."""
        write_homes(self.tree, ((each.encoded, each.home) for each in self.taken if each.home))
        base = self.base
        if base is not None and self._is_as_in(base):
            try:
                link_or_copy_file(base.stored.tree / MANIFEST, self.tree / MANIFEST)
            except OSError as error:
                raise unwritable(os.fspath(self.tree / MANIFEST), error) from error
            return base.manifest.payload_hash
        records = ((each.encoded, each.body) for each in self.taken)
        return write_manifest(self.tree / MANIFEST, records)

    def _is_as_in(self, base: Base) -> bool:
        """Whether all directories are in the base, at the same paths."""
        return len(base.manifest) == len(self.taken) and all(
            each.home is not None and each.home == base.stored.home(each.encoded) for each in self.taken
        )

    def _update_cache(self, cache: Path, before: StatCache) -> None:
        """Append what has changed, or write all of it anew if that is much, or much is gone."""
        changed = [each for each in self.taken if each.kept and not each.from_cache]
        is_current = bool(before.parts) and not changed
        if len(before) > 2 * len(self.taken) or not (
            is_current or append_to_cache(cache, before, _known(changed))
        ):
            write_cache(cache, self.device, _known(self.taken))


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let the interpreter seldom look for circles of objects.

    What is noted of each directory is kept to the end. To go through all of it again and again would find
    nothing, and take time that grows faster than their number.
    """
    import gc

    before = gc.get_threshold()
    if not 0 < before[0] < _MANY_OBJECTS:  # another capture has seen to it
        yield
        return
    gc.set_threshold(_MANY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _known(taken: list[CapturedDirectory]) -> Iterator[KnownDirectory]:
    return (KnownDirectory(each.encoded, each.kept, each.body) for each in taken if each.kept)


def _clock_steps() -> float:
    """Grows or shrinks by as much as somebody sets the wall clock."""
    clock = SystemClock()
    return clock.wall() - clock.monotonic()


def _captured(engine: Engine, payload_hash: str, tally: CaptureStats) -> Captured:
    return Captured(
        engine,
        payload_hash,
        tally.files,
        tally.directories,
        tally.bytes,
        tally.stored_bytes,
        tuple(sorted(tally.not_preserved)),
        tuple(sorted(tally.special)),
    )


def _make_tree(tree: Path) -> int:
    """Make the directory of the tree if it is not there; return the time by its file system's clock."""
    try:
        try:
            calls.mkdir(tree)
        except FileExistsError:
            calls.utime(tree)
        return calls.stat(tree).st_ctime_ns
    except OSError as error:
        raise unwritable(os.fspath(tree), error) from error


def _write_ready(tree: Path, captured: Captured, *, shares: bool) -> None:
    fields = {
        "format": 1,
        "payload_hash": captured.payload_hash,
        "engine": str(captured.engine),
        "files": captured.files,
        "directories": captured.directories,
        "bytes": captured.bytes,
        HOMES: shares,
    }
    where = tree / READY
    try:
        descriptor = calls.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW, 0o444)
        try:
            write_all(descriptor, strictjson.encode(fields) + b"\n")
        finally:
            calls.close(descriptor)
    except OSError as error:
        raise unwritable(os.fspath(where), error) from error


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
    """Capture `source` as the new tree `tree`, which will be kept in the file system of `beside`.

    By the `wanted` engine or not at all, if one is; else by the best. Some engines leave the work to the
    file system, which may find only then that it cannot do it: then the next best one does.
    """
    engine = choose_engine(source, beside, wanted)
    try:
        return capture(
            source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress
        )
    except EngineUnavailable:
        if wanted is not None:
            raise
    remove_tree(tree)
    engine = choose_engine(source, beside, but=engine)
    return capture(source, tree, engine=engine, base=base, cache=cache, quiesced=quiesced, progress=progress)
