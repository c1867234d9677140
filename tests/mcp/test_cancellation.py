"""A cancelled request leaves nothing behind and blocks no other request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from holdfast.mcp.calls import Call, carry_out
from holdfast.mcp.held import ClientHoldings, ServerSettings
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from tests.cli.commands import PATIENCE
from tests.mcp.clients import ERAS, Agent, connected, make_repo, run
from tests.support.homes import records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process semantics"),
]


@pytest.fixture
def repo(scratch: Path) -> Path:
    return make_repo(scratch / "repo", "First")


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition without blocking the event loop."""
    with anyio.fail_after(PATIENCE):
        while not condition():
            await anyio.sleep(0.01)


async def cancelled(agent: Agent, when: Callable[[], object], tool: str, **arguments: Any) -> None:
    """Call a tool and cancel the request once a condition holds."""
    answers: list[Any] = []

    async def request() -> None:
        answers.append(await agent(tool, **arguments))

    async with anyio.create_task_group() as group:
        group.start_soon(request)
        await until(when)
        group.cancel_scope.cancel()
    assert answers == []


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.sampled(1)
def test_a_cancelled_waiter_leaves_the_queue(repo: Path, era: str) -> None:
    repository = Repository(repo)
    repository.worktrees.create("side")

    def waiters(worktree: str) -> int:
        state = repository.leases.state(worktree)
        return 0 if state is None else len(state.waiters)

    async def test() -> None:
        async with connected(cwd=repo, mode=era) as agent:
            with repository.lease("main", ttl=600), repository.lease("side", ttl=600):
                await cancelled(agent, lambda: waiters("main") == 1, "take_lease", wait="10m")
                await until(lambda: waiters("main") == 0)

                options = {"worktree": "side", "wait": "10m"}
                await cancelled(agent, lambda: waiters("side") == 1, "claim_next_work", **options)
                await until(lambda: waiters("side") == 0)
            tracker = open_tracker(records_of(repo), actor="human:owner")
            await until(lambda: tracker.snapshot().ready())
            assert (await agent("who"))["holdings"] == []
            assert (await agent("take_lease"))["token"] == 2

    run(test)


@pytest.mark.long
def test_many_waiters_block_no_other_request_and_those_of_one_client_share_a_lease(repo: Path) -> None:
    repository = Repository(repo)

    async def test() -> None:
        async with connected(cwd=repo) as agent:
            with repository.lease("main", ttl=600) as held:
                async with anyio.create_task_group() as group:
                    for _ in range(50):
                        group.start_soon(lambda: agent("take_lease", wait="10m"))
                    await until(lambda: len(_queue(repository)) > 1)
                    assert (await agent("who"))["holdings"]
                    group.cancel_scope.cancel()
                await until(lambda: len(_queue(repository)) == 0)
                leases: list[str] = []

                async def take() -> None:
                    leases.append((await agent("take_lease", wait="10m"))["lock_id"])

                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(take)
                    await until(lambda: len(_queue(repository)) > 1)
                    held.release()
                assert len(leases) == 5
                assert len(set(leases)) == 1

    run(test)


def test_a_step_that_completes_after_its_cancellation_is_undone(tmp_path: Path) -> None:
    """The step can no longer stop: it completes and is then undone."""
    done: list[str] = []

    def step(call: Call) -> dict[str, Any]:
        call.undo = lambda: done.append("undone")
        begun.set()
        assert call.cancelled.wait(PATIENCE)
        done.append("done")
        return {}

    async def tell(*progress: object) -> None:
        raise AssertionError("there is no progress")

    begun = threading.Event()

    async def test() -> None:
        call = Call(
            ServerSettings(here=tmp_path, repo=None, data_directory=tmp_path),
            [],
            "somebody",
            ClientHoldings(),
        )
        async with anyio.create_task_group() as group:
            group.start_soon(carry_out, call, step, tell)
            await anyio.to_thread.run_sync(begun.wait)
            group.cancel_scope.cancel()

    run(test)
    assert done == ["done", "undone"]


def _queue(repository: Repository) -> tuple[object, ...]:
    state = repository.leases.state("main")
    return () if state is None else state.waiters


def test_a_cancelled_snapshot_publishes_nothing(repo: Path) -> None:
    for number in range(200):
        directory = repo / f"main/{number}"
        directory.mkdir()
        for name in range(40):
            (directory / str(name)).write_text(f"{number} {name}")
    repository = Repository(repo)

    def begun() -> bool:
        place = repository.context.paths.scratch
        return place.is_dir() and any(each.is_dir() for each in place.iterdir())

    async def test() -> None:
        async with connected(cwd=repo) as agent:
            await cancelled(agent, begun, "snapshot", note="never")
            await until(lambda: not begun())
            assert (await agent("history"))["snapshots"] == []
            assert (await agent("who"))["holdings"] == []
            made = await agent("snapshot", note="whole")
            assert made["files"] == 200 * 40

    run(test)
