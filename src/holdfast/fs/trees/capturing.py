"""Capturing a directory as a snapshot's tree: a payload, a manifest, and last a mark that both are complete.

The steps have the numbers of docs/protocols/snapshot-trees.md. Nothing here is synced, and nothing is
visible to anybody: the caller syncs once and renames the tree to its place.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConsistencyUnavailable, Failure, NotFound
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import Directory, io_failure
from holdfast.fs.mounts import mounts_beneath
from holdfast.fs.trees.attributes import Attributes
from holdfast.fs.trees.descent import NOFOLLOW, Descent, shown, unwritable
from holdfast.fs.trees.engines import Engine, clone_whole, is_whole
from holdfast.fs.trees.intake import Base, Intake, Progress, Taken, Tally
from holdfast.fs.trees.layout import PAYLOAD, READY
from holdfast.fs.trees.linking import link_unchanged
from holdfast.fs.trees.manifest import Manifest, write_all, write_manifest
from holdfast.fs.trees.second_look import second_look
from holdfast.fs.trees.stat_cache import Known, StatCache, write_cache
from holdfast.fs.trees.workers import together

_NAMED = 5


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

    `base` is the tree of another snapshot, from which files that are the same are hard-linked. `cache` is
    what is known of the source from the last capture; it is replaced. With `quiesced` the tree is the source
    as it was at one moment, and a source that changes meanwhile is `ConsistencyUnavailable`; without,
    every file is as it was at some moment. If it fails, what it has made so far is the caller's to remove.
    """
    with ExitStack() as stack:
        way = stack.enter_context(Descent(source))
        now = _make_tree(tree)  # 1. the tree, and what time it is for its file system
        capturing = _Capture(stack, way, tree, engine, base, cache, now, quiesced=quiesced, progress=progress)
        return capturing.run()


def sync_tree(tree: Path) -> None:
    """Bring a captured tree to the disk, with one call for all of its file system."""
    with Directory.open(tree) as directory:
        if directory.fd is None:
            return
        try:
            calls.sync_filesystem(directory.fd)
        except OSError as error:
            raise io_failure("sync", tree, error) from error


class _Capture:
    def __init__(
        self,
        stack: ExitStack,
        source: Descent,
        tree: Path,
        engine: Engine,
        base: Path | None,
        cache: Path | None,
        now: int,
        *,
        quiesced: bool,
        progress: Progress | None,
    ) -> None:
        self.tree, self.engine, self.now, self.quiesced = tree, engine, now, quiesced
        self.stack, self.source, self.cache_path = stack, source, cache
        self.tally = Tally(progress)
        self.device = calls.fstat(source.enter("")).st_dev
        self.base = None if base is None or engine is Engine.COPY else self._open_base(base)
        self.taken: list[Taken] = []

    def run(self) -> Captured:
        """Steps 2 to 7."""
        scanned = self.source
        if is_whole(self.engine):
            clone_whole(self.engine, self.source.root, os.fspath(self.tree / PAYLOAD))  # 2. all at once
            if self.engine is Engine.BTRFS_SUBVOLUME:
                scanned = self.stack.enter_context(Descent(self.tree / PAYLOAD))  # it cannot change any more
        intake = self._intake(scanned)
        self._take(intake)  # 3. every directory: known, or read
        checked = self.quiesced and self.engine is not Engine.BTRFS_SUBVOLUME
        self._link_and_look_again(intake, checked=checked)  # 4. the links; 5. the second look
        payload_hash = self._write_manifest()  # 6.
        if self.cache_path is not None:
            known = (Known(os.fsencode(each.path), each.kept, each.body) for each in self.taken if each.kept)
            write_cache(self.cache_path, self.device, known)
        captured = Captured(
            self.engine,
            payload_hash,
            self.tally.files,
            self.tally.directories,
            self.tally.bytes,
            self.tally.stored_bytes,
            tuple(self.tally.not_preserved),
            tuple(self.tally.special),
        )
        _write_ready(self.tree, captured)  # 7. complete
        return captured

    def _intake(self, source: Descent) -> Intake:
        payload: Descent | None = None
        attributes: Attributes | None = None
        if not is_whole(self.engine):
            try:
                calls.mkdir(self.tree / PAYLOAD)
            except OSError as error:
                raise unwritable(os.fspath(self.tree / PAYLOAD), error) from error
            payload = self.stack.enter_context(Descent(self.tree / PAYLOAD))
            attributes = Attributes(calls.fstat(payload.enter("")), kept=True)
        return Intake(
            source,
            payload=payload,
            attributes=attributes,
            base=self.base,
            cache=StatCache.read(self.cache_path, self.device),
            device=calls.fstat(source.enter("")).st_dev,
            mounts=mounts_beneath(source.enter("")),
            now=self.now,
            clones=self.engine is Engine.REFLINK,
            retry=not self.quiesced,
            tally=self.tally,
        )

    def _take(self, intake: Intake) -> None:
        waiting = [""]
        while waiting:
            path = waiting.pop()
            taken, below = intake.take(path)
            if taken is not None:
                self.taken.append(taken)
            elif path == "":
                raise NotFound(f"there is no directory {self.source.root}", path=self.source.root)
            waiting += [f"{path}/{name}" if path else name for name in reversed(below)]
        if self.quiesced:
            self._refuse_changes()

    def _link_and_look_again(self, intake: Intake, *, checked: bool) -> None:
        jobs = []
        if intake.attributes is not None:
            jobs.append(lambda: link_unchanged(self.taken, intake))
        if checked:
            jobs.append(lambda: second_look(self.source, self.taken, self.tally))
        together(jobs, size=self.tally.files)
        if self.quiesced:
            self._refuse_changes()

    def _refuse_changes(self) -> None:
        changed = sorted(set(self.tally.changed))
        if not changed:
            return
        named = [shown(path) or "." for path in changed[:_NAMED]]
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise ConsistencyUnavailable(
            f"{self.source.root} changed while it was captured: {', '.join(named)}{more}", paths=named
        )

    def _write_manifest(self) -> str:
        records = ((os.fsencode(each.path), each.body) for each in self.taken)
        with Directory.open(self.tree) as directory:
            if directory.fd is None:
                raise NotImplementedError("trees need directories that can be opened")
            return write_manifest(directory.fd, records, where=os.fspath(self.tree))

    def _open_base(self, base: Path) -> Base | None:
        """The base, unless nothing can be linked from it; a damaged one is as good as none."""
        try:
            payload = self.stack.enter_context(Descent(base / PAYLOAD))
            if calls.fstat(payload.enter("")).st_dev != calls.stat(self.tree).st_dev:
                return None
            return Base(Manifest.read(base), payload)
        except (Failure, OSError):
            return None


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


def _write_ready(tree: Path, captured: Captured) -> None:
    fields = {
        "format": 1,
        "payload_hash": captured.payload_hash,
        "engine": str(captured.engine),
        "files": captured.files,
        "directories": captured.directories,
        "bytes": captured.bytes,
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
