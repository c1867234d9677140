"""Every refusal because of a limit names the limit, in units for people."""

from __future__ import annotations

import ast
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import click
import msgspec
import pytest

from holdfast import clock, errors
from holdfast.cli import TOKEN, gc, options, repo_lock
from holdfast.cli.repository import token_named
from holdfast.errors import format_size
from holdfast.fs import durable, names, strictjson
from holdfast.fs.directory import Directory
from holdfast.git.configured import programs_of
from holdfast.issues import model as issue_model
from holdfast.issues import rules as issue_rules
from holdfast.issues.creating import MOST_TOGETHER, NewIssue
from holdfast.issues.gates import Definition
from holdfast.issues.model import GATES, Registry
from holdfast.issues.scopes import MOST_PATTERNS, checked_touches
from holdfast.issues.tracker import Tracker
from holdfast.leases.service import HIGHEST_PRIORITY
from holdfast.ledger import log
from holdfast.ledger import rules as ledger_rules
from holdfast.ledger.service import LONGEST_OWNER
from holdfast.locks.retry import MAX_ATTEMPTS, RetryConfig, retry_config
from holdfast.repository.gc_plan import LARGEST_BUDGET, MOST_KEPT, check_policy
from holdfast.repository.history import MOST_STEPS, add_pin, resolve
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.repository import Repository
from holdfast.repository.retention import Policy
from holdfast.repository.settings import CHECK_TIMEOUT, Settings
from holdfast.store import addresses, etcd_gateway, lines
from holdfast.store.memory import MemoryStore
from holdfast.store.model import MOST_BYTES, StructCodec
from holdfast.trees import walker
from tests.repository.stages import make_repository

ROOT = Path(errors.__file__).parent
LIMIT = re.compile(r"_?(LONGEST|MOST|MAX|LARGEST|HIGHEST)_")
ELSEWHERE = {
    ("fs/durable.py", "_read_all"): "says the same as `read_in`, for a file that grows while it is read",
    ("fs/durable.py", "_end_of_lines"): "says the same as `last_line_in`",
    ("store/addresses.py", "_hosts_in"): "driven below, but `parts_of` writes the message",
    ("store/etcd_gateway.py", "_ask_member"): "driven below, but `connect` raises another failure with the message",
    ("issues/dependencies.py", "check_path"): "repeats the transaction, and refuses nothing",
    ("store/etcd_gateway.py", "wait"): "reconnects; nobody reads the message",
    ("git/contents.py", "read_file"): "of a large file no lines are shown",
    ("git/transfer.py", "read_tag"): "driven by tests/repository/test_transfer.py",
    ("repository/git_home.py", "_restore_found"): "tries again, and then says what changed",
}
"""Functions that raise beyond a limit and are not driven here, and why."""


class Note(msgspec.Struct):
    text: str


