"""Checks that every request passes before routing, and the headers of every response.

Each check is one function in `CHECKS`: it gets the request and returns a refusal, or None. They run in order, and the
first refusal is the answer. A page on another site, another program on this machine's loopback, and a name that is made
to resolve to this machine are all outside. Only a browser that opened the one-time address of the command is inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

LONGEST_BODY = 256 << 10
LONGEST_PATH, LONGEST_QUERY = 1024, 4096
MOST_HEADERS, LONGEST_HEADERS = 64, 16 << 10
BODY_TIME = 10.0  # seconds that a client has to send a body
MOST_REQUESTS, REQUESTS_EACH = 128, 32  # served at once: of all clients, and of one
MOST_STREAMS, STREAMS_EACH = 192, 64  # the same for streams of events

OPEN = "/open/"  # followed by the one-time secret
EVENTS = "/events"
STATIC = "/static/"
PUBLIC_PATHS = (OPEN, STATIC)  # open to a browser without the cookie
METRICS = re.compile(r"/(?:r/[^/]+/)?metrics")  # open to the token of a scraper, which opens nothing else

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'none'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: dict[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}
"""On every response. A static file replaces `cache-control`: its name changes with its content."""


class Refusal(NamedTuple):
    """Why a request is not served."""

    status: int
    message: str


class Places:
    """Places for what is served at once: `total` for all clients, and at most `each` of them for one."""

    def __init__(self, total: int, each: int) -> None:
        self._total, self._each = total, each
        self._taken: Counter[str] = Counter()

    def refusal(self, client: str) -> Refusal | None:
        """The refusal if there is no place for this client."""
        if self._taken[client] >= self._each:
            return Refusal(429, "this address has too many requests open: close some pages, or try again in a moment")
        if self._taken.total() >= self._total:
            return Refusal(503, "the server is busy with other clients: try again in a moment")
        return None

    @contextlib.contextmanager
    def taken(self, client: str) -> Iterator[None]:
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken -= Counter({client: 1})  # forgets a client that has none


class Access:
    """Access to one running server: its host names, its places, and the token that the one-time address gives out."""

    def __init__(self, hosts: Iterable[str], port: int, *, writable: bool) -> None:
        names = {f"[{each}]" if ":" in each else each for each in (*hosts, "127.0.0.1", "localhost", "::1")}
        self.hosts = frozenset(f"{each.lower()}:{port}" for each in names) | (names if port == 80 else frozenset())
        self.origins = frozenset(f"http://{each}" for each in self.hosts)
        self.cookie = f"holdfast-{port}"  # cookies do not distinguish ports
        self.writable = writable
        self.scraper_token = secrets.token_urlsafe(32)
        self._requests = Places(MOST_REQUESTS, REQUESTS_EACH)
        self._streams = Places(MOST_STREAMS, STREAMS_EACH)
        self._token = secrets.token_urlsafe(32)
        self._secret = secrets.token_urlsafe(32)

    @property
    def one_time_path(self) -> str:
        """Where a browser gets its cookie, once."""
        return OPEN + self._secret

    def places(self, path: bytes) -> Places:
        """The places for requests of this kind."""
        return self._streams if path == EVENTS.encode() else self._requests

    def redeem(self, secret: str) -> str | None:
        """The cookie for a browser that has the secret, which is worthless from now on; None for any other text."""
        if not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return None
        self._secret = secrets.token_urlsafe(32)
        return f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"

    def admits(self, cookies: str) -> bool:
        """Whether a `Cookie` header has the token."""
        pairs = (each.strip().partition("=") for each in cookies.split(";"))
        found = [value for name, _, value in pairs if name == self.cookie]
        return len(found) == 1 and hmac.compare_digest(found[0].encode(), self._token.encode())

    def admits_scraper(self, authorization: str) -> bool:
        """Whether an `Authorization` header has the token for the metrics."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self.scraper_token.encode())


class Arrived(NamedTuple):
    """A request as it arrived, before anything is decoded, and what the server admits."""

    method: str
    path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    access: Access
    client: str = ""  # its address

    def header(self, name: bytes) -> str | None:
        found = [value for each, value in self.headers if each == name]
        return found[0].decode("latin-1") if len(found) == 1 else None

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")


