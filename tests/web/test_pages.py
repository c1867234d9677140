"""The pages over HTTP: what they show, how they are secured, and what hostile records do to them."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.clock import ClockReading, format_instant
from holdfast.errors import StoreUnavailable
from holdfast.issues.creating import NewIssue
from holdfast.issues.model import ClaimId, IssueSummary, State
from holdfast.issues.projection import IssueProjection
from holdfast.issues.rules import IssueSet
from holdfast.repository.init import initialise
from holdfast.repository.landing import Landings
from holdfast.repository.landing_records import lease_of
from holdfast.repository.ledgers import init_ledger
from holdfast.repository.opening import open_tracker
from holdfast.repository.repository import Repository
from holdfast.store.model import Watch
from holdfast.web import live, security
from holdfast.web import server as server_module
from holdfast.web.contents import PAGES, PARTS
from holdfast.web.html import h
from holdfast.web.layout import PageRequest
from holdfast.web.pages import board, timeline
from holdfast.web.server import WebServer
from holdfast.web.workspaces import Workspace, WorkspaceSettings, workspaces_of
from tests.cli.commands import PATIENCE, holdfast, wait_until
from tests.web.hostile import Markup
from tests.web.served import Client, serving
from tools.sample_repository import Sample


def addresses(sample: Sample) -> list[str]:
    """An address of each page and each part."""
    names = {"issue": sample.issues["gate"], "prompt": sample.issues["gate"]}
    worktree = f"issue-{sample.issues['parser'][:8]}"
    names |= dict.fromkeys(("worktree", "changes", "changed"), worktree)
    names |= dict.fromkeys(("run", "run-log"), sample.runs[0])
    queries = {"diff": f"?worktree={worktree}&old=head~1&new=head", "board": "?q=the&blocked=hide", "graph": "?all=yes"}
    listed = [*PAGES, *(each for each in PARTS if each != "log")]
    return ["/r/harbour/" + "/".join(filter(None, (each, names.get(each)))) + queries.get(each, "") for each in listed]


def test_every_page_and_part_is_served_and_secured(client: Client, sample: Sample) -> None:
    for each in addresses(sample):
        answer = client.get(each)
        assert answer.status == 200, (each, answer.text[:2000])
        assert {name: answer.headers.get(name) for name in security.HEADERS} == security.HEADERS
        assert "server" not in answer.headers
        found = Markup(answer.text)
        assert not found.suspicious
        assert all(source and source.startswith("/static/") for source in found.scripts)


def test_a_scraper_gets_the_figures_of_the_library(client: Client) -> None:
    bearer = {"authorization": f"Bearer {client.server.access.scraper_token}"}
    answer = client.ask("GET", "/metrics", headers=bearer, cookie=None)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "holdfast_store_up 1\n" in answer.text
    assert client.get("/r/harbour/metrics").text.splitlines()[0] == answer.text.splitlines()[0]
    assert client.ask("GET", "/r/harbour/board", headers=bearer, cookie=None).status == 401


def test_the_timeline_shows_what_was_held_at_any_past_moment(tmp_path: Path) -> None:
    """A year ago, and before more events than the page reads without a cursor."""
    root = tmp_path / "fleet"
    initialise(root)
    tracker = open_tracker(root, actor="human:ada")
    tracker.initialise()
    issue = tracker.create(NewIssue(title="Mend the sail")).id
    with Repository(root, actor="agent:maple") as repository, contextlib.closing(init_ledger(root)) as opened:
        claimed = tracker.claims.claim(issue, tracker.claims.request("agent:birch", ttl=60.0))
        with repository.lease(), opened.claims.claim("1.2", "agent:cedar"):
            then = time.time()
        tracker.claims.release(issue, ClaimId.parse(claimed.claim.claim_id), reason="")
        for _ in range(timeline.RECENT // 500 + 1):
            opened.ledger.append_many([{"type": "measured"}] * 500)
    workspaces = workspaces_of([root], WorkspaceSettings("human:ada", None, tmp_path))

    def at(instant: str) -> str:
        asked = PageRequest(workspaces[0], workspaces, {"at": instant}, then + 400 * 86400, writable=False)
        return str(PAGES["timeline"](asked).body)

    for instant in (f"{then:.6f}", format_instant(then), format_instant(then).removesuffix("Z")):
        _, _, held = at(instant).partition('id="then"')
        for text in ("worktree main", "agent:maple", "Mend the sail", "agent:birch", "node 1.2", "agent:cedar"):
            assert text in held, text
        assert "In progress" in held
    assert "Nothing was held then" in at(f"{then + 86400:.0f}")
    assert "Nothing was held then" in at("1999-12-31T23:59")
    assert "Nothing was held then" in at("9" * 15), "the future is now"


def test_the_one_time_address_works_once(server: WebServer) -> None:
    client = Client(server)
    path = server.access.one_time_path
    assert client.ask("HEAD", path, cookie=None).status == 401
    opened = client.ask("GET", path, cookie=None)
    assert opened.status == 200
    assert opened.headers["refresh"] == "0; url=/"
    assert re.fullmatch(r"holdfast-\d+=[\w-]{43}; Path=/; HttpOnly; SameSite=Strict", opened.headers["set-cookie"])
    assert client.ask("GET", path, cookie=None).status == 401
    assert client.ask("GET", "/r/harbour/board", cookie=None).status == 401


def test_a_killed_lander_keeps_no_page_busy(client: Client, sample: Sample) -> None:
    with Repository(sample.root, actor="agent:rowan") as repository:
        leases, name = repository.named_leases, lease_of(Landings(repository, actor="agent:rowan").targets()[0].name)
        held = leases.acquire(name, leases.request(ttl=600.0)).lease
        assert "data-again" in client.get("/r/harbour/batches").text, "somebody works on the queue"
        leases.release(name, held.lock_id)
        leases.acquire(name, leases.request(ttl=0.1))
        wait_until(lambda: getattr(leases.state(name), "expired", False))
        assert "data-again" not in client.get("/r/harbour/batches").text
        leases.release(name, leases.steal(name, leases.request()).lease.lock_id)


def test_a_filter_may_have_any_names(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_CARDS", 1)
    answer = client.get("/r/harbour/board?page=1&name=x&part=y&workspace=z&q=e")
    assert answer.status == 200
    assert 'href="/r/harbour/board?q=e&amp;all=backlog"' in answer.text


def test_only_our_own_files_are_served(client: Client) -> None:
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")
    for path in (
        "/static/",
        "/static/layout.py",
        "/static/style",
        "/static",
        "/r/",
        "/r/nothing/board",
        "/r/harbour/x",
    ):
        assert client.get(path).status == 404, path


def test_an_action_is_the_call_of_a_command_and_says_which(client: Client, sample: Sample) -> None:
    made = json.loads(client.act("create", title="Paint the quay", labels="area:paint").content)
    assert made["command"] == "holdfast issue create --label area:paint -- 'Paint the quay'"
    issue = made["page"].rpartition("/")[2]
    claimed = json.loads(client.act("claim", issue=issue, ttl="1h").content)
    assert claimed["command"] == f"holdfast issue claim {issue[:8]} --ttl 1h --purpose 'claimed in the browser'"
    tracker = open_tracker(sample.root, actor="human:ada")
    record = tracker.claims.state(issue)
    assert record is not None
    assert record.claim is not None
    assert record.claim.assignee == "human:ada"
    claim = record.claim.claim_id
    assert json.loads(client.act("release", issue=issue, claim=claim, reason="rain").content)["ok"]
    assert json.loads(client.act("edit", issue=issue, title="Paint it", labels="").content)["command"] == (
        f"holdfast issue update {issue[:8]} --title 'Paint it' --remove-label area:paint"
    )
    assert json.loads(client.act("move", issue=issue, state="rejected").content)["ok"]
    found = tracker.issue(issue)
    assert (found.title, found.labels, found.state) == ("Paint it", (), State.REJECTED)


def test_an_issue_shows_its_attempts_and_a_page_without_issues_how_to_begin(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, actor="human:ada")
    tracker.initialise()
    with serving([tmp_path], tmp_path / "data") as server:
        client, slug = Client(server), server.live._workspaces[0].slug
        assert "holdfast issue create" in client.get(f"/r/{slug}/graph").text
        issue = tracker.create(NewIssue(title="Mend the sail")).id
        assert "Attempts" not in client.get(f"/r/{slug}/issue/{issue}").text
        for who, reason in (("agent:birch", "the thread is too thin"), ("agent:cedar", "")):
            claimed = tracker.claims.claim(issue, tracker.claims.request(who, ttl=60.0))
            tracker.claims.release(issue, ClaimId.parse(claimed.claim.claim_id), reason=reason)
        tracker.claims.claim(issue, tracker.claims.request("agent:maple", ttl=60.0))
        _, _, shown = client.get(f"/r/{slug}/issue/{issue}").text.partition("Attempts")
        shown = re.sub(r"<[^>]*>", " ", shown.partition("Events")[0])
        assert re.search(
            r"agent:maple .*not ended .*agent:cedar .*released .*agent:birch .*the thread is too thin", shown
        )


def test_gates_leases_and_landings_have_actions(client: Client, sample: Sample) -> None:
    gate = sample.issues["gate"]
    assert json.loads(client.act("gate-pass", issue=gate, gate="review").content)["command"] == (
        f"holdfast gate pass {gate[:8]} review"
    )
    held = json.loads(client.act("break-lease", worktree="aspen").content)
    assert held["error"]["code"] == "E_LOCK_CONFLICT"  # it has not expired
    with Repository(sample.root) as repository:
        request = repository.leases.request(ttl=0.1)
        lost = repository.leases.acquire("rowan", request).lease
        wait_until(lambda: getattr(repository.leases.state("rowan"), "expired", False))
        assert json.loads(client.act("break-lease", worktree="rowan").content)["ok"]
        assert repository.leases.state("rowan") is None, lost
    listed = json.loads(holdfast("landing", "list", "--json", cwd=sample.checkout).stdout)["data"]["landings"]
    queued = listed[0]["id"]
    assert json.loads(client.act("landing-cancel", landing=queued).content)["ok"]
    again = json.loads(client.act("landing-retry", landing=queued).content)
    assert again["ok"], again


def test_the_shown_command_does_the_same(sample: Sample, tmp_path: Path) -> None:
    """The title looks like an option, and the server shows several repositories."""
    other = tmp_path / "other"
    other.mkdir()
    open_tracker(other, actor="human:ada").initialise()
    with serving([sample.root, other], tmp_path / "data") as server:
        client = Client(server)
        headers = {"content-type": "application/json", "origin": f"http://127.0.0.1:{client.port}"}
        given = {"title": "-y title", "description": "one\r\ntwo", "labels": "a b", "priority": "high"}
        done = client.ask("POST", "/r/other/do/create", json.dumps(given).encode(), headers)
        assert f"--repo {other}" in client.get("/r/other/board").text
    command = json.loads(done.content)["command"]
    again = holdfast(*shlex.split(command)[1:], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    one, two = (
        open_tracker(other, actor="human:ada").issue(each.id) for each in open_tracker(other, actor="x:y").summaries()
    )
    assert one.title == two.title == "-y title"
    for name in ("description", "labels", "priority", "state", "dependencies"):
        assert getattr(one, name) == getattr(two, name)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{}", 400),
        (b"[]", 400),
        (b"not json", 400),
        (b'{"issue":"x","state":"done","more":1}', 400),
        (b'{"issue":1}', 400),
    ],
)
def test_content_of_another_form_is_refused(client: Client, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json", "origin": f"http://127.0.0.1:{client.port}"}
    assert client.ask("POST", "/r/harbour/do/move", content, headers).status == status
    assert client.ask("POST", "/r/harbour/do/nothing", content, headers).status == 404


def test_a_server_that_only_shows_has_no_forms_and_does_nothing(sample: Sample, tmp_path: Path) -> None:
    with serving([sample.root], tmp_path, writable=False) as server:
        client = Client(server)
        assert 'class="action"' not in client.get(f"/r/harbour/issue/{sample.issues['gate']}").text
        assert client.act("create", title="x").status == 403
        assert client.get("/r/harbour/new").status == 404


def test_several_repositories_have_a_place_each(sample: Sample, tmp_path: Path) -> None:
    other = tmp_path / "harbour"
    other.mkdir()
    open_tracker(other, actor="human:ada").initialise()
    with serving([sample.root, other], tmp_path / "data") as server:
        client = Client(server)
        home = client.get("/").text
        assert 'href="/r/harbour/overview"' in home
        assert 'href="/r/harbour1/overview"' in home
        assert "There are no issues yet" in client.get("/r/harbour1/board").text
        assert client.get("/r/harbour1/worktrees").status == 404


# --- Raw connections ---


def raw(server: WebServer, content: bytes, *, patience: float = PATIENCE) -> bytes:
    """The whole answer to these bytes; empty if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=patience) as connection:
        connection.sendall(content)
        found = b""
        while block := connection.recv(65536):
            found += block
        return found


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /static/../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nX: a\r\n b\r\nCookie: x\r\n\r\n",
        b"GET /r/harbour/board HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not http\r\n\r\n",
        b"POST /r/harbour/do/x HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
