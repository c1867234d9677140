"""What is in a repository, at a glance: for `holdfast info`. Takes no lock and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.fs import juicefs
from holdfast.fs.mounts import filesystem_kind, is_network
from holdfast.fs.probe import network_troubles
from holdfast.store.files import FileStore
from holdfast.workspace.repository import Repository
from holdfast.worktrees.lifecycle import WorktreeState
from holdfast.worktrees.records import DESCRIPTORS, MAIN, Consistency, Descriptor, RepositoryFormat


class Description(NamedTuple):
    """A repository as it stands. `engine` is how its snapshots are made, None if that cannot be told."""

    root: Path
    format: RepositoryFormat
    worktrees: tuple[WorktreeState, ...]
    snapshots: int
    best_effort: tuple[Descriptor, ...]
    """Snapshots whose files may be of different moments."""
    filesystem: str
    network: bool
    network_troubles: tuple[str, ...]
    """Why what other machines do may not be seen here in time."""
    engine: str | None

    def warnings(self) -> list[str]:
        """What a user should know before relying on this repository."""
        found = [
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


def describe(repository: Repository) -> Description:
    """What is in a repository."""
    descriptors = [document.record for _, document in repository.control.store.scan(DESCRIPTORS)]
    kind = filesystem_kind(repository.root)
    return Description(
        root=repository.root,
        format=repository.format,
        worktrees=tuple(repository.worktrees.states()),
        snapshots=len(descriptors),
        best_effort=tuple(each for each in descriptors if each.consistency_level is Consistency.BEST_EFFORT),
        filesystem=kind,
        network=is_network(kind),
        network_troubles=_network_troubles(repository, kind),
        engine=_engine(repository),
    )


def _network_troubles(repository: Repository, kind: str) -> tuple[str, ...]:
    """For records on a server, only that files may be seen late; else what stands against records here."""
    if isinstance(repository.control.store, FileStore) or kind == juicefs.KIND:
        return tuple(network_troubles(repository.root, kind))
    return ()


def _engine(repository: Repository) -> str | None:
    from holdfast.fs.trees import choose_engine

    places = repository.control.places
    try:
        return choose_engine(places.payload(MAIN), places.snapshots).value
    except Failure:
        return None
