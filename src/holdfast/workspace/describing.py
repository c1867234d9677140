"""What is in a repository, at a glance: for `holdfast info`. Takes no lock and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure, NotFound
from holdfast.fs import probe
from holdfast.fs.directory import Directory
from holdfast.fs.probe import filesystem_kind, is_network, network_troubles
from holdfast.store.files import FileStore
from holdfast.store.open import address_of
from holdfast.workspace.repository import Repository
from holdfast.worktrees.lifecycle import WorktreeState
from holdfast.worktrees.records import DESCRIPTORS, MAIN, Consistency, Descriptor, RepositoryFormat


class Description(NamedTuple):
    """A repository as it stands. `engine` is how its snapshots are made, None if that cannot be told.

    If its store cannot be used, `trouble` says why; then the format is not known, there are no worktrees
    and snapshots to be told of, and `directories` is what there is of worktrees on this filesystem.
    """

    root: Path
    store: str
    """The address of the store, without secrets."""
    trouble: Failure | None
    format: RepositoryFormat | None
    worktrees: tuple[WorktreeState, ...]
    directories: tuple[str, ...]
    snapshots: int | None
    best_effort: tuple[Descriptor, ...]
    """Snapshots whose files may be of different moments."""
    filesystem: str
    network: bool
    network_troubles: tuple[str, ...]
    """Why what other machines do may not be seen here in time."""
    engine: str | None

    def warnings(self) -> list[str]:
        """What a user should know before relying on this repository."""
        found = [] if self.trouble is None else [self.trouble.message]
        found += [
            f"the worktree {each.config.worktree_id} is shared (high-risk): nothing keeps writers apart"
            for each in self.worktrees
            if each.is_shared
        ]
        if self.best_effort:
            found.append(
                f"{len(self.best_effort)} of {self.snapshots} snapshots were taken while files may have "
                "changed (best_effort)"
            )
        return [*found, *self.network_troubles]


class _Records(NamedTuple):
    """What only the store knows."""

    format: RepositoryFormat | None = None
    worktrees: tuple[WorktreeState, ...] = ()
    descriptors: tuple[Descriptor, ...] | None = None


def describe(repository: Repository) -> Description:
    """What is in a repository; if it was opened to be examined, also if its store cannot be used."""
    try:
        records = _records(repository)
    except Failure as failure:
        if failure is not repository.trouble:
            raise
        records = _Records()
    kind = filesystem_kind(repository.root)
    descriptors = records.descriptors or ()
    return Description(
        root=repository.root,
        store=_address(repository),
        trouble=repository.trouble,
        format=records.format,
        worktrees=records.worktrees,
        directories=tuple(_directories(repository)),
        snapshots=None if records.descriptors is None else len(descriptors),
        best_effort=tuple(each for each in descriptors if each.consistency_level is Consistency.BEST_EFFORT),
        filesystem=kind,
        network=is_network(kind),
        network_troubles=_network_troubles(repository, kind),
        engine=_engine(repository),
    )


def _records(repository: Repository) -> _Records:
    descriptors = [document.record for _, document in repository.control.store.scan(DESCRIPTORS)]
    return _Records(repository.format, tuple(repository.worktrees.states()), tuple(descriptors))


def _address(repository: Repository) -> str:
    try:
        return address_of(repository.root)
    except Failure:
        return "unknown"


def _directories(repository: Repository) -> Iterator[str]:
    """The worktrees that have a directory here."""
    places = repository.control.places
    for path, names in ((places.root, [MAIN]), (places.worktrees, None)):
        try:
            with Directory.open(path) as directory:
                there = directory.directories()
        except NotFound:
            continue
        yield from sorted(each for each in there if names is None or each in names)


def _network_troubles(repository: Repository, kind: str) -> tuple[str, ...]:
    """For records on a server, only that files may be seen late; else what stands against records here."""
    if isinstance(repository.control.store, FileStore) or kind == probe.KIND:
        return tuple(network_troubles(repository.root, kind))
    return ()


def _engine(repository: Repository) -> str | None:
    from holdfast.trees import choose_engine

    places = repository.control.places
    try:
        return choose_engine(places.payload(MAIN), places.snapshots).value
    except Failure:
        return None
