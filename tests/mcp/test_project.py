"""The project of a client: from its roots, else the options of the server, else the server's working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mcp_types as types
import pytest

from holdfast.errors import NotFound
from holdfast.mcp.held import ServerSettings, actor_of, find_project, path_of
from holdfast.repository.repository import Repository
from tests.cli.commands import error, holdfast
from tests.mcp.clients import ERAS, connected, make_repo, run
from tests.support.homes import records_of

pytestmark = [
    pytest.mark.both_homes,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process semantics"),
]


@pytest.fixture
def repos(scratch: Path) -> tuple[Path, Path]:
    return make_repo(scratch / "one"), make_repo(scratch / "two")


def settings(here: Path, repo: Path | None = None, actor: str | None = None) -> ServerSettings:
    return ServerSettings(here=here, repo=repo, data_directory=here, actor=actor)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.sampled(1)
def test_the_roots_of_the_client_take_precedence_over_the_option(
    repos: tuple[Path, Path], tmp_path: Path, era: str
) -> None:
    one, two = repos

    async def test() -> None:
        async with connected("--repo", one, cwd=tmp_path, mode=era, roots=[tmp_path, two / "main"]) as agent:
            assert (await agent.read("worktrees"))["root"] == str(records_of(two))
            assert (await agent("who"))["root"] == str(records_of(two))

    run(test)


def test_the_project_follows_the_roots_when_they_change(repos: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = repos
    roots = [one]

    async def test() -> None:
        async with connected(cwd=tmp_path, mode="legacy", roots=roots) as agent:
            lease = await agent("take_lease")
            roots[:] = [two]
            await agent.client.session.send_notification(types.RootsListChangedNotification())
            assert (await agent("who"))["root"] == str(records_of(two))
            roots[:] = [one]
            await agent.client.session.send_notification(types.RootsListChangedNotification())
            assert (await agent("take_lease"))["lock_id"] == lease["lock_id"]  # it was kept

    run(test)


def test_without_roots_the_option_wins_then_the_environment_then_the_directory(
    repos: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = repos
    # Options reach the settings directly, so only the environment needs a real server.

    async def test() -> None:
        async with connected(cwd=tmp_path, env={"HOLDFAST_REPO": str(two)}) as agent:
            assert (await agent("who"))["root"] == str(records_of(two))

    run(test)
    assert find_project(settings(two), []).root == records_of(two)
    assert find_project(settings(two, repo=one), []).root == records_of(one)
    assert find_project(settings(two, repo=one / "main"), []).root == records_of(one)


def test_roots_without_a_project_are_skipped(repos: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = repos
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    assert find_project(settings(elsewhere), [elsewhere.as_uri(), two.as_uri()]).root == records_of(two)
    assert find_project(settings(elsewhere, repo=one), [elsewhere.as_uri()]).root == records_of(one)
    with pytest.raises(NotFound, match="elsewhere"):
        find_project(settings(one), [elsewhere.as_uri()])  # not the working directory: the client did not offer it
    assert find_project(settings(one), ["https://example.org/two"]).root == records_of(one)


def test_the_worktree_of_the_client_is_the_default(repos: tuple[Path, Path]) -> None:
    one, _ = repos
    assert holdfast("worktree", "create", "side", cwd=one).returncode == 0

    project = find_project(settings(one), [(one / "worktrees/side").as_uri()])

    repository = project.repository()
    assert project.root == records_of(one)
    assert project.worktree(repository, None) == "side"
    assert project.worktree(repository, "main") == "main"
    assert find_project(settings(one), []).worktree(repository, None) == "main"


def test_a_directory_called_ledger_in_a_worktree_is_not_mistaken_for_a_project(repos: tuple[Path, Path]) -> None:
    one, _ = repos
    (one / "main/ledger").mkdir()

    assert find_project(settings(one), [(one / "main").as_uri()]).root == records_of(one)


def test_a_root_is_a_directory_on_this_machine() -> None:
    assert path_of("file:///a%20b/c") == Path("/a b/c")
    assert path_of("file://localhost/a") == Path("/a")
    assert path_of("file://elsewhere/a") is None
    assert path_of("https://example.org/a") is None


def test_work_is_claimed_in_the_name_of_the_client_unless_an_actor_is_set(tmp_path: Path) -> None:
    assert actor_of(settings(tmp_path), "Claude Code") == "agent:Claude-Code"
    assert actor_of(settings(tmp_path), "!") == "agent:mcp"
    assert actor_of(settings(tmp_path, actor="human:ann"), "Claude Code") == "human:ann"


def test_an_inherited_lease_is_used_and_left_to_its_holder(repos: tuple[Path, Path]) -> None:
    one, _ = repos

    async def test() -> None:
        with Repository(one).lease("main", ttl=600) as held:
            environment = {
                "HOLDFAST_REPO": str(one),
                "HOLDFAST_WORKTREE": "main",
                "HOLDFAST_LOCK_ID": held.lock_id,
                "HOLDFAST_TOKEN": str(held.token),
            }
            async with connected(cwd=one, env=environment) as agent:
                assert (await agent("take_lease", ttl="5m"))["lock_id"] == held.lock_id
                assert (await agent("snapshot"))["lock_id"] == held.lock_id
                assert (await agent.failure("release_lease"))["code"] == "E_LOCK_NOT_HELD"
            held.check()
            held.renew()

    run(test)


def test_without_the_sdk_the_error_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "mcp_types.py").write_text("raise ImportError('not installed', name='mcp_types')\n")

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = holdfast("mcp", "--json", env={"PYTHONPATH": path}, cwd=tmp_path)

    told = error(result, on="stderr")
    assert (result.returncode, told["code"], told["extra"]) == (2, "E_EXTRA_MISSING", "mcp")
    assert "pip install 'mcp>=2'" in told["hint"]


def test_a_store_that_is_not_approved_is_not_contacted_and_the_agent_is_told_how_to_approve_it(
    repos: tuple[Path, Path], tmp_path: Path
) -> None:
    one, _ = repos
    place = records_of(one) / ".holdfast"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(f'{{"schema_version": 1, "store": "file://{tmp_path}/elsewhere"}}')

    async def test() -> None:
        async with connected("--repo", one, cwd=tmp_path) as agent:
            failure = await agent.failure("take_lease")
            assert failure["code"] == "E_NOT_APPROVED"
            assert f"holdfast trust --repo {one}" in failure["hint"]

    run(test)
    assert not (tmp_path / "elsewhere").exists()
