"""Simulated machines: network namespaces with their own addresses on a switch, which tests can partition.

Each machine is a process that only keeps its namespace alive and dies with the test, so nothing is left behind.
This needs root, and the tool `ip` with bridges and virtual links. nftables rules in the namespaces drop packets
between two machines, in both directions or in one. Without the tool `nft` a machine can only be unplugged as a
whole. Where something is missing the test is skipped with the reason, and the end of the run lists it as NOT RUN HERE.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Self

import pytest

from tests.support.servers import Machine, dies_with_us, enter, is_root

_CLONE_NEWNET = 0x40000000


_RULES = """
table ip holdfast {
    set cut { type ifname; }
    set deaf_to { type ipv4_addr; }
    chain input {
        type filter hook input priority 0; policy accept;
        iifname @cut drop
        ip saddr @deaf_to drop
    }
    chain output {
        type filter hook output priority 0; policy accept;
        oifname @cut drop
    }
}
"""
"""Rules for the namespace of each machine: the senders it does not hear, and whether its link is cut."""

WITHOUT_FILTERS = (
    "nft is not installed, or does not work here: no one-way partitions, and none between two machines; "
    "whole machines can still be unplugged"
)


class Network:
    """A switch and its machines. Packets to or from a machine that is cut off are lost silently."""

    def __init__(self) -> None:
        self.filters = True
        """Whether nftables works: without it only whole machines can be cut off."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports: dict[Machine, str] = {}
        self._hub = self._namespace()
        _ip(self._hub, "link", "add", "br0", "type", "bridge")
        _ip(self._hub, "link", "set", "br0", "up")
        _ip(self._hub, "address", "add", "10.77.0.254/24", "dev", "br0")

    @property
    def hub(self) -> Machine:
        """The switch itself, which reaches every machine that is not cut off."""
        return Machine("10.77.0.254", self._hub)

    def machine(self) -> Machine:
        """Add a machine to the network."""
        number = len(self._ports) + 1
        namespace = self._namespace()
        address, port = f"10.77.0.{number}", f"port{number}"
        process = namespace.split("/")[2]
        _ip(self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", process)
        _ip(self._hub, "link", "set", port, "master", "br0", "up")
        for command in (("lo", "up"), ("eth0", "up")):
            _ip(namespace, "link", "set", *command)
        _ip(namespace, "address", "add", f"{address}/24", "dev", "eth0")
        made = Machine(address, namespace)
        self._ports[made] = port
        self.filters = self.filters and _can_filter(namespace)
        return made

    def cut_off(self, machine: Machine) -> None:
        """Drop everything sent to or from this machine."""
        if self.filters:
            _nft(machine, "add element ip holdfast cut { eth0 }")
        else:
            _ip(self._hub, "link", "set", self._ports[machine], "nomaster")  # unplugged from the switch

    def reconnect(self, machine: Machine) -> None:
        if self.filters:
            _nft(machine, "flush set ip holdfast cut")
        else:
            _ip(self._hub, "link", "set", self._ports[machine], "master", "br0")

    def drop(self, source: Machine, target: Machine) -> None:
        """Drop everything that `source` sends to `target`; the other direction is unaffected."""
        _nft(target, f"add element ip holdfast deaf_to {{ {source.address} }}")

    def separate(self, one: Machine, other: Machine) -> None:
        """Drop everything between these two, in both directions; others reach both."""
        self.drop(one, other)
        self.drop(other, one)

    def mend(self, *machines: Machine) -> None:
        """Let these machines, or all, hear everyone again."""
        for each in machines or self._ports:
            _nft(each, "flush set ip holdfast deaf_to")

    def _namespace(self) -> str:
        libc = ctypes.CDLL(None, use_errno=True)

        def prepare() -> None:
            if libc.unshare(_CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "unshare")
            dies_with_us()

        process = subprocess.Popen(["sleep", "86400"], preexec_fn=prepare)  # noqa: PLW1509
        self._processes.append(process)
        return f"/proc/{process.pid}/ns/net"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _ip(namespace: str, *arguments: str) -> None:
    with entered(namespace):
        subprocess.run([_program("ip"), *arguments], check=True, capture_output=True, text=True)


def _nft(machine: Machine, command: str) -> None:
    with entered(machine.namespace or ""):
        arguments = [_program("nft"), "-f", "-"]
        subprocess.run(arguments, input=command, check=True, capture_output=True, text=True)


def _can_filter(namespace: str) -> bool:
    """Install the rules in a namespace and return whether that worked."""
    try:
        _nft(Machine(namespace=namespace), _RULES)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _program(name: str) -> str:
    """The path of an admin tool, whose directory may not be on the PATH."""
    directories = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return shutil.which(name, path=directories) or name


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Run the block with this thread, its child processes and its connections on another machine."""
    original = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{original}")
    finally:
        os.close(original)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network for one test."""
    if sys.platform != "linux" or not is_root():
        pytest.skip("needs root on Linux to make network namespaces")
    if shutil.which(_program("ip")) is None:
        pytest.skip("ip is not installed: no network namespaces")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Network())
            probe = made.machine()
            made.cut_off(probe)
            made.reconnect(probe)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"cannot make network namespaces here: {error}; {getattr(error, 'stderr', '')}")
        yield made


@pytest.fixture
def filtered_network(network: Network) -> Network:
    """A network that supports partitions between two machines, including one-way ones."""
    if not network.filters:
        pytest.skip(WITHOUT_FILTERS)
    return network