def test_a_hostile_connection_is_answered_with_a_refusal_and_closed(server: WebServer, content: bytes) -> None:
    answer = raw(server, content.replace(b"PORT", b"%d" % server.port))
    assert re.match(rb"HTTP/1.1 4\d\d ", answer), answer[:300]
    assert b"passwd" not in answer


def test_a_header_beyond_the_limit_is_refused(server: WebServer) -> None:
    """The server closes without reading the rest, so a reset may overtake its refusal."""
    head = b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nX: " % server.port
    try:
        answer = raw(server, head + b"a" * 100_000 + b"\r\n\r\n")
    except (ConnectionResetError, BrokenPipeError):
        return
    assert re.match(rb"HTTP/1.1 4\d\d ", answer), answer[:300]


def test_a_client_that_sends_its_request_slowly_is_dropped(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEADER_TIME", 0.2)
    monkeypatch.setattr(server_module, "KEEP_ALIVE", 3600)  # of a connection that has had an answer
    with serving([sample.root], tmp_path) as server:
        assert raw(server, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
        assert raw(server, b"") == b""


def connection(server: WebServer, address: str, content: bytes = b"") -> socket.socket:
    """A connection of a client with this address."""
    made = socket.create_connection(("127.0.0.1", server.port), PATIENCE, (address, 0))
    made.sendall(content)
    return made


@pytest.mark.parametrize("limit", ["CONNECTIONS_EACH", "MOST_CONNECTIONS"])
def test_connections_that_ask_for_nothing_keep_nobody_out(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(server_module, limit, 4)
    monkeypatch.setattr(server_module, "HEADER_TIME", 3600)
    with serving([sample.root], tmp_path) as server, contextlib.ExitStack() as stack:
        client = Client(server)
        idle = [stack.enter_context(connection(server, "127.0.0.1")) for _ in range(8)]
        assert client.get("/r/harbour/board").status == 200
        for each in idle[:4]:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        idle[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert idle[-1].recv(4) == b"HTTP"


def test_the_idle_connections_of_one_client_cost_no_other_client_its_own(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_EACH", 4)
    with serving([sample.root], tmp_path) as server, contextlib.ExitStack() as stack:
        other = stack.enter_context(connection(server, "127.0.0.2"))
        idle = [stack.enter_context(connection(server, "127.0.0.3")) for _ in range(8)]
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert other.recv(4) == b"HTTP"


def test_one_client_cannot_take_the_streams_of_events_from_the_others(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "STREAMS_EACH", 2)
    with serving([sample.root], tmp_path) as server, contextlib.ExitStack() as stack:
        cookie = Client(server).cookie
        head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {cookie}\r\n\r\n".encode()

        def answered(address: str) -> tuple[socket.socket, bytes]:
            made = stack.enter_context(connection(server, address, head))
            return made, made.recv(65536)

        first, _ = answered("127.0.0.2")
        answered("127.0.0.2")
        refused = answered("127.0.0.2")[1]
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in refused
        assert answered("127.0.0.3")[1].startswith(b"HTTP/1.1 200 ")
        first.close()
        wait_until(lambda: answered("127.0.0.2")[1].startswith(b"HTTP/1.1 200 "))


def test_a_client_that_does_not_read_is_dropped(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SEND_TIME", 0.2)
    monkeypatch.setitem(PARTS, "names", lambda asked: h("p", "x" * 30_000_000))
    with serving([sample.root], tmp_path) as server:
        client = Client(server)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            host = f"127.0.0.1:{server.port}"
            head = f"GET /r/harbour/names HTTP/1.1\r\nHost: {host}\r\nCookie: {client.cookie}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.recv(1) == b"H"
            assert server._server is not None
            connections = server._server.server_state.connections
            wait_until(lambda: not connections)


def test_a_body_that_does_not_arrive_is_not_waited_for(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "BODY_TIME", 0.2)
    with serving([sample.root], tmp_path) as server:
        client = Client(server)
        head = (
            f"POST /r/harbour/do/move HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {client.cookie}\r\n"
            f"Origin: http://127.0.0.1:{server.port}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
            "Connection: close\r\n\r\n{"
        )
        assert b" 400 " in raw(server, head.encode())[:20]


def listen_for_change(client: Client, *, count: int = 1) -> Callable[[], bytes]:
    """Listen for events as a tab does; the result waits for the next changes, and returns what was heard."""
    heard: list[bytes] = []
    told = threading.Event()

    def listen() -> None:
        with socket.create_connection(("127.0.0.1", client.port), timeout=PATIENCE) as connection:
            head = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nCookie: {client.cookie}\r\n\r\n"
            connection.sendall(head.encode())
            while b"".join(heard).count(b'"topic":"issues"') < count:
                if not (block := connection.recv(4096)):
                    return  # the server has ended
                heard.append(block)
                if b"event: hello" in b"".join(heard):
                    told.set()

    thread = threading.Thread(target=listen)
    thread.start()
    assert told.wait(PATIENCE)

    def wait() -> bytes:
        thread.join(PATIENCE)
        found = b"".join(heard)
        assert found.count(b'"topic":"issues"') >= count, found
        return found

    return wait


def test_a_change_of_another_process_is_told_at_once(client: Client, sample: Sample) -> None:
    heard = listen_for_change(client)
    assert holdfast("issue", "create", "Dredge the channel", cwd=sample.checkout).returncode == 0
    assert b"event: change" in heard()
    assert "Dredge the channel" in client.get("/r/harbour/board").text


def test_a_change_costs_one_read_of_the_issues(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one commit is reported, and whichever pages are asked for again."""
    reads: list[str] = []
    look = IssueProjection.look

    def counted(projection: IssueProjection, reading: ClockReading, *, finished: bool) -> IssueSet[IssueSummary]:
        reads.append(threading.current_thread().name)
        return look(projection, reading, finished=finished)

    monkeypatch.setattr(live, "SETTLE", 1.0)
    with serving([sample.root], tmp_path) as server:
        client = Client(server)
        assert client.get("/r/harbour/overview").status == 200
        heard = listen_for_change(client)
        monkeypatch.setattr(IssueProjection, "look", counted)
        made = open_tracker(sample.root, actor="human:ada").create(NewIssue(title="Splice the hawser"))
        heard()
        for page in ("overview", "board", "graph", "attention", "names"):
            assert client.get(f"/r/harbour/{page}").status == 200
        assert made.id[:8] in client.get("/r/harbour/board").text
        assert len(reads) == 1, reads


def test_pages_are_told_that_a_store_is_watched_again(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something may have changed meanwhile."""
    fails, watch_issues = threading.Event(), Workspace._watch_issues

    class Failing(Watch):
        def _next(self, left: float | None) -> list[str]:
            if fails.wait(left):
                raise StoreUnavailable("files", "it is gone")
            return []

    first = iter([Failing()])
    monkeypatch.setattr(Workspace, "_watch_issues", lambda workspace: next(first, None) or watch_issues(workspace))
    monkeypatch.setattr(live, "TRY_AGAIN", 0.1)
    with serving([sample.root], tmp_path) as server:
        heard = listen_for_change(Client(server), count=2)
        fails.set()
        heard()


@pytest.mark.sampled(1)
def test_pages_and_live_changes_work_on_every_store(tmp_path: Path, store_url: str) -> None:
    root = tmp_path / "fleet"
    assert holdfast("init", root, "--store", store_url).returncode == 0
    for command in (("issue", "init"), ("issue", "create", "Sail"), ("ledger", "init"), ("lease", "acquire")):
        done = holdfast(*command, cwd=root)
        assert done.returncode == 0, done.stderr
    with serving([root], tmp_path / "data") as server:
        client = Client(server)
        for page in (
            "overview",
            "board",
            "graph",
            "worktrees",
            "timeline",
            "ledger",
            "audit",
            "findings",
            "audit-check",
        ):
            assert client.get(f"/r/fleet/{page}").status == 200, page
        heard = listen_for_change(client)
        assert holdfast("issue", "create", "Row", cwd=root).returncode == 0
        heard()
        assert "Row" in client.get("/r/fleet/board").text
