"""What a client has taken lives as long as its server, and is given back when either of them goes."""

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
from tests.cli.commands import environment, holdfast, wait_until
from tests.mcp.clients import Agent, connected, make_shop, run, send, server_pid

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def shop(scratch: Path) -> Path:
    return make_shop(scratch / "shop", "First")


def lease_on(shop: Path, worktree: str = "main") -> Any:
    return Repository(shop).leases.state(worktree)


def was_renewed_after(shop: Path, worktree: str, instant: str) -> bool:
    return bool(lease_on(shop, worktree).lease.last_renewed_at > instant)


def ready(shop: Path) -> list[str]:
    return [each.title for each in open_tracker(shop, actor="human:owner").snapshot().ready()]


async def take_both(agent: Agent, ttl: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A lease, and work with a lease of its own."""
    return await agent("take_lease", ttl=ttl), await agent("claim_next_work", ttl=ttl)


def wait_until_all_has_run_out(shop: Path, taken: dict[str, Any]) -> None:
    """Both leases, and the claim."""
    wait_until(lambda: lease_on(shop).expired and lease_on(shop, taken["worktree"]).expired)
    wait_until(lambda: ready(shop) == ["First"])


def test_when_the_client_goes_everything_is_given_back_and_before_that_it_is_kept_alive(shop: Path) -> None:
    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease, taken = await take_both(agent, "2s")
            for worktree in ("main", taken["worktree"]):
                wait_until(partial(was_renewed_after, shop, worktree, taken["expires_at"]))
                assert not lease_on(shop, worktree).expired  # long past its ttl
            assert lease_on(shop).lease.lock_id == lease["lock_id"]
            assert ready(shop) == []
            Path(taken["path"], "half").write_text("half")
            pid = server_pid(lease)
        assert not psutil.pid_exists(pid)

    run(test)
    assert lease_on(shop) is None
    [worktree] = (each.name for each in (shop / "worktrees").iterdir())
    assert lease_on(shop, worktree) is None
    assert ready(shop) == ["First"]
    assert (shop / "worktrees" / worktree / "half").read_text() == "half"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.sampled(1)
def test_when_the_server_is_asked_to_end_everything_is_given_back(shop: Path, name: str) -> None:
    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease, taken = await take_both(agent, "10m")
            server = psutil.Process(server_pid(lease))
            send(server.pid, name)
            with anyio.move_on_after(30):
                while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                    await anyio.sleep(0.02)
            assert lease_on(shop) is None
            assert lease_on(shop, taken["worktree"]) is None
            assert ready(shop) == ["First"]

    run(test)


@pytest.mark.long
def test_when_the_server_is_killed_what_it_held_runs_out_by_itself(shop: Path) -> None:
    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease, taken = await take_both(agent, "1s")
            send(server_pid(lease), "SIGKILL")
        wait_until_all_has_run_out(shop, taken)
        async with connected(cwd=shop) as other:
            assert (await other("take_lease"))["token"] == lease["token"] + 1
            again = await other("claim_next_work")
            assert (again["id"], again["token"]) == (taken["id"], taken["token"] + 1)
            assert again["taken_over_from"] == "agent:test-client"
            await other("finish_work", outcome="done")

    run(test)


def test_who_has_lost_everything_can_take_it_again(shop: Path) -> None:
    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease, taken = await take_both(agent, "1s")
            send(server_pid(lease), "SIGSTOP")
            wait_until_all_has_run_out(shop, taken)
            send(server_pid(lease), "SIGCONT")
            again, more = await take_both(agent, "10m")
            assert again["token"] == lease["token"] + 1
            assert (more["id"], more["token"]) == (taken["id"], taken["token"] + 1)
            assert (await agent("finish_work", outcome="done"))["succeeded"] is True
            assert (await agent("release_lease"))["lock_id"] == again["lock_id"]

    run(test)
    assert lease_on(shop) is None


def test_the_guard_lets_the_agent_write_where_its_server_holds_the_lease_and_nobody_else(
    shop: Path, tmp_path: Path
) -> None:
    """Hooks of an agent are its children, as the server is; this process is the agent here."""
    stranger = tmp_path / "stranger.py"
    stranger.write_text(
        "import os, subprocess, sys\n"
        "parent = os.getppid()\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() in (parent, int(sys.argv[1])): pass\n"  # until nobody above it is ours
        "command = [sys.executable, '-m', 'holdfast', 'guard', sys.argv[2]]\n"
        "ended = subprocess.run(command, capture_output=True).returncode\n"
        "open(sys.argv[3] + '.new', 'w').write(str(ended))\n"
        "os.rename(sys.argv[3] + '.new', sys.argv[3])\n"
    )

    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease = await agent("take_lease", ttl="10m")
            assert str(os.getpid()) in lease["on_behalf_of"].split(":")
            assert holdfast("guard", shop / "main/file").returncode == 0
            answer = tmp_path / "answer"
            subprocess.Popen(
                [sys.executable, stranger, str(os.getpid()), shop / "main/file", answer], env=environment()
            ).wait()
            wait_until(answer.exists)
            assert answer.read_text() == "4"

    run(test)


@pytest.mark.long
def test_agents_of_one_process_have_servers_and_guards_of_their_own_by_their_names(shop: Path) -> None:
    """This process stands for a program with two agents, each of which has started its server."""
    alice, bob = {"HOLDFAST_ACTOR": "agent:alice"}, {"HOLDFAST_ACTOR": "agent:bob"}

    async def test() -> None:
        async with connected(cwd=shop, env=alice) as hers, connected("--actor", "agent:bob", cwd=shop) as his:
            lease = await hers("take_lease", ttl="10m")
            assert lease["actor"] == "agent:alice"
            assert (await his.failure("take_lease"))["code"] == "E_LOCK_CONFLICT"
            assert holdfast("guard", shop / "main/file", env=alice).returncode == 0
            assert holdfast("guard", shop / "main/file", env=bob).returncode == 4

    run(test)


def test_work_and_leases_that_were_taken_over_are_refused_by_their_tokens(shop: Path) -> None:
    """The server is stopped past the ttl, others take over, and it wakes up again."""

    async def test() -> None:
        async with connected(cwd=shop) as agent:
            lease, taken = await take_both(agent, "1s")
            send(server_pid(lease), "SIGSTOP")
            wait_until_all_has_run_out(shop, taken)
            async with connected(cwd=shop, name="thief") as other:
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
