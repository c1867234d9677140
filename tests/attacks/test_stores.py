"""A store that the repository names gets neither a connection nor a password; a hostile server gets no patience."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.store.etcd import EtcdStore
from holdfast.store.model import Create
from holdfast.testing.backend import INDEX, ISSUES, Item, apply
from proof.hostile.runner import Runner
from proof.hostile.victim import PASSWORD, Victim, recorded, verdict, write
from tests.attacks.listeners import Listener, Talk, answering, asking_for_the_password, http
from tests.attacks.planting import pretty

pytest.importorskip("psycopg", reason="psycopg is not installed here")

COMMANDS = (
    *(("status",), ("who",), ("info",), ("guard", "main/top"), ("hook", "pre-commit"), ("doctor",), ("ledger", "log")),
    *(("hook", "session-start"), ("hook", "before-write"), ("hook", "after-tool"), ("top", "--limit", "1")),
    *(("snapshot", "-m", "x"), ("lease", "acquire"), ("issue", "list"), ("gate", "list")),
    ("migrate", "--to", "file://{out}/store"),
)
QUICKLY = 4.0
"""Many times the limit of half a second that the client has."""
REFUSED = 7


def plant(victim: Victim, address: str) -> None:
    write(victim.root / ".holdfast/config.json", pretty({"schema_version": 1, "store": address}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_foreign_database_does_not_get_the_password_of(
    command: tuple[str, ...], victim: Victim, runner: Runner
) -> None:
    with Listener(asking_for_the_password) as listener:
        plant(victim, f"postgresql://postgres@127.0.0.1:{listener.port}/x?sslmode=disable&connect_timeout=2")
        before = recorded(victim)
        line = [word.replace("{out}", str(victim.out)) for word in command]
        outcome = runner.run(victim.job(*line, stdin='{"tool_input":{"file_path":"main/top"}}'))

    assert PASSWORD.encode() not in listener.received
    assert listener.connections == 0, "the address was not approved by the victim, and was contacted"
    assert not verdict(victim, before, [(line, outcome)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_foreign_etcd_is_not_contacted_by(command: tuple[str, ...], victim: Victim, runner: Runner) -> None:
    with Listener(answering(http(b"{}"))) as listener:
        plant(victim, f"etcd://user@127.0.0.1:{listener.port}/x")
        before = recorded(victim)
        line = [word.replace("{out}", str(victim.out)) for word in command]
        outcome = runner.run(victim.job(*line, stdin='{"tool_input":{"file_path":"main/top"}}'))

    assert listener.connections == 0, "the address was not approved by the victim, and was contacted"
    assert not verdict(victim, before, [(line, outcome)])


PARAMETERS = (
    "sslkeylogfile",
    "passfile",
    "service",
    "servicefile",
    "sslcrldir",
    "options",
    "krbsrvname",
    "oauth_issuer",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_parameter_that_reads_or_writes_files_is_refused(parameter: str, victim: Victim, runner: Runner) -> None:
    """Even in an address that the victim gives: the list of known parameters is short."""
    with Listener(asking_for_the_password) as listener:
        value = victim.planted if parameter == "sslkeylogfile" else victim.letter
        address = f"postgresql://127.0.0.1:{listener.port}/x?{parameter}={value}&connect_timeout=2"
        before = recorded(victim)
        outcome = runner.run(victim.job("issue", "list", env={"HOLDFAST_STORE": address}))

    assert outcome.code == "E_SETTING_INVALID", outcome
    assert not verdict(victim, before, [(("issue", "list"), outcome)])


SECRETS = (
    "postgresql:user:{secret}@host/x",
    "postgresql://user:{secret}#x@127.0.0.1:9/x",
    "postgresql://user:{secret}/x@127.0.0.1:9/x",
    "postgresql://user:{secret}?x@127.0.0.1:9/x",
    "postgresql://user:{secret}@x@127.0.0.1:9/x",
    "postgresql://127.0.0.1:9/x?oauth_client_secret={secret}",
    "postgresql://127.0.0.1:9/x?scram_client_key={secret}",
    "postgresql://127.0.0.1:9/x?scram_server_key={secret}",
    "postgresql://127.0.0.1:9/x?PASSWORD={secret}",
    "postgres:{secret}",
    "etcd:user:{secret}@127.0.0.1:9/x",
    "etcd://user:{secret}#@127.0.0.1:9/x",
    "user={secret} host=127.0.0.1",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("address", SECRETS)
def test_a_secret_in_an_address_reaches_neither_files_nor_output(address: str, victim: Victim, runner: Runner) -> None:
    secret = "hunter2hunter2"
    given = address.format(secret=secret) + ("&connect_timeout=2" if "?" in address else "")
    new = victim.out / "made"
    outcomes = [
        runner.run(victim.job("init", str(new), "--store", given, "--json", limit=20)),
        runner.run(victim.job("info", "--json", env={"HOLDFAST_STORE": given})),
        runner.run(victim.job("migrate", "--to", given, limit=20)),
    ]

    assert not [each for each in outcomes if each.problem]
    for each in outcomes:
        assert secret not in each.out + each.err
    for path in _files_below(victim.root, victim.out, victim.data):
        assert secret.encode() not in path.read_bytes(), path


def _files_below(*tops: Path) -> list[Path]:
    return [path for top in tops for path in top.rglob("*") if path.is_file() and not path.is_symlink()]


# --- Answers ----------------------------------------------------------------------------------------

_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWERS: dict[str, Talk] = {
    "endless": answering(_CHUNKED, b"10000\r\n" + b" " * 0x10000 + b"\r\n", endless=True),
    "as long as three gigabytes": answering(http(b"", length=3 << 30), b" " * (1 << 20), endless=True),
    "a byte at a time": answering(http(b"", length=1000), b" ", pause=0.05, endless=True),
    "a header at a time": answering(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", pause=0.05, endless=True),
    "a line without end": answering(b"HTTP/1.1 200 OK\r\nX: ", b"y" * 60000, endless=True),
    "a list": answering(http(b"[1,2]")),
    "a text": answering(http(b'"text"')),
    "a number": answering(http(b"5")),
    "nothing": answering(http(b"null")),
    "HTML": answering(http(b"<html>sign in</html>")),
    "not UTF-8": answering(http(b'{"x":"\xff\xfe"}')),
    "nested": answering(http(b"[" * 100_000)),
    "an error with a strange code": answering(http(b'{"error":"x","code":"y"}', status="500 X")),
    "an error that is a list": answering(http(b'{"error":[],"code":[1],"message":{}}', status="500 X")),
    "a status that is none": answering(b"HTTP/1.1 abc\r\n\r\n"),
    "no HTTP": answering(b"SSH-2.0-OpenSSH_9\r\n"),
    "a date that is none": answering(http(b"[]", headers="Date: Wed, 99 Foo 99999 99:99:99 GMT\r\n")),
    "a redirection": answering(http(b"", status="302 Found", headers="Location: http://127.0.0.1:1/\r\n")),
    "a bad length": answering(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
    "cut off": answering(http(b"{}", length=100)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_etcd_is_a_failure_within_the_time_limit_if_it_is(
    name: str, victim: Victim, runner: Runner
) -> None:
    with Listener(ANSWERS[name]) as listener:
        ask = "tests.attacks.listeners:ask_etcd"
        outcome = runner.run(victim.job(str(listener.port), call=ask, cwd=victim.base, limit=QUICKLY))

    assert not outcome.problem, outcome
    assert outcome.status == REFUSED, outcome


def _rows(row: str) -> bytes:
    rows = f'{{"response_range":{{"kvs":[{row}]}}}}'
    return f'{{"header":{{"revision":"1"}},"kvs":[{row}],"responses":[{rows},{rows},{rows}]}}'.encode()


OBJECTS = {
    "empty": b"{}",
    "without responses": b'{"responses":[]}',
    "of other types": b'{"header":[],"kvs":5,"responses":{"x":[]}}',
    "of null": b'{"header":null,"kvs":null,"responses":null}',
    "with rows that are none": _rows("[]"),
    "with a row without a key": _rows('{"mod_revision":"1"}'),
    "with text that is not base64": _rows('{"key":"?!","value":"?!","mod_revision":"1"}'),
    "with base64 without its end": _rows('{"key":"aGE","value":"aGE","mod_revision":"1"}'),
    "with a revision that is none": b'{"header":{"revision":"x"},"responses":[]}',
    "with a number that is none": b'{"header":{"revision":NaN}}',
    "nested": b'{"x":' * 100_000,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_no_answer_of_etcd_is_a_failure(name: str) -> None:
    with (
        Listener(answering(http(OBJECTS[name]))) as listener,
        EtcdStore(f"etcd://127.0.0.1:{listener.port}/x", timeout=0.2, patience=0.2) as store,
    ):
        for work in (store.now, lambda: store.read(INDEX), lambda: apply(store, Create(INDEX, Item(1)))):
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                work()
        with contextlib.suppress(StoreUnavailable):  # some are an answer without rows
            list(store.scan(ISSUES))
        with contextlib.suppress(StoreUnavailable), store.watch(INDEX) as watch:
            watch.wait(0.3)
