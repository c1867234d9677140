"""Attacks on the server: each is a request that one named check refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast.web.security import MOST_REQUESTS, MOST_STREAMS, REQUESTS_EACH, STREAMS_EACH

JSON = (b"content-type", b"application/json")
BODY = b'{"issue": "x", "state": "done"}'
CLIENT = "192.0.2.1"  # of every attack


class Attack(NamedTuple):
    """A request: what it replaces in a request that is fine, the check that refuses it, and the status of the refusal.

    `headers` replace those of the same name; a value of None removes one. `open` counts the requests to the same path
    that are being served, by the address of their client.
    """

    name: str
    check: str
    status: int
    path: bytes = b"/r/harbour/board"
    query: bytes = b""
    method: str = "GET"
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    repeated: tuple[tuple[bytes, bytes], ...] = ()  # in addition to those of the same name
    writable: bool = True
    open: Mapping[str, int] = {}


def _post(name: str, check: str, status: int, *headers: tuple[bytes, bytes | None], **more: object) -> Attack:
    path = b"/r/harbour/do/move"
    return Attack(name, check, status, path, method="POST", headers=headers, **more)  # type: ignore[arg-type]


def _other_clients(count: int) -> dict[str, int]:
    return {f"198.51.100.{number}": 1 for number in range(count)}


ATTACKS = (
    # Names of somebody else that resolve to this machine
    Attack("rebinding", "check_host", 421, headers=((b"host", b"evil.example"),)),
    Attack("rebinding with our port", "check_host", 421, headers=((b"host", b"evil.example:8642"),)),
    Attack(
        "rebinding to a name that begins like ours",
        "check_host",
        421,
        headers=((b"host", b"localhost.evil.example:8642"),),
    ),
    Attack("the address with another port", "check_host", 421, headers=((b"host", b"127.0.0.1:80"),)),
    Attack("no host", "check_host", 421, headers=((b"host", None),)),
    Attack("a host with a user", "check_host", 421, headers=((b"host", b"127.0.0.1:8642@evil.example"),)),
    Attack("two hosts", "check_headers", 400, repeated=((b"host", b"evil.example"),)),
    # Tokens
    Attack("no token", "check_token", 401, headers=((b"cookie", None),)),
    Attack("an empty token", "check_token", 401, headers=((b"cookie", b"holdfast-8642="),)),
    Attack("a guessed token", "check_token", 401, headers=((b"cookie", b"holdfast-8642=" + b"A" * 43),)),
    Attack("the token of another port", "check_token", 401, headers=((b"cookie", b"holdfast-8643=TOKEN"),)),
    Attack(
        "a second token beside a guessed one",
        "check_token",
        401,
        headers=((b"cookie", b"holdfast-8642=x; holdfast-8642=TOKEN"),),
    ),
    Attack("two cookie headers", "check_headers", 400, repeated=((b"cookie", b"holdfast-8642=x"),)),
    Attack("the token in the address", "check_token", 401, query=b"holdfast-8642=TOKEN", headers=((b"cookie", None),)),
    Attack("a scraper without a token", "check_token", 401, path=b"/metrics", headers=((b"cookie", None),)),
    Attack(
        "the token of a scraper in another scheme",
        "check_token",
        401,
        path=b"/metrics",
        headers=((b"cookie", None), (b"authorization", b"Basic SCRAPER")),
    ),
    Attack(
        "the token of a scraper for a page",
        "check_token",
        401,
        headers=((b"cookie", None), (b"authorization", b"Bearer SCRAPER")),
    ),
    Attack(
        "the token of a scraper for a page with that name",
        "check_token",
        401,
        path=b"/r/harbour/issue/metrics",
        headers=((b"cookie", None), (b"authorization", b"Bearer SCRAPER")),
    ),
    Attack(
        "two tokens of scrapers",
        "check_headers",
        400,
        path=b"/metrics",
        headers=((b"authorization", b"Bearer x"),),
        repeated=((b"authorization", b"Bearer y"),),
    ),
    # Other pages
    _post("a cross-site form", "check_fetch", 403, (b"sec-fetch-site", b"cross-site")),
    _post("a form of another port of this machine", "check_fetch", 403, (b"sec-fetch-site", b"same-site")),
    Attack(
        "a cross-site image",
        "check_fetch",
        403,
        headers=((b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")),
    ),
    Attack(
        "a frame",
        "check_fetch",
        403,
        headers=((b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe")),
    ),
    _post("a forged origin", "check_origin", 403, (b"origin", b"http://evil.example")),
    _post("the origin of a sandbox", "check_origin", 403, (b"origin", b"null")),
    _post("no origin", "check_origin", 403, (b"origin", None)),
    _post("the origin of another port", "check_origin", 403, (b"origin", b"http://127.0.0.1:8643")),
    _post("an origin with encryption", "check_origin", 403, (b"origin", b"https://127.0.0.1:8642")),
    _post("a change typed as an address", "check_same_origin", 403, (b"sec-fetch-site", b"none")),
    # Changes
    _post("a change on a server that only shows", "check_writable", 403, writable=False),
    _post("a form as text", "check_content_type", 415, (b"content-type", b"text/plain")),
    _post("a form", "check_content_type", 415, (b"content-type", b"application/x-www-form-urlencoded")),
    _post("a form in parts", "check_content_type", 415, (b"content-type", b"multipart/form-data; boundary=x")),
    _post("JSON in another name", "check_content_type", 415, (b"content-type", b"application/json;x=text/plain")),
    _post("no type", "check_content_type", 415, (b"content-type", None)),
    _post("a huge body", "check_length", 413, (b"content-length", b"10000000")),
    _post("a negative length", "check_length", 413, (b"content-length", b"-1")),
    _post("a body without a length", "check_length", 411, (b"content-length", None)),
    _post("a body in chunks", "check_length", 411, (b"transfer-encoding", b"chunked")),
    Attack("a page with a body", "check_length", 400, headers=((b"content-length", b"5"),)),
    _post("two lengths", "check_headers", 400, repeated=((b"content-length", b"5"),)),
    # Methods and protocols
    Attack("DELETE", "check_method", 405, method="DELETE"),
    Attack("TRACE", "check_method", 405, method="TRACE"),
    Attack("CONNECT", "check_method", 405, method="CONNECT"),
    Attack("a preflight", "check_method", 405, method="OPTIONS"),
    _post("a method override", "check_override", 400, (b"x-http-method-override", b"GET")),
    Attack("a method override in the query", "check_override", 400, query=b"_method=POST"),
    Attack("a websocket", "check_upgrade", 400, headers=((b"upgrade", b"websocket"), (b"connection", b"upgrade"))),
    Attack("an upgrade to HTTP/2", "check_upgrade", 400, headers=((b"upgrade", b"h2c"), (b"http2-settings", b"x"))),
    # Paths
    Attack("traversal", "check_path", 400, path=b"/static/../../etc/passwd"),
    Attack("encoded dots", "check_path", 400, path=b"/static/%2e%2e/%2e%2e/etc/passwd"),
    Attack("dots encoded twice", "check_path", 400, path=b"/static/%252e%252e/passwd"),
    Attack("an encoded slash", "check_path", 400, path=b"/static/..%2fpasswd"),
    Attack("a backslash", "check_path", 400, path=b"/static/..\\passwd"),
    Attack("a double slash", "check_path", 400, path=b"//evil.example/"),
    Attack("a double slash inside", "check_path", 400, path=b"/r//board"),
    Attack("a null byte", "check_path", 400, path=b"/static/app.js%00.png"),
    Attack("an absolute address", "check_path", 400, path=b"http://evil.example/"),
    Attack("a line break in the path", "check_path", 400, path=b"/r/harbour/board%0d%0aSet-Cookie:x"),
    Attack("a parameter of a path", "check_path", 400, path=b"/r/harbour/board;x"),
    Attack("a script in the query", "check_query", 400, query=b"q=<script>alert(1)</script>"),
    Attack("an escape in the query", "check_query", 400, query=b"q=%1b[2J"),
    Attack("a null byte in the query", "check_query", 400, query=b"q=%00"),
    # Sizes
    Attack("a long path", "check_size", 414, path=b"/" + b"a" * 2000),
    Attack("a long query", "check_size", 414, query=b"q=" + b"a" * 5000),
    Attack("many headers", "check_size", 431, headers=tuple((b"x-%d" % number, b"x") for number in range(100))),
    Attack("a large header", "check_size", 431, headers=((b"x-large", b"x" * 20_000),)),
    Attack("a control character in a header", "check_headers", 400, headers=((b"x-broken", b"a\rSet-Cookie: x"),)),
    # Places
    Attack("more requests than the share of a client", "check_places", 429, open={CLIENT: REQUESTS_EACH}),
    Attack("more streams than the share of a client", "check_places", 429, b"/events", open={CLIENT: STREAMS_EACH}),
    Attack("requests from many addresses", "check_places", 503, open=_other_clients(MOST_REQUESTS)),
    Attack("streams to many addresses", "check_places", 503, b"/events", open=_other_clients(MOST_STREAMS)),
)
