"""`holdfast web` as a process: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import web
from holdfast.errors import ExtraMissing
from holdfast.fs import calls
from holdfast.issues.creating import NewIssue
from holdfast.repository.opening import open_tracker
from holdfast.web import live
from tests.cli.commands import HOLDFAST, PATIENCE, environment, holdfast, wait_until
from tests.web.served import Client, serving


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert holdfast("init", tmp_path / "fleet").returncode == 0
    return tmp_path / "fleet"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_prints_its_address_and_ends_when_it_is_told(root: Path, number: signal.Signals, status: int) -> None:
    command = [*HOLDFAST, "web", "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=root, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        record = json.loads(process.stdout.readline())["data"]
        assert record["url"].startswith(f"http://127.0.0.1:{record['port']}/open/")
        assert record["writable"] is False
        connection = http.client.HTTPConnection("127.0.0.1", record["port"], timeout=PATIENCE)
        connection.request("GET", "/open/" + record["url"].rpartition("/")[2])
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert "A browser has access. For another browser, open http://" in errors
    assert "Traceback" not in errors


def test_a_browser_that_is_opened_is_not_told_the_address_in_its_arguments(root: Path, tmp_path: Path) -> None:
    """Every user of the machine can read the arguments of a process."""
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    look = f'f="${{1#file://}}"; {{ echo "$1"; stat -c %a "$f"; cat "$f"; }} >{seen}.tmp; mv {seen}.tmp {seen}'
    browser.write_text(f"#!/bin/sh\n{look}\n")
    browser.chmod(0o755)
    command = [*HOLDFAST, "web", "--port", "0", "--json", "--open"]
    env = {**environment(), "BROWSER": f"{browser} %s", "XDG_DATA_HOME": str(tmp_path / "data")}
    with subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["data"]["url"]
        wait_until(seen.exists)
        argument, mode, page = seen.read_text().split("\n", 2)
        assert url not in argument
        assert mode == "600"
        assert f"0; url={url}" in page
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert not Path(argument.removeprefix("file://")).exists()


def test_a_port_that_is_taken_is_named(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = holdfast("web", "--port", str(taken.getsockname()[1]), cwd=root)
    assert failed.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in failed.stderr
    assert "--port 0" in failed.stderr


def test_other_machines_need_a_name(root: Path) -> None:
    failed = holdfast("web", "--host", "0.0.0.0", "--port", "0", cwd=root)
    assert failed.returncode == 2
    assert "not a loopback address" in failed.stderr


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    assert holdfast("web", tmp_path, "--port", "0").returncode == 3


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(ExtraMissing) as failure:
        web._require_extra()
    assert "holdfast[web]" in failure.value.hint


def test_several_directories_are_written_to_one_file(root: Path, tmp_path: Path) -> None:
    open_tracker(root, actor="human:ada").initialise()
    open_tracker(root, actor="human:ada").create(NewIssue(title="Sail"))
    assert holdfast("init", tmp_path / "other").returncode == 0
    made = holdfast("web", root, tmp_path / "other", "--export", tmp_path / "all.html")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "all.html").read_text()
    assert 'id="fleet-board"' in text
    assert 'id="other-board"' in text
    assert "Sail" in text


def test_an_idle_server_reads_no_files_and_creates_none(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no tracker and no ledger. The watching threads turn a thousand times faster than usual, and still ask
    the system for events alone."""
    monkeypatch.setattr(live, "LOOK_UP", 0.005)
    monkeypatch.setattr(live, "TRY_AGAIN", 0.005)
    names = {str(each.relative_to(root)) for each in root.rglob("*")}
    with serving([root], tmp_path / "data") as server:
        client = Client(server)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as listener:
            head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {client.cookie}\r\n\r\n"
            listener.sendall(head.encode())
            found = b""
            while b"event: hello" not in found:
                found += listener.recv(4096)
            client.get("/r/fleet/overview")
            listener.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                while listener.recv(4096):  # each thread announces once that it has begun to watch
                    pass
            used: list[str] = []
            for name in (*calls.READING, *calls.CHANGING):
                _record(monkeypatch, name, used)
            listener.settimeout(0.5)
            with pytest.raises(TimeoutError):
                listener.recv(1)
            idle = list(used)
    assert idle == []
    made = {str(each.relative_to(root)) for each in root.rglob("*")} - names
    assert made <= {".holdfast", ".holdfast/intents"}  # where a store keeps unfinished commits


def test_a_tracker_and_a_ledger_that_are_created_later_are_followed(root: Path, tmp_path: Path) -> None:
    with serving([root], tmp_path / "data") as server:
        client = Client(server)
        assert "There is no ledger here" in client.get("/r/fleet/ledger").text
        for topic, commands in {
            b"issues": (("issue", "init"), ("issue", "create", "Sail")),
            b"ledger": (("ledger", "init"), ("ledger", "append", '{"type":"note"}')),
        }.items():
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as listener:
                head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {client.cookie}\r\n\r\n"
                listener.sendall(head.encode())
                found = b""
                while b"event: hello" not in found:
                    found += listener.recv(4096)
                for each in commands:
                    assert holdfast(*each, cwd=root).returncode == 0
                while b'"topic":"' + topic not in found:
                    found += listener.recv(4096)
        assert "Sail" in client.get("/r/fleet/board").text
        assert "note" in client.get("/r/fleet/ledger").text


def _record(monkeypatch: pytest.MonkeyPatch, name: str, used: list[str]) -> None:
    original = getattr(calls, name)

    def recorded(*words: object, **more: object) -> object:
        used.append(name)
        return original(*words, **more)

    monkeypatch.setattr(calls, name, recorded)
