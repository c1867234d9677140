"""The public API: every name exists, is typed and documented, and together they suffice for a whole program.

This file is written like a user's program; `make types` checks it too.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

import holdfast
from holdfast import (
    AssignmentOptions,
    AsyncLedger,
    Failure,
    HeldLease,
    NewIssue,
    Outcome,
    Repository,
    State,
    Update,
    find_ledger,
    find_repository,
    init_ledger,
    initialise,
    look_around,
    open_tracker,
    take_work,
)
from holdfast.errors import LockConflict, NotFound


@pytest.mark.parametrize("name", [each for each in holdfast.__all__ if each != "__version__"])
def test_every_name_exists_and_has_a_docstring(name: str) -> None:
    offered = getattr(holdfast, name)

    assert offered.__doc__
    assert offered.__module__.startswith("holdfast.")


def test_type_checkers_see_the_same_names_as_programs() -> None:
    source = Path(holdfast.__file__).read_text(encoding="utf-8")

    for name, module in vars(holdfast)["_MODULES"].items():
        assert f"    from {module} import {name} as {name}\n" in source
        assert hasattr(import_module(module), name)
    assert source.count("    from holdfast.") == len(holdfast.__all__) - 1


def test_importing_the_package_loads_no_submodule() -> None:
    program = "import sys, holdfast; print([each for each in sys.modules if each.startswith('holdfast.')])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def do_the_work(project: Path) -> Outcome:
    """A whole program: snapshot a project, take work, do it and record it."""
    initialise(project)
    with Repository(find_repository(project / "main")) as repository:
        (repository.path() / "file").write_text("one")
        with repository.lease(ttl=30, purpose="to begin") as lease:
            snapshot_and_restore(repository, lease)
        tracker = open_tracker(project, actor="agent:a")
        tracker.initialise()
        tracker.create(NewIssue(title="Do it"))
        ledger = init_ledger(project).ledger
        with take_work(repository, tracker, AssignmentOptions(), ledger=ledger) as work:
            (work.path / "file").write_text("two")
            outcome = work.succeed()
        assert asyncio.run(append_note(AsyncLedger(ledger))) == 2
        return outcome


def snapshot_and_restore(repository: Repository, lease: HeldLease) -> None:
    descriptor = repository.snapshot(lease=lease, note="the beginning", tag="good")
    (repository.path() / "file").write_text("broken")
    restored = repository.restore("good", lease=lease, reason="broken")
    assert (repository.path() / "file").read_text() == "one"
    assert restored.source.snapshot_id == descriptor.snapshot_id
    assert restored.kept is not None
    repository.restore(restored.kept.snapshot_id, lease=lease, reason="a part", path="file")
    assert (repository.path() / "file").read_text() == "broken"
    repository.restore("good", lease=lease, reason="again")


async def append_note(ledger: AsyncLedger) -> int:
    return (await ledger.append({"type": "note"})).sequence


def test_a_program_needs_no_other_names(tmp_path: Path) -> None:
    outcome = do_the_work(tmp_path / "project")

    assert (outcome.issue.state, outcome.sequence) == (State.DONE, 1)
    assert look_around(tmp_path / "project").holdings == ()
    assert find_ledger(tmp_path / "project" / "main") == tmp_path / "project"


def test_restoring_in_place_requires_the_lease_and_an_existing_snapshot(tmp_path: Path) -> None:
    initialise(tmp_path / "project")
    repository = Repository(tmp_path / "project")
    with repository.lease() as lease:
        with pytest.raises(NotFound):
            repository.restore("nothing", lease=lease, reason="x")
        repository.snapshot(lease=lease, tag="good")
        with pytest.raises(Failure):
            repository.restore("good", reason="without the lease")
        with pytest.raises(LockConflict):
            Repository(tmp_path / "project").lease()


def test_threads_share_open_objects(tmp_path: Path) -> None:
    initialise(tmp_path)
    tracker = open_tracker(tmp_path, actor="agent:a")
    tracker.initialise()
    counted = tracker.create(NewIssue(title="counted")).id
    ledger = init_ledger(tmp_path).ledger
    repository = Repository(tmp_path)

    def work(number: int) -> None:
        tracker.update(counted, Update(increments={"done": 1}))
        ledger.append({"type": "done", "number": number})
        with repository.lease(wait=60) as lease:
            (repository.path() / str(number)).write_text("x")
            repository.snapshot(lease=lease)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(12)))
    assert tracker.issue(counted).context["done"] == "12"
    assert sorted(each.event["number"] for each in ledger.events()) == list(range(12))
    assert len(repository.snapshots.line("main").entries) == 12


def test_every_environment_variable_is_documented_on_the_scripting_page() -> None:
    root = Path(holdfast.__file__).parent
    page = (root.parents[1] / "docs/how-to/from-scripts.md").read_text(encoding="utf-8")
    named = re.compile(r"\b(?:HOLDFAST|JIT|JVS|AGENCY)_[A-Z_]*[A-Z]\b")
    read = {name for path in root.rglob("*.py") for name in named.findall(path.read_text(encoding="utf-8"))}

    assert read - set(named.findall(page)) == set()
    assert len(read) > 10