Check: TypeAlias = Callable[[Arrived], Refusal | None]


def check_size(request: Arrived) -> Refusal | None:
    """Bound the size of everything in front of the body."""
    size = sum(len(name) + len(value) for name, value in request.headers)
    if len(request.path) > LONGEST_PATH or len(request.query) > LONGEST_QUERY:
        return Refusal(414, "the address is too long")
    if len(request.headers) > MOST_HEADERS or size > LONGEST_HEADERS:
        return Refusal(431, "the headers are too large")
    return None


_SINGLE = (
    b"host",
    b"origin",
    b"cookie",
    b"authorization",
    b"content-length",
    b"content-type",
    b"sec-fetch-site",
    b"transfer-encoding",
)


def check_headers(request: Arrived) -> Refusal | None:
    """A header that decides something occurs once, and has no control character."""
    names = [name for name, _ in request.headers]
    if any(names.count(each) > 1 for each in _SINGLE):
        return Refusal(400, "a header is repeated")
    if any(re.search(rb"[\x00-\x1f\x7f]", value) for _, value in request.headers):
        return Refusal(400, "a header has a control character")
    return None


def check_host(request: Arrived) -> Refusal | None:
    """The name in `Host` is one of ours. This stops DNS rebinding: somebody else's name that resolves to this
    machine."""
    host = request.header(b"host")
    if host is None or host.lower() not in request.access.hosts:
        return Refusal(421, "this server does not serve that host name")
    return None


def check_method(request: Arrived) -> Refusal | None:
    if request.method not in ("GET", "HEAD", "POST"):
        return Refusal(405, "this method is not allowed")
    return None


_OVERRIDES = (b"x-http-method-override", b"x-http-method", b"x-method-override")


def check_override(request: Arrived) -> Refusal | None:
    """Nothing turns one method into another."""
    names = {name for name, _ in request.headers}
    if not names.isdisjoint(_OVERRIDES) or re.search(rb"(?:^|&)_method=", request.query):
        return Refusal(400, "the method cannot be overridden")
    return None


def check_upgrade(request: Arrived) -> Refusal | None:
    """There is no other protocol to switch to."""
    if request.header(b"upgrade") is not None or any(name == b"http2-settings" for name, _ in request.headers):
        return Refusal(400, "protocol upgrades are not supported")
    return None


_PATH = re.compile(rb"(?:/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~@:+,=-]+)+/?|/")


def check_path(request: Arrived) -> Refusal | None:
    """Plain names between single slashes; nothing is encoded, so nothing can mean something else after decoding."""
    if not _PATH.fullmatch(request.path):
        return Refusal(400, "this is not a valid path")
    return None


_QUERY = re.compile(rb"(?:[A-Za-z0-9._~@:+,=&/?!$'()*;-]|%[0-9A-Fa-f]{2})*")


def check_query(request: Arrived) -> Refusal | None:
    """No byte in the query that would have had to be encoded, and no encoded control character but a line break."""
    if not _QUERY.fullmatch(request.query) or re.search(rb"(?i)%(?:0[0-9bcef]|1[0-9a-f]|7f)", request.query):
        return Refusal(400, "the query has a character that is not allowed")
    return None


def check_token(request: Arrived) -> Refusal | None:
    """The cookie that the one-time address handed out; for metrics, the token of a scraper will do."""
    path = request.path.decode("latin-1")
    if path.startswith(PUBLIC_PATHS) and not request.changes:
        return None
    if METRICS.fullmatch(path) and request.access.admits_scraper(request.header(b"authorization") or ""):
        return None
    if not request.access.admits(request.header(b"cookie") or ""):
        return Refusal(401, "this browser has no access: open the address that 'holdfast web' printed")
    return None


def check_fetch(request: Arrived) -> Refusal | None:
    """Other pages, even on this machine, may link to ours, but not load parts of them."""
    site = request.header(b"sec-fetch-site")
    if site in (None, "same-origin", "none"):
        return None
    is_link = request.header(b"sec-fetch-mode") == "navigate" and request.header(b"sec-fetch-dest") == "document"
    if is_link and not request.changes:
        return None
    return Refusal(403, "other pages may not request this")