class Place:
    """What the calls need: a repository with a snapshot, a tracker, a ledger, and a directory for files."""

    def __init__(self, scratch: Path) -> None:
        make_repository(scratch / "repo")
        self.repository = Repository(scratch / "repo")
        with self.repository.lease() as lease:
            self.snapshot_id = self.repository.snapshot("main", lease).snapshot_id
        self.repository.worktrees.create("other")
        self.tracker = Tracker(MemoryStore())
        self.tracker.initialise()
        self.claims = init_ledger(scratch / "ledger").claims
        self.files = scratch

    def issue(self) -> str:
        return self.tracker.create_all([NewIssue(title="one")])[0].issue.id

    def sparse(self, size: int, *, ends_with: bytes = b"") -> Directory:
        with (self.files / "large").open("wb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(ends_with)
        return Directory.open(self.files)


class Refusal(NamedTuple):
    """A call with a value just beyond a limit, and how the message writes the limit (and the value)."""

    call: Callable[[Place], object]
    named: str


def option(callback: Callable[..., object], value: str) -> object:
    return callback(cast("click.Context", None), click.Option(["--given"]), value)


def deep() -> Any:
    value: Any = 1
    for _ in range(strictjson.MAX_DEPTH + 1):
        value = [value]
    return value


def answer_too_much(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000)

        thread = threading.Thread(target=answer)
        thread.start()
        address = addresses.EtcdAddress.parse(f"etcd://127.0.0.1:{server.getsockname()[1]}/p")
        try:
            etcd_gateway.Gateway(address).ask_once("/v3/kv/range", {})
        finally:
            thread.join()


def large_git_configuration(place: Place) -> None:
    common = place.files / "configured"
    common.mkdir()
    (common / "config").write_text("#" * (1 << 20))
    programs_of(common, lambda path: b"")


def read_resource(place: Place, address: str) -> None:
    tools = pytest.importorskip("holdfast.mcp.tools")
    tools.read(cast("Any", None), tools.SCHEME + address)


MIB = f"{MOST_BYTES + 1} bytes; the limit is {format_size(MOST_BYTES)} ({MOST_BYTES} bytes)"
REFUSALS: dict[str, Refusal] = {
    # Texts and names
    "text": Refusal(lambda _: names.checked_text("x" * 1001, what="note"), "1001 characters; the limit is 1000 char"),
    "name": Refusal(lambda _: names.safe_name("x" * 129, what="name"), "129 characters, more than 128"),
    "actor": Refusal(lambda _: names.checked_actor("a:" + "x" * 1000), f"at most {names.LONGEST_ACTOR} characters"),
    "node": Refusal(lambda _: log.node_id("1." * 64 + "1"), "129 characters, more than 128"),
    "type": Refusal(lambda _: log.checked({"type": "x" * 129}), "1 to 128 characters, not 129"),
    "event id": Refusal(lambda _: log.checked({"type": "x", "id": "x" * 129}), "1 to 128 characters, not 129"),
    "owner": Refusal(
        lambda place: place.claims.claim("1", "x" * (LONGEST_OWNER + 1)),
        f"1 to {LONGEST_OWNER} characters; it has {LONGEST_OWNER + 1}",
    ),
    "resource": Refusal(
        lambda place: read_resource(place, f"issues/{'x' * 201}"), "201 characters; it must have 1 to 200"
    ),
    "schema": Refusal(lambda _: postgres_address("x" * 64), "at most 63"),
    # Bytes
    "file": Refusal(
        lambda place: durable.read_in(place.sparse(durable.LARGEST + 1), "large"),
        f"{durable.LARGEST + 1} bytes; the limit is 257 MiB ({durable.LARGEST} bytes)",
    ),
    "lines": Refusal(
        lambda place: durable.read_lines_in(place.sparse(durable.LARGEST + 1), "large", limit=1 << 40),
        "the limit is 257 MiB",
    ),
    "last line": Refusal(
        lambda place: durable.last_line_in(place.sparse(durable.LONGEST_LINE + 1, ends_with=b"\n"), "large"),
        "a line of more than 16 MiB",
    ),
    "line of a stream": Refusal(
        lambda place: lines._whole_lines(
            place.sparse(durable.LONGEST_LINE + 1, ends_with=b"\n"), cast("Any", SimpleNamespace(file="large")), 0
        ),
        "a line of more than 16 MiB",
    ),
    "tree": Refusal(
        lambda place: [place.sparse((2 << 30) + 1), walker.read_whole(str(place.files / "large"))], "the limit is 2 GiB"
    ),
    "JSON": Refusal(
        lambda _: strictjson.decode(b"x" * 1025, limit=1024), "1025 bytes; the limit is 1 KiB (1024 bytes)"
    ),
    "written JSON": Refusal(lambda _: strictjson.encode("x" * 9, limit=10), "11 bytes; the limit is 10 bytes"),
    "record": Refusal(
        lambda _: StructCodec(Note).encode(Note("x" * MOST_BYTES)), f"limit is {format_size(MOST_BYTES)}"
    ),
    "event": Refusal(lambda _: log.checked({"type": "x", "a": "x" * log.MOST_BYTES}), "the limit is 1 MiB"),
    "nested event": Refusal(lambda _: log.checked({"type": "x", "a": ["x" * log.MOST_BYTES]}), "the limit is 1 MiB"),
    "issue": Refusal(lambda _: GATES.codec.encode(Registry(gates={"x" * MOST_BYTES: {}})), "the limit is"),
    "stored issue": Refusal(lambda _: issue_model._strict(b"x" * (MOST_BYTES + 1), "it", MOST_BYTES), MIB),
    "answer of etcd": Refusal(answer_too_much, "has more than 4 KiB"),
    # Depth and magnitude
    "depth": Refusal(lambda _: strictjson.encode(deep()), "deeper than 100 levels"),
    "depth of a text": Refusal(lambda _: strictjson.decode(b"[" * 101 + b"]" * 101), "deeper than 100 levels"),
    "endless depth": Refusal(lambda _: strictjson.decode(b"[" * 60_000), "deeper than 100 levels"),
    "float": Refusal(lambda _: strictjson.decode(b"1e999"), "1.8e308"),
    # Durations
    "duration": Refusal(lambda _: clock.parse_duration("36501d"), "36500d at most"),
    "endless duration": Refusal(lambda _: clock.parse_duration("9" * 400), "36500d at most"),
    "ttl of a lease": Refusal(
        lambda place: place.repository.lease(ttl=86401), "'1d1s', but must be a duration from 100ms"
    ),
    "ttl that looks allowed": Refusal(lambda place: place.repository.lease(ttl=86400.2), "'86400.2s', but must be"),
    "ttl of an issue": Refusal(
        lambda _: issue_rules.checked_ttl(31 * 86400.0), "'31d', but must be a duration from 100ms to 30d"
    ),
    "ttl of a node": Refusal(lambda _: ledger_rules.checked_ttl(7200.0), "'2h', but must be a duration from 1s to 1h"),
    "lock_timeout": Refusal(lambda _: ledger_rules.lock_timeout({"lock_timeout": "2h"}), "from 1s to 1h"),
    "timeout of a gate": Refusal(
        lambda place: place.tracker.gates.define(Definition("g", timeout=90000.0)),
        "'1d1h', but must be a duration above 0s and of 1d",
    ),
    "pin": Refusal(lambda place: add_pin(place.repository.context, place.snapshot_id, keep_for=1e300), "to 36500d"),
    "keep_for": Refusal(
        lambda _: check_policy(Policy(keep_for=36501 * 86400.0)),
        "'36501d', but must be a duration above 0s and of 36500d",
    ),
    "keep_for of a removal": Refusal(
        lambda place: place.repository.worktrees.remove("other", save=None, keep_for=36501 * 86400.0),
        "from 0ms to 36500d",
    ),
    "stale after": Refusal(
        lambda _: option(repo_lock._stale_after, f"{repo_lock.LONGEST_STALE_AFTER + 1:.0f}s"), "from 1s to 3650d"
    ),
    "delay": Refusal(
        lambda _: RetryConfig(initial_delay=9.0, max_delay=5.0).checked(),
        "'9s', but must be a duration from 0s to max_delay, 5s",
    ),
    "time limit of checks": Refusal(lambda _: Settings().changed(CHECK_TIMEOUT, ["2d"]), "1d at most"),
    # Counts
    "touches": Refusal(
        lambda _: checked_touches(f"p{number}" for number in range(MOST_PATTERNS + 1)), f"at most {MOST_PATTERNS} pat"
    ),
    "parts": Refusal(
        lambda place: place.tracker.break_down(place.issue(), [NewIssue(title="x")] * (MOST_TOGETHER + 1)),
        f"1 to {MOST_TOGETHER} parts, not {MOST_TOGETHER + 1}",
    ),
    "priority": Refusal(
        lambda place: place.repository.lease(priority=HIGHEST_PRIORITY + 1), "from -1000000 to 1000000"
    ),
    "priority of a claim": Refusal(
        lambda place: place.claims.claim("1", "a", priority=HIGHEST_PRIORITY + 1),
        "from -1000000 to 1000000, not 1000001",
    ),
    "keep_last": Refusal(lambda _: check_policy(Policy(keep_last=MOST_KEPT + 1)), f"from 1 to {MOST_KEPT}"),
    "--keep-last": Refusal(lambda _: option(gc._number, "9" * 5000), f"from 1 to {MOST_KEPT}"),
    "budget": Refusal(lambda _: check_policy(Policy(max_bytes=LARGEST_BUDGET + 1)), "from 0 B to 4096 PiB"),
    "size": Refusal(lambda _: options.parse_size("9" * 41), "at most 40 characters"),
    "steps": Refusal(lambda place: resolve(place.repository.context, f"head~{MOST_STEPS + 1}"), f"last {MOST_STEPS}"),
    "endless steps": Refusal(
        lambda place: resolve(place.repository.context, "head~" + "9" * 5000), f"last {MOST_STEPS}"
    ),
    "git configuration": Refusal(large_git_configuration, "the limit is 1 MiB"),
    "token": Refusal(lambda _: token_named({TOKEN: "9" * 5000}), "at most 15 digits"),
    "attempts": Refusal(lambda _: retry_config({MAX_ATTEMPTS: "10001"}), "from 1 to 10000"),
    "hosts": Refusal(lambda _: addresses.parts_of("etcd://" + ",".join(["h"] * 101) + "/p"), "at most 100 hosts"),
}


def postgres_address(schema: str) -> None:
    connections = pytest.importorskip("holdfast.store.postgres_connections")
    connections.PostgresAddress.parse(f"postgresql://host/db?schema={schema}")


@pytest.fixture
def place(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(etcd_gateway, "MOST_ANSWER", 4096)
    return Place(scratch)


@pytest.mark.skipif(sys.platform == "win32", reason="large sparse files need a filesystem that has them")
def test_every_refusal_beyond_a_limit_names_the_limit(place: Place) -> None:
    reached: set[tuple[str, str]] = set()
    for what, (call, named) in REFUSALS.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the message is checked below)
            call(place)
        problem = caught.value
        said = str(problem)
        assert named in said, what
        assert not re.search(r"\d(\.\d+)?e\+\d|\b1 [a-z]+s\b|\b(inf|nan)s\b", said), what
        reached.update(_functions_in(problem))
    assert set(_functions_with_limits()) - reached == ELSEWHERE.keys()


def _functions_in(problem: BaseException | None) -> Iterator[tuple[str, str]]:
    while problem is not None:
        here = problem.__traceback__
        while here is not None:
            code = here.tb_frame.f_code
            if Path(code.co_filename).is_relative_to(ROOT):
                yield Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_name
            here = here.tb_next
        problem = problem.__context__


def _functions_with_limits() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        for name in _refusing(path.read_text(encoding="utf-8")):
            yield path.relative_to(ROOT).as_posix(), name


def _refusing(source: str) -> list[str]:
    """The functions that raise `TooLarge`, or anything after a comparison with a limit."""
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    return [each.name for each in functions if any(map(_refuses_beyond_a_limit, _own_nodes(each)))]


def test_a_new_refusal_beyond_a_limit_is_noticed() -> None:
    source = """
def first(text):
    if len(text) > names.LONGEST_TEXT:
        raise UsageFailure("too long")
def second(text):
    def third():
        raise TooLarge("it", 2, 1)
    return text[:MOST_SHOWN]
"""
    assert _refusing(source) == ["first", "third"]


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in a function, but not in one that it defines."""
    nodes: list[ast.AST] = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            nodes.extend(ast.iter_child_nodes(node))


def _refuses_beyond_a_limit(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        used = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
        used |= {each.attr for each in ast.walk(node.test) if isinstance(each, ast.Attribute)}
        return any(map(LIMIT.match, used)) and any(isinstance(each, ast.Raise) for each in ast.walk(node))
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TooLarge"
