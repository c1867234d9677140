"""Two machines with nothing in common but a server and a git remote: each has its own network, hostname and disk.

A machine is a network namespace (`tests.support.machines`); a command on it also has a mount namespace in which the
machine's own disk is at `disk/`, and the disks of the others cannot be reached. The remote is a bare repository behind
`git daemon`. This needs root and `ip`; elsewhere the end of the run lists it as NOT RUN HERE.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.commands import HOLDFAST, PATIENCE, environment
from tests.locks.workers import wait_until
from tests.repository.clones import make_remote
from tests.store.server_storm import site_of
from tests.support.homes import git
from tests.support.machines import Network, entered
from tests.support.servers import Machine, dies_with_us, enter

pytest.importorskip("psycopg", reason="psycopg is not installed here")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces of Linux")

_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PORT = 9418
_AGENT = 'echo "$HOLDFAST_ISSUE_ID" | tee -a "$HOME/taken" > "done-$HOLDFAST_ISSUE_ID"'
_WORK = """\
status=0
while [ $status -eq 0 ]; do "$@" agent run --next --land -- sh -c "$AGENT"; status=$?; done
[ $status -eq 3 ]  # there is nothing left to do
"""


class Box(NamedTuple):
    """A machine with a disk of its own, which its commands see at `disk`."""

    name: str
    machine: Machine
    disks: Path
    disk: Path

    @property
    def project(self) -> Path:
        return self.disk / "project"

    def start(self, *words: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        variables = {"XDG_DATA_HOME": str(self.disk / "data"), "HOME": str(self.disk), "AGENT": _AGENT}
        return subprocess.Popen(
            [str(each) for each in words],
            env=environment(variables),
            preexec_fn=self._prepare(cwd or self.project),  # noqa: PLW1509
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _prepare(self, cwd: Path) -> Callable[[], None]:
        libc = ctypes.CDLL(None, use_errno=True)
        own, disks, disk = (os.fsencode(each) for each in (self.disks / self.name, self.disks, self.disk))

        def check(result: int) -> None:
            if result != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the machine")

        def prepare() -> None:
            enter(self.machine.namespace or "")
            check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS))
            check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
            check(libc.mount(own, disk, None, _MS_BIND, None))
            check(libc.mount(b"tmpfs", disks, b"tmpfs", 0, None))  # nobody else's disk can be seen
            check(libc.sethostname(self.name.encode(), len(self.name)))
            os.chdir(cwd)
            dies_with_us()

        return prepare

    def run(self, *words: str | Path, cwd: Path | None = None, status: int = 0) -> str:
        process = self.start(*words, cwd=cwd)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == status, f"{words}: {process.returncode}\n{output}\n{errors}"
        return output if status == 0 else output + errors

    def holdfast(self, *words: str, status: int = 0) -> str:
        return self.run(*HOLDFAST, *words, status=status)

    def data(self, *words: str) -> Any:
        return json.loads(self.holdfast(*words, "--json"))["data"]

    def clone(self, remote: str) -> None:
        self.run("git", "clone", "-q", remote, "project", cwd=self.disk)
        for setting in ("user.name=person", "user.email=person@example", "gc.auto=0", "core.fsync=none"):
            self.run("git", "config", *setting.split("="))


class World(NamedTuple):
    store: str
    remote: str
    bare: Path
    alpha: Box
    beta: Box
    network: Network


@pytest.fixture(params=["postgresql", pytest.param("etcd", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest, network: Network, server_scratch: Path, scratch: Path) -> Iterator[World]:
    """A repository that alpha has made, and beta has nothing of."""
    if shutil.which("git") is None or not (Path(git("--exec-path")) / "git-daemon").exists():
        pytest.skip("git daemon is not installed")
    (scratch / "served").mkdir()
    bare = make_remote(scratch / "served" / "project.git")
    boxes = []
    for name in ("alpha", "beta"):
        (scratch / "disks" / name).mkdir(parents=True)
        boxes.append(Box(name, network.machine(), scratch / "disks", scratch / "disk"))
    (scratch / "disk").mkdir()
    host = network.machine()
    with site_of(request.param, network, server_scratch) as site, _daemon(host, scratch / "served"):
        made = World(site.url, f"git://{host.address}/project.git", bare, boxes[0], boxes[1], network)
        made.alpha.clone(made.remote)
        made.alpha.holdfast("init", "--store", made.store)
        made.alpha.holdfast("issue", "init")
        made.beta.clone(made.remote)
        yield made


@contextlib.contextmanager
def _daemon(host: Machine, directory: Path) -> Iterator[None]:
    program = Path(git("--exec-path")) / "git-daemon"  # itself: 'git daemon' would leave its child behind
    options = ("--export-all", "--enable=receive-pack", f"--base-path={directory}", f"--listen={host.address}")

    def prepare() -> None:
        enter(host.namespace or "")
        dies_with_us()

    command = [str(program), *options, f"--port={_PORT}", "--reuseaddr", str(directory)]
    process = subprocess.Popen(command, preexec_fn=prepare, stderr=subprocess.DEVNULL)  # noqa: PLW1509
    try:
        wait_until(lambda: _listens(host))
        yield
    finally:
        process.kill()
        process.wait()


def _listens(host: Machine) -> bool:
    with entered(host.namespace or ""), contextlib.suppress(OSError):
        socket.create_connection((host.address, _PORT), timeout=1.0).close()
        return True
    return False


def test_two_machines_work_through_one_queue(world: World) -> None:
    """Nobody takes an issue twice, everything lands, and each machine shows what the other does."""
    alpha, beta = world.alpha, world.beta
    ids = [alpha.data("issue", "create", f"part {number}")["id"] for number in range(4)]

    joined = beta.data("join", world.store)

    assert (joined["name"], joined["joined"]) == ("beta", True)
    assert {each["id"] for each in beta.data("issue", "list")["issues"]} == set(ids)
    working = [box.start("sh", "-c", _WORK, "work", *HOLDFAST) for box in (alpha, beta)]
    for process in working:
        output, errors = process.communicate(timeout=4 * PATIENCE)
        assert process.returncode == 0, f"{output}\n{errors}"

    taken = [box.run("cat", box.disk / "taken").split() for box in (alpha, beta)]
    assert sorted([*taken[0], *taken[1]]) == sorted(ids)
    assert {each["state"] for each in beta.data("issue", "list", "--all")["issues"]} == {"done"}
    names = git("ls-tree", "--name-only", "trunk", at=world.bare).split()
    assert {f"done-{each}" for each in ids} <= set(names)
    for box in (alpha, beta):
        assert box.data("doctor")["findings"] == []


def test_a_machine_that_is_cut_off_loses_its_issue_to_the_other(world: World) -> None:
    """The worktree that it leaves is on its disk, so the work begins anew under another name."""
    alpha, beta = world.alpha, world.beta
    issue = alpha.data("issue", "create", "the only one")["id"]
    beta.holdfast("join", world.store, "--name", "beta")
    lost = alpha.start(*HOLDFAST, "agent", "run", "--next", "--ttl", "2s", "--", "sh", "-c", "echo begun; sleep 600")
    assert lost.stdout is not None
    assert lost.stdout.readline() == "begun\n"
    shown = beta.data("who")["holdings"]
    assert [each["what"] for each in shown if each["kind"] == "lease"] == [f"issue-{issue[:8]}"]
    told = beta.holdfast("worktree", "path", f"issue-{issue[:8]}", status=7)
    assert f"is in the clone main, not in this one: {alpha.project}" in told

    world.network.cut_off(alpha.machine)
    beta.holdfast("agent", "run", "--next", "--wait", "60s", "--land", "--", "sh", "-c", _AGENT)
    world.network.reconnect(alpha.machine)

    assert beta.data("issue", "show", issue)["state"] == "done"
    lost.communicate(timeout=PATIENCE)
    assert lost.returncode not in (0, None)
    assert f"done-{issue}" in git("ls-tree", "--name-only", "trunk", at=world.bare)
    clones = {each["worktree"]: each.get("clone") for each in alpha.data("worktree", "list")["worktrees"]}
    name = f"issue-{issue[:8]}"
    assert clones == {"main": None, name: None, "beta": "beta", f"{name}-beta": "beta"}
