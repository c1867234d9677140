"""The leases and claims of a client live as long as its server, and are released when either ends."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from tests.cli.commands import environment, holdfast, stop_between_commits, wait_until
from tests.mcp.clients import Agent, connected, make_repo, run, send, server_pid
from tests.support.homes import records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
]


@pytest.fixture
def repo(scratch: Path) -> Path:
    return make_repo(scratch / "repo", "First")


def lease_on(repo: Path, worktree: str = "main") -> Any:
    return Repository(repo).leases.state(worktree)


def was_renewed_after(repo: Path, worktree: str, instant: str) -> bool:
    return bool(lease_on(repo, worktree).lease.last_renewed_at > instant)


def ready(repo: Path) -> list[str]:
    return [each.title for each in open_tracker(records_of(repo), actor="human:owner").snapshot().ready()]


async def take_both(agent: Agent, ttl: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a lease, and work that has its own lease."""
    return await agent("take_lease", ttl=ttl), await agent("claim_next_work", ttl=ttl)


def wait_until_all_has_expired(repo: Path, taken: dict[str, Any]) -> None:
    """Wait for both leases and the claim."""
    wait_until(lambda: lease_on(repo).expired and lease_on(repo, taken["worktree"]).expired)
    wait_until(lambda: ready(repo) == ["First"])


def test_everything_is_renewed_while_the_client_lives_and_released_when_it_exits(repo: Path) -> None:
    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease, taken = await take_both(agent, "2s")
            for worktree in ("main", taken["worktree"]):
                wait_until(partial(was_renewed_after, repo, worktree, taken["expires_at"]))
                assert not lease_on(repo, worktree).expired  # long past its ttl
            assert lease_on(repo).lease.lock_id == lease["lock_id"]
            assert ready(repo) == []
            Path(taken["path"], "half").write_text("half")
            pid = server_pid(lease)
        assert not psutil.pid_exists(pid)

    run(test)
    assert lease_on(repo) is None
    [worktree] = (each.name for each in (repo / "worktrees").iterdir())
    assert lease_on(repo, worktree) is None
    assert ready(repo) == ["First"]
    assert (repo / "worktrees" / worktree / "half").read_text() == "half"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.sampled(1)
def test_a_terminated_server_releases_everything(repo: Path, name: str) -> None:
    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease, taken = await take_both(agent, "10m")
            server = psutil.Process(server_pid(lease))
            send(server.pid, name)
            with anyio.move_on_after(30):
                while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                    await anyio.sleep(0.02)
            assert lease_on(repo) is None
            assert lease_on(repo, taken["worktree"]) is None
            assert ready(repo) == ["First"]

    run(test)


@pytest.mark.long
def test_the_leases_and_claims_of_a_killed_server_expire(repo: Path) -> None:
    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease, taken = await take_both(agent, "1s")
            send(server_pid(lease), "SIGKILL")
        wait_until_all_has_expired(repo, taken)
        async with connected(cwd=repo, fresh=True) as other:
            assert (await other("take_lease"))["token"] == lease["token"] + 1
            again = await other("claim_next_work")
            assert (again["id"], again["token"]) == (taken["id"], taken["token"] + 1)
            assert again["taken_over_from"] == "agent:test-client"
            await other("finish_work", outcome="done")

    run(test)


@pytest.mark.long
def test_a_client_that_lost_everything_can_take_it_again(repo: Path) -> None:
    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease, taken = await take_both(agent, "1s")
            stop_between_commits(server_pid(lease))
            wait_until_all_has_expired(repo, taken)
            send(server_pid(lease), "SIGCONT")
            again, more = await take_both(agent, "10m")
            assert again["token"] == lease["token"] + 1
            assert (more["id"], more["token"]) == (taken["id"], taken["token"] + 1)
            assert (await agent("finish_work", outcome="done"))["succeeded"] is True
            assert (await agent("release_lease"))["lock_id"] == again["lock_id"]

    run(test)
    assert lease_on(repo) is None


def test_the_guard_admits_only_the_agent_whose_server_holds_the_lease(repo: Path, tmp_path: Path) -> None:
    """Hooks are children of the agent, and so is its server; this process plays the agent."""
    stranger = tmp_path / "stranger.py"
    stranger.write_text(
        "import os, subprocess, sys\n"
        "parent = os.getppid()\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() in (parent, int(sys.argv[1])): pass\n"  # until none of its ancestors is ours
        "command = [sys.executable, '-m', 'holdfast', 'guard', sys.argv[2]]\n"
        "ended = subprocess.run(command, capture_output=True).returncode\n"
        "open(sys.argv[3] + '.new', 'w').write(str(ended))\n"
        "os.rename(sys.argv[3] + '.new', sys.argv[3])\n"
    )

    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease = await agent("take_lease", ttl="10m")
            assert str(os.getpid()) in lease["on_behalf_of"].split(":")
            assert holdfast("guard", repo / "main/file").returncode == 0
            answer = tmp_path / "answer"
            subprocess.Popen(
                [sys.executable, stranger, str(os.getpid()), repo / "main/file", answer], env=environment()
            ).wait()
            wait_until(answer.exists)
            assert answer.read_text() == "4"

    run(test)


@pytest.mark.long
def test_agents_in_one_process_are_told_apart_by_their_actor_names(repo: Path) -> None:
    """This process plays a program with two agents, each with its own server."""
    alice, bob = {"HOLDFAST_ACTOR": "agent:alice"}, {"HOLDFAST_ACTOR": "agent:bob"}

    async def test() -> None:
        async with (
            connected(cwd=repo, env=alice, fresh=True) as hers,
            connected("--actor", "agent:bob", cwd=repo, fresh=True) as his,
        ):
            lease = await hers("take_lease", ttl="10m")
            assert lease["actor"] == "agent:alice"
            assert (await his.failure("take_lease"))["code"] == "E_LOCK_CONFLICT"
            assert holdfast("guard", repo / "main/file", env=alice).returncode == 0
            assert holdfast("guard", repo / "main/file", env=bob).returncode == 4

    run(test)


def test_a_server_whose_work_was_taken_over_is_refused_by_its_tokens(repo: Path) -> None:
    """The server is stopped past the ttl, another client takes over, and the server resumes."""

    async def test() -> None:
        async with connected(cwd=repo, fresh=True) as agent:
            lease, taken = await take_both(agent, "1s")
            stop_between_commits(server_pid(lease))
            wait_until_all_has_expired(repo, taken)
            async with connected(cwd=repo, name="thief", fresh=True) as other:
                stolen = await other("take_lease", ttl="10m")
                await other("claim_next_work", ttl="10m")
                send(server_pid(lease), "SIGCONT")
                for tool, arguments in (("snapshot", {}), ("finish_work", {"outcome": "done"})):
                    told = await agent.failure(tool, **arguments)
                    assert told["code"] in ("E_LOCK_NOT_HELD", "E_LOCK_EXPIRED", "E_FENCING_MISMATCH"), told
                conflict = await agent.failure("take_lease")
                assert (conflict["code"], conflict["lock_id"]) == ("E_LOCK_CONFLICT", stolen["lock_id"])
                done = await other("finish_work", outcome="done")
                assert done["succeeded"] is True

    run(test)
