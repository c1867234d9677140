"""Checks of a git home: references and packs without a snapshot, and worktrees that git has moved or forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast import findings
from holdfast.findings import Check, Finding
from holdfast.fs.directory import is_directory
from holdfast.git import snapshots as commits
from holdfast.git import transfer
from holdfast.git.checkout import is_worktree_of
from holdfast.git.contents import SNAPSHOTS
from holdfast.git.landing import tip_of
from holdfast.git.transfer import INCOMING
from holdfast.git.worktrees import clear_name
from holdfast.repository import payloads
from holdfast.repository.checks_storage import last_events
from holdfast.repository.context import (
    MAIN,
    WORKTREES,
    RepositoryContext,
    WorktreeConfig,
    settled_config,
    worktree_keys,
)
from holdfast.repository.doctor import Examination, RepositoryCheck
from holdfast.repository.landing_records import TARGETS
from holdfast.repository.retention import effect_of
from holdfast.repository.worktree_changes import remove
from holdfast.store.model import Decision, Replace, View

if TYPE_CHECKING:
    from holdfast.repository.git_home import GitHome


def adapted(home: GitHome, general: Sequence[RepositoryCheck]) -> Sequence[RepositoryCheck]:
    """The general checks, with some of them replaced or left out for a git home."""
    own = {"trees": partial(_references, home), "directories": partial(_worktrees, home), "remnants": None}
    own |= {} if home.paths.main == MAIN else {"collections": None}  # garbage is collected in the clone `main`
    found = ((check.name, own.get(check.name, check.find)) for check in general)
    kept = tuple(Check(name, find) for name, find in found if find is not None)
    return (*kept, Check("landing", partial(_branches_to_land_on, home))) if home.paths.main == MAIN else kept


def _references(home: GitHome, examination: Examination) -> Iterator[Finding]:
    """References and kept packs without a descriptor. A publisher holds a scratch directory of the same id until the
    descriptor exists, so references are read first, then scratch directories, then descriptors."""
    context = examination.context
    places = transfer.incoming(home.git)
    for place in sorted(places.keys() - {each.scratch_id for each in payloads.in_use(context.paths)}):
        message = f"{INCOMING}{place} was left by a fetch whose process died"
        yield findings.of("tree-orphaned", place, message, partial(transfer.forget_incoming, home.git, place))
    stored = {*home.stored(), *commits.kept_packs(home.git)}
    making = {each.scratch_id for each in payloads.in_use(context.paths)}
    orphaned = {each for each in stored - making if examination.descriptor(each) is None}
    if not orphaned or examination.operations():
        return
    last = last_events(context, orphaned)
    for each in sorted(orphaned):
        event = last.get(each)
        if event is not None and not effect_of(event).deletes_snapshot:
            message = f"the snapshot {each} was published and never deleted, but its descriptor is gone"
            yield findings.of("descriptor-missing", each, message)
            continue
        message = f"{SNAPSHOTS}{each} belongs to no snapshot: its process died, or it was deleted"
        yield findings.of("tree-orphaned", each, message, partial(_forget, context, home, each))


def _forget(context: RepositoryContext, home: GitHome, snapshot_id: str) -> None:
    with payloads.scratch(context, "sweep", scratch_id=snapshot_id):  # a fetch may be bringing the same snapshot
        if context.descriptor(snapshot_id) is None:
            home.retire(context, [snapshot_id])
            commits.drop_keep(home.git, snapshot_id)


def _worktrees(home: GitHome, examination: Examination) -> Iterator[Finding]:
    """Worktrees that other programs moved or removed, and names in git's directories that belong to no worktree."""
    registered = dict(home.paths.registrations())
    pending = set(examination.operations())
    configs = examination.configs()
    for name, config in configs.items():
        path = home.paths.payload(name)
        if name in pending or config.clone != home.paths.main or examination.config(name) is None:
            continue
        if name != home.paths.main and name not in registered:
            message, forget = f"git no longer knows the worktree {name}", None
            if not is_directory(path):
                forget = partial(remove, examination.context, name, save=None, force=True)
            yield findings.of("worktree-unregistered", name, message, forget, path=str(path))
        elif not is_directory(path):
            message = f"the directory of {name} is missing: {path}"
            yield findings.of("worktree-directory-missing", name, message, path=str(path))
        elif is_worktree_of(str(path), str(home.paths.common)) is None:
            message = f"{path} does not lead to {home.paths.common}, where git has it as {name}"
            yield findings.of("worktree-disconnected", name, message, path=str(path))
        elif config.git and config.git.path != str(path):
            message = f"{name} is now at {path}; its record says {config.git.path}"
            yield findings.of("worktree-moved", name, message, partial(_note_path, examination.context, config))
    for name, checkout in registered.items():
        known = (each for each in (configs.get(name), examination.config(name)) if each is not None)
        is_ours = name in pending or any(each.clone == home.paths.main for each in known)
        if not is_ours and checkout.top:
            message = f"git's directory of {checkout.top} has the name {name}, which is not a worktree of this clone"
            yield findings.of(
                "worktree-name-stale", name, message, partial(clear_name, home.git, home.paths.payload(name))
            )


def _branches_to_land_on(home: GitHome, examination: Examination) -> Iterator[Finding]:
    """Local branches that are gone while work is queued for them. A branch may be deleted once its queue is empty, so
    the queue is read again afterwards."""
    store = examination.context.store
    for name, document in store.scan(TARGETS):
        branch = document.record.branch
        if document.record.remote or not document.record.queue or tip_of(home.git, branch) is not None:
            continue
        again = store.read(TARGETS.key(name))
        if again is not None and (ids := list(again.record.queue)):
            message = f"there is no branch {branch}, but work is queued to land on it: {', '.join(ids)}"
            yield findings.of("landing-branch-missing", branch, message, landings=ids)


def _note_path(context: RepositoryContext, before: WorktreeConfig) -> None:
    name = before.worktree_id
    described = context.home.described(name)

    def decide(view: View, now: float) -> Decision[None]:
        config = settled_config(view, name)
        return Decision([Replace(WORKTREES.key(name), msgspec.structs.replace(config, **described))], None)

    context.store.transact(worktree_keys(name), decide)