def check_writable(request: Arrived) -> Refusal | None:
    if request.changes and not request.access.writable:
        return Refusal(403, "this server is read-only: start it with --writable to allow actions")
    return None


def check_origin(request: Arrived) -> Refusal | None:
    """A change comes from one of our own pages."""
    if request.changes and request.header(b"origin") not in request.access.origins:
        return Refusal(403, "this request did not come from a page of this server")
    return None


def check_same_origin(request: Arrived) -> Refusal | None:
    """The same, as the browser sees it: not typed as an address, nor from a bookmark."""
    if request.changes and request.header(b"sec-fetch-site") not in (None, "same-origin"):
        return Refusal(403, "the browser says that this request did not come from a page of this server")
    return None


def check_content_type(request: Arrived) -> Refusal | None:
    """JSON only: a form of another page cannot send it."""
    kind = (request.header(b"content-type") or "").lower().replace(" ", "")
    if request.changes and kind not in ("application/json", "application/json;charset=utf-8"):
        return Refusal(415, "the content must be JSON")
    return None


def check_length(request: Arrived) -> Refusal | None:
    """The size of a body is known before it is read, and small."""
    length = request.header(b"content-length")
    if request.header(b"transfer-encoding") is not None:
        return Refusal(411, "the content length must be known in advance")
    if length is None:
        return Refusal(411, "the content length is missing") if request.changes else None
    if not length.isdigit() or int(length) > LONGEST_BODY:
        return Refusal(413, f"the content is too large; the limit is {LONGEST_BODY} bytes")
    if int(length) and not request.changes:
        return Refusal(400, "this method must not have a body")
    return None


def check_places(request: Arrived) -> Refusal | None:
    """No client takes all places, and all clients together cannot overload the server."""
    return request.access.places(request.path).refusal(request.client)


CHECKS: list[Check] = [
    check_size,
    check_headers,
    check_host,
    check_method,
    check_override,
    check_upgrade,
    check_path,
    check_query,
    check_token,
    check_fetch,
    check_writable,
    check_origin,
    check_same_origin,
    check_content_type,
    check_length,
    check_places,
]


class Secured:
    """The application behind the checks, as pure ASGI."""

    def __init__(self, app: App, access: Access, refuse: Callable[[Refusal], bytes]) -> None:
        """`refuse` makes the page of a refusal."""
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket is closed before it is accepted
        request = self.arrived(scope)
        refusal = judge(request)
        guarded = _with_headers(send)
        if refusal is not None:
            await _answer(guarded, refusal, self._refuse(refusal))
            return
        with self._access.places(request.path).taken(request.client):
            await self._app(scope, _bounded(receive), guarded)

    def arrived(self, scope: Mapping[str, Any]) -> Arrived:
        path = scope.get("raw_path") or scope["path"].encode("latin-1", "replace")
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        client = (scope.get("client") or ("",))[0]
        return Arrived(scope["method"], path, scope["query_string"], headers, self._access, client)


def judge(request: Arrived) -> Refusal | None:
    """The first refusal of the checks."""
    return next((found for check in CHECKS if (found := check(request)) is not None), None)


def _with_headers(send: Send) -> Send:
    """`send`, with the headers that every response carries."""

    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return with_headers


def _bounded(receive: Receive) -> Receive:
    """`receive`, for a body that is no larger than it may be, and arrives in time."""
    size, is_whole = 0, False
    deadline = asyncio.get_running_loop().time() + BODY_TIME

    async def bounded() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()  # waits for the end of the connection
        left = deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, left))
        except TimeoutError:
            return {"type": "http.disconnect"}
        size += len(message.get("body", b""))
        is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return {"type": "http.disconnect"} if size > LONGEST_BODY else message

    return bounded


async def _answer(send: Send, refusal: Refusal, content: bytes) -> None:
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", b"%d" % len(content))]
    headers.append((b"connection", b"close"))  # whatever follows on this connection is not read
    if refusal.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
