"""Every tool: its effect, its answer (the same as the command line's) and its failures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import MCPError

from holdfast.repository.repository import Repository
from tests.cli.commands import data, error, holdfast
from tests.mcp.clients import ERAS, NAME, Agent, connected, make_repo, run
from tests.repository.stages import files_stored

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process semantics"),
]

PASSING = ("at", "time_left", "age")
"""Fields that differ on every read."""


def settled(value: Any) -> Any:
    """The value without the fields that depend on the time of reading."""
    if isinstance(value, dict):
        return {name: settled(each) for name, each in value.items() if name not in PASSING}
    return [settled(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def repo(scratch: Path) -> Path:
    root = make_repo(scratch / "repo", "First", "Second")
    (root / "main/text").write_text("one\n")
    return root


def command(repo: Path, *arguments: str) -> Any:
    """The data that a command prints with --json."""
    return data(holdfast(*arguments, "--json", cwd=repo))


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.sampled(1)
def test_tools_and_resources_are_described(repo: Path, era: str) -> None:
    async def test() -> None:
        async with connected(cwd=repo, mode=era, fresh=True) as agent:
            assert "claim_next_work" in (agent.client.instructions or "")
            tools = {each.name: each for each in (await agent.client.list_tools()).tools}
            assert len(tools) <= 10
            hints = {name: each.annotations for name, each in tools.items()}
            assert all(each is not None and each.open_world_hint is False for each in hints.values())
            assert {name for name, each in hints.items() if each and each.read_only_hint} == {
                "who",
                "history",
            }
            assert {name for name, each in hints.items() if each and each.destructive_hint} == {"restore"}
            assert {name for name, each in hints.items() if each and each.idempotent_hint} == {
                "who",
                "history",
                "take_lease",
            }
            for tool in tools.values():
                assert tool.description
                assert tool.input_schema["type"] == "object"
                assert tool.input_schema["additionalProperties"] is False
                for name, field in tool.input_schema["properties"].items():
                    assert field.get("description") or "enum" in field or name == "labels", (tool.name, name)
                    assert field.get("type") != "string" or "maxLength" in field or "enum" in field
            resources = [each.uri for each in (await agent.client.list_resources()).resources]
            assert "holdfast://issues/ready" in resources
            templates = (await agent.client.list_resource_templates()).resource_templates
            assert "holdfast://history/{worktree}" in [each.uri_template for each in templates]

    run(test)


def test_leases_and_snapshots(repo: Path) -> None:
    async def test() -> None:
        async with connected(cwd=repo, mode="legacy") as agent:
            await leases(agent, repo)
            await snapshots(agent, repo)

    run(test)
    assert command(repo, "who")["holdings"] == []


async def leases(agent: Agent, repo: Path) -> None:
    lease = await agent("take_lease", ttl="10m", purpose="tests")  # the long ttl avoids a renewal during the comparison
    assert lease["purpose"] == f"{NAME}: tests"
    assert lease == command(repo, "lease", "status")["lease"]
    assert settled(await agent("who")) == settled(command(repo, "who"))
    assert settled(await agent.read("who")) == settled(command(repo, "who"))
    assert settled(await agent.read("worktrees")) == settled(command(repo, "worktree", "list"))

    again = await agent("take_lease", ttl="5m")  # already held: renewed
    assert (again["lock_id"], again["token"], again["ttl"]) == (lease["lock_id"], 1, 300.0)

    refused = holdfast("lease", "acquire", "--json", cwd=repo)
    assert error(refused)["holder_id"] == lease["holder_id"]
    assert error(refused)["liveness"] == "alive"

    released = await agent("release_lease")
    assert released["lock_id"] == lease["lock_id"]
    assert command(repo, "lease", "status")["state"] == "free"
    assert (await agent.failure("release_lease"))["code"] == "E_LOCK_NOT_HELD"

    other = command(repo, "lease", "acquire", "--ttl", "5m", "--purpose", "\x1b[2J\x9b")
    told = await agent.failure("take_lease")
    expected = error(holdfast("lease", "acquire", "--json", cwd=repo))
    assert told["code"] == expected["code"] == "E_LOCK_CONFLICT"
    assert told["retryable"] is True
    shown = (await agent.client.call_tool("take_lease", {})).content[0]
    assert isinstance(shown, types.TextContent)
    assert "\\x1b[2J\\x9b" in shown.text
    assert all(line.isprintable() for line in shown.text.splitlines())
    everything = (await agent.client.call_tool("who", {})).content[0]
    assert isinstance(everything, types.TextContent)
    assert everything.text.isprintable()
    assert set(told) == set(expected)
    assert (await agent.failure("take_lease", wait="100ms"))["code"] == "E_LOCK_TIMEOUT"
    assert (await agent.failure("snapshot"))["code"] == "E_LOCK_CONFLICT"
    (repo / "main/text").write_text("zero\n")
    await agent("snapshot", lock_id=other["lock_id"])
    command(repo, "lease", "release", "--lock-id", other["lock_id"])

    for wrong in ({"worktree": "x" * 129}, {"purpose": "x" * 201}, {"nonsense": 1}, {"ttl": "soon"}):
        assert (await agent.failure("take_lease", **wrong))["code"] in ("E_USAGE", "E_SETTING_INVALID")
    assert (await agent.failure("take_lease", worktree="../main"))["code"] == "E_NAME_INVALID"
    assert (await agent.failure("take_lease", worktree="nowhere"))["code"] == "E_NOT_FOUND"


async def snapshots(agent: Agent, repo: Path) -> None:
    (repo / "main/text").write_text("one\n")
    seen: list[tuple[float, float | None, str | None]] = []

    async def tell(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    result = await agent.client.call_tool("snapshot", {"note": "the first", "tag": "v1"}, progress_callback=tell)
    first = result.structured_content
    assert [progress for progress, _, _ in seen] == [1.0]
    assert first["note"] == "the first"
    (repo / "main/text").write_text("two\n")
    lease = await agent("take_lease")
    second = await agent("snapshot", note="the second")
    assert (second["lock_id"], second["token"]) == (lease["lock_id"], lease["token"])
    assert second["parent_id"] == first["snapshot_id"]
    shown = command(repo, "show", "v1")
    assert {**shown, "tag": "v1"}.items() >= first.items()

    expected = command(repo, "history")
    assert await agent("history", limit=50) == expected
    assert await agent.read("history/main") == await agent.read("history") == expected
    assert await agent("history", all_worktrees=True) == command(repo, "history", "--all", "--limit", "20")
    assert (await agent("history", limit=1))["more"] is True
    assert (await agent.failure("history", worktree="nowhere"))["code"] == "E_NOT_FOUND"
    assert (await agent.failure("snapshot", tag="v1"))["code"] == "E_ALREADY_EXISTS"
    assert (await agent.failure("snapshot", note="x" * 4001))["code"] == "E_USAGE"

    plan = await agent("restore", snapshot="v1", in_place=True, reason="try", dry_run=True)
    assert plan == command(repo, "restore", "v1", "--inplace", "--reason", "try", "--dry-run")
    assert (await agent.failure("restore", snapshot="v1", in_place=True))["code"] == "E_USAGE"
    assert (await agent.failure("restore", snapshot="v1", reason="no"))["code"] == "E_USAGE"
    assert (await agent.failure("restore", snapshot="nothing"))["code"] == "E_NOT_FOUND"

    (repo / "main/text").write_text("unsaved\n")
    restored = await agent("restore", snapshot="v1", in_place=True, reason="it was better")
    assert (repo / "main/text").read_text() == "one\n"
    assert files_stored(Repository(repo).context, restored["kept_snapshot_id"])["text"] == "unsaved\n"
    assert (await agent("release_lease"))["lock_id"] == lease["lock_id"]

    into = await agent("restore", snapshot="head~1", into="copy", dry_run=True)
    assert into == command(repo, "restore", "head~1", "copy", "--dry-run")
    made = await agent("restore", snapshot="head~1", into="copy")
    assert made == {**into, "dry_run": False}
    assert (repo / "worktrees/copy/text").read_text() == "unsaved\n"


def test_work_and_the_ledger(repo: Path) -> None:
    command(repo, "snapshot", "-m", "what the work begins with")

    async def test() -> None:
        async with connected("--actor", "agent:tester", cwd=repo) as agent:
            await work(agent, repo)
            await ledger(agent, repo)

    run(test)
    assert command(repo, "who")["holdings"] == []


async def work(agent: Agent, repo: Path) -> None:
    assert await agent.read("issues/ready") == command(repo, "ready")
    first, second = command(repo, "ready")["issues"]

    taken = await agent("claim_next_work", ttl="10m")
    assert (taken["id"], taken["assignee"]) == (first["id"], "agent:tester")
    assert settled(await agent.read(f"issues/{first['id'][:8]}")) == settled(
        command(repo, "issue", "show", first["id"])
    )
    holdings = {each["kind"]: each for each in (await agent("who"))["holdings"]}
    assert holdings["issue"]["purpose"] == NAME
    assert holdings["lease"]["purpose"].startswith(NAME)
    assert (await agent.failure("claim_next_work", issue=first["id"]))["code"] == "E_ISSUE_CLAIMED"
    assert (await agent.failure("release_lease", worktree=taken["worktree"]))["code"] == "E_LOCK_NOT_HELD"
    Path(taken["path"], "half").write_text("half")
    kept = await agent("snapshot", worktree=taken["worktree"], note="half of it")
    assert kept["lock_id"] == taken["lock_id"]

    Path(taken["path"], "result").write_text("whole")
    done = await agent("finish_work", outcome="done")
    assert (done["issue_id"], done["state"], done["succeeded"]) == (first["id"], "done", True)
    assert files_stored(Repository(repo).context, done["snapshot_id"])["result"] == "whole"
    event = command(repo, "ledger", "show", str(done["sequence"]))["event"]
    assert (event["type"], event["claim_token"]) == ("work_done", taken["claim_token"])
    assert (await agent.failure("finish_work", outcome="done"))["code"] == "E_NOT_FOUND"

    again = await agent("claim_next_work", worktree=taken["worktree"])
    assert (again["claim_token"], again["token"]) == (1, taken["token"] + 1)
    failed = await agent("finish_work", outcome="failed", reason="too hard", issue=second["id"][:8])
    assert (failed["claim_token"], failed["token"]) == (1, taken["token"] + 1)
    assert (failed["issue_id"], failed["state"], failed["succeeded"]) == (second["id"], "ready", False)
    await agent("claim_next_work", issue=second["id"])
    released = await agent("finish_work", outcome="released")
    assert (released["state"], released["snapshot_id"], released["sequence"]) == ("ready", None, None)
    assert (await agent.failure("finish_work", outcome="perhaps"))["code"] == "E_USAGE"

    more = {"labels": ["area:parser"], "touches": ["src/parser/**"]}
    added = await agent("add_work", title="Third", depends_on=[second["id"][:8]], **more)
    shown = command(repo, "issue", "show", added["id"])
    assert (shown["title"], shown["blocked_by"]) == ("Third", [second["id"]])
    assert {name: shown[name] for name in more} == more
    assert (await agent.failure("add_work", title="x" * 201))["code"] == "E_USAGE"
    await agent("claim_next_work")
    await agent("finish_work", outcome="done")
    await agent("claim_next_work", issue=added["id"])
    await agent("finish_work", outcome="done")
    nothing = await agent.failure("claim_next_work")
    expected = error(holdfast("agent", "run", "--next", "--json", "--", "true", cwd=repo), on="stderr")
    assert nothing == expected
    with pytest.raises(MCPError, match="E_NOT_FOUND") as raised:
        await agent.read("issues/nothing")
    assert raised.value.error.data["hint"]


async def ledger(agent: Agent, repo: Path) -> None:
    made = await agent("append_to_ledger", event={"type": "note", "text": "é"})
    assert made == command(repo, "ledger", "show", str(made["sequence"]))
    assert await agent.read(f"ledger/{made['sequence']}") == made
    assert await agent.read("ledger/tail") == command(repo, "ledger", "log", "--limit", "50")
    late = await agent.failure("append_to_ledger", event={"type": "note"}, if_sequence=0)
    expected = error(holdfast("ledger", "append", '{"type":"note"}', "--if-sequence", "0", "--json", cwd=repo))
    assert late == expected
    assert (await agent.failure("append_to_ledger", event={"text": "no type"}))["code"] == "E_USAGE"
    large = {"type": "note", "text": "x" * (1 << 20)}
    assert (await agent.failure("append_to_ledger", event=large))["code"] == "E_TOO_LARGE"
    for address in ("nothing", "ledger/x", "issues/ready/more", f"history/{'x' * 300}"):
        with pytest.raises(MCPError):
            await agent.read(address)
    with pytest.raises(MCPError, match="no tool"):
        await agent("nothing")
