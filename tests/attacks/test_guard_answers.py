"""The guard and the hooks: whatever they are asked, and whatever a lease has become, a leased worktree is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from proof.hostile.runner import Runner
from proof.hostile.victim import Victim, read_json, write
from tests.attacks.planting import change_record, directory, fifo, huge, link, pretty

LEASE = ".jvs/locks/side.json"
REFUSE = 2

REQUESTS: dict[str, object] = {
    "a path": {"tool_input": {"file_path": "worktrees/side/mine"}},
    "another field": {"tool_input": {"filename": "worktrees/side/mine"}},
    "a list of paths": {"tool_input": {"file_paths": ["worktrees/side/mine"]}},
    "edits of several files": {"tool_input": {"edits": [{"file_path": "worktrees/side/mine"}]}},
    "a list where the input belongs": {"tool_input": ["worktrees/side/mine"]},
    "arguments instead of input": {"arguments": {"path": "worktrees/side/mine"}},
    "a list of directories": {"tool_input": {"file_path": ["worktrees/side/mine"]}},
    "a working directory that is a list": {"tool_input": {"file_path": "worktrees/side/mine"}, "cwd": ["x"]},
    "a path with a NUL": {"tool_input": {"file_path": "worktrees/side/mi\0ne"}},
    "a path with a surrogate": {"tool_input": {"file_path": "worktrees/side/\ud800"}},
    "a very long path": {"tool_input": {"file_path": "worktrees/side/" + "x/" * 5000}},
    "a patch": {"tool_input": {"command": "*** Begin Patch\n*** Update File: worktrees/side/mine\n"}},
    "a patch in a list": {"tool_input": {"command": ["apply_patch", "*** Update File: worktrees/side/mine\n"]}},
}
TEXTS = {
    "no JSON": "worktrees/side/mine",
    "nested JSON": '{"tool_input":' * 50_000,
    "JSON that is cut off": '{"tool_input":{"file_path":"worktrees/side/mine"',
    "a list": '["worktrees/side/mine"]',
    "invalid UTF-8": '{"tool_input":{"file_path":"worktrees/side/\udcff"}}',
}

LEASES: dict[str, Callable[[Path], object]] = {
    "a fifo": fifo,
    "a directory": directory,
    "huge": huge,
    "a loop": lambda path: link(path, path.name),
    "empty": lambda path: write(path, ""),
    "no JSON": lambda path: write(path, "{"),
    "nested": lambda path: write(path, "[" * 100_000),
    "a list": lambda path: write(path, "[]"),
    "null": lambda path: write(path, "null"),
    "without a time": lambda path: write(path, pretty({**read_json(path), "lease_expires_at": "soon"})),
    "of a time beyond all times": lambda path: change_record(path, lease_expires_at="9999-12-31T23:59:59-23:59"),
    "with a strange mark of the boot clock": lambda path: change_record(path, boot_expires_at=["x"]),
    "with a list as a holder": lambda path: change_record(path, holder_id=[1], identity=[]),
    "unreadable": lambda path: path.chmod(0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_hook_refuses_a_write_to_a_leased_worktree_for(name: str, victim: Victim, runner: Runner) -> None:
    request = json.dumps(REQUESTS[name])
    outcome = runner.run(victim.job("hook", "before-write", stdin=request, cwd=victim.root / "worktrees/side"))

    assert not outcome.problem
    assert outcome.status == REFUSE, outcome


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEXTS)
def test_a_hook_refuses_in_a_leased_worktree_what_it_cannot_read_as(name: str, victim: Victim, runner: Runner) -> None:
    """The request cannot be understood, so it may be about the worktree that it comes from."""
    outcome = runner.run(victim.job("hook", "before-write", stdin=TEXTS[name], cwd=victim.root / "worktrees/side"))

    assert not outcome.problem
    assert outcome.status == REFUSE, outcome


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LEASES)
def test_a_lease_counts_as_held_if_it_is(name: str, victim: Victim, runner: Runner) -> None:
    LEASES[name](victim.root / LEASE)
    request = json.dumps(REQUESTS["a path"])
    guard = runner.run(victim.job("guard", "worktrees/side/mine"))
    hook = runner.run(victim.job("hook", "before-write", stdin=request))

    assert not [each for each in (guard, hook) if each.problem]
    assert guard.status != 0, guard
    assert hook.status == REFUSE, hook


@pytest.mark.parametrize("where", [".jvs", "src/.jvs", "src/deep/.jvs"])
def test_a_repository_inside_a_leased_worktree_does_not_switch_the_guard_off(
    where: str, victim: Victim, runner: Runner
) -> None:
    inner = victim.root / "worktrees/side" / where
    (inner / "locks").mkdir(parents=True)
    path = str((inner.parent / "main/file").relative_to(victim.root))
    for aim in (path, str((inner.parent / "file").relative_to(victim.root))):
        outcome = runner.run(victim.job("guard", aim))
        assert outcome.status != 0, (aim, outcome)


def test_another_place_for_the_leases_does_not_switch_the_guard_off(victim: Victim, runner: Runner) -> None:
    link(victim.root / ".jvs/locks", victim.home / "docs/empty")
    outcome = runner.run(victim.job("guard", "worktrees/side/mine"))

    assert outcome.status != 0, outcome
