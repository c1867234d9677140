"""The steps about snapshots. They run in worker threads."""

from __future__ import annotations

from holdfast.errors import UsageFailure
from holdfast.mcp import arguments
from holdfast.mcp.calls import Call, Plain
from holdfast.mcp.held import Place
from holdfast.mcp.leasing import proven
from holdfast.repository import to_json
from holdfast.repository.records import DESCRIPTORS, Consistency
from holdfast.repository.repository import Repository
from holdfast.repository.restore import InPlace, checked
from holdfast.repository.snapshots import SnapshotOptions


def snapshot(call: Call, given: arguments.Snapshot) -> Plain:
    repository = call.project.repository()
    place = Place(repository.root, call.project.worktree(repository, given.worktree))
    head = repository.control.config(place.worktree).head_snapshot_id
    known = repository.control.store.read(DESCRIPTORS.key(head)) if head else None
    call.total = known.record.files if known else None
    wanted = SnapshotOptions(
        note=given.note,
        tag=given.tag,
        consistency=Consistency(given.consistency) if given.consistency else None,
        progress=call.progress,
    )
    with proven(call, repository, place, given.lock_id, "snapshot") as proof:
        call.check()
        made = repository.snapshots.take(place.worktree, proof, wanted)
    return to_json.new_snapshot_to_json(made, given.tag)


def history(call: Call, given: arguments.History) -> Plain:
    repository = call.project.repository()
    if given.all_worktrees:
        return to_json.history_to_json(repository.snapshots.everything(limit=given.limit), None)
    worktree = call.project.worktree(repository, given.worktree)
    return to_json.history_to_json(repository.snapshots.line(worktree, limit=given.limit), worktree)


def restore(call: Call, given: arguments.Restore) -> Plain:
    repository = call.project.repository()
    worktree = call.project.worktree(repository, given.worktree)
    if given.in_place and given.into:
        raise UsageFailure("into is for a new worktree, not for in_place", hint="Leave one of them out.")
    if not given.in_place and (given.path or given.reason):
        raise UsageFailure(
            f"{'path' if given.path else 'reason'} is for in_place", hint="Set in_place too, or leave it out."
        )
    found = repository.snapshots.named(given.snapshot, seen_from=worktree)
    call.total = found.files
    if given.in_place:
        return _restore_in_place(call, given, repository, Place(repository.root, worktree), found.snapshot_id)
    return _restore_into_new(repository, found.snapshot_id, given)


def _restore_into_new(repository: Repository, snapshot_id: str, given: arguments.Restore) -> Plain:
    if given.dry_run:
        name = given.into or next(repository.snapshots.free_names(snapshot_id))
    else:
        name = repository.snapshots.restore(snapshot_id, given.into).worktree_id
    path = repository.control.places.payload(name)
    return to_json.restored_to_json(name, path, snapshot_id, dry_run=given.dry_run)


def _restore_in_place(
    call: Call, given: arguments.Restore, repository: Repository, place: Place, snapshot_id: str
) -> Plain:
    path = given.path.rstrip("/") if given.path else None
    how = InPlace(reason=given.reason, path=path, progress=call.progress)
    if given.dry_run:
        plan = repository.snapshots.plan(place.worktree, snapshot_id, how)
        return to_json.restore_plan_to_json(place.worktree, how, plan)
    checked(repository.control, place.worktree, how)  # before anybody's lease is asked for
    purpose = f"restore {snapshot_id} in place"
    with proven(call, repository, place, given.lock_id, purpose) as proof:
        call.check()
        restored = repository.snapshots.restore_in_place(place.worktree, snapshot_id, proof, how)
    return to_json.restored_in_place_to_json(place.worktree, how, restored)
