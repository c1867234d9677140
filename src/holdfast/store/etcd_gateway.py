"""Requests to etcd through the gateway of its members: JSON over HTTP, with the standard library.

The first member that answers is used until it stops answering; then the next one is asked. Idempotent requests are
repeated; a commit is repeated only if it cannot have been sent. The size of an answer and the time of a whole exchange
are limited, however slowly its bytes arrive.
"""

from __future__ import annotations

import base64
import calendar
import contextlib
import errno
import io
import os
import re
import socket
import ssl
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from email.utils import parsedate
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

import msgspec

from holdfast.clock import SYSTEM_CLOCK, Clock, format_duration
from holdfast.errors import (
    Failure,
    NotEncrypted,
    SettingInvalid,
    StoreAccessRefused,
    StoreFull,
    StoreUnavailable,
    StoreUnsafe,
    StoreUntrusted,
    UsageFailure,
    format_size,
)
from holdfast.locks.retry import CHANCE
from holdfast.store.addresses import EtcdAddress, is_local
from holdfast.store.model import ServerVersion
from holdfast.store.served import TIMEOUT, TimeLimit

MARGIN = 5.0
MOST_IDLE = 4
MOST_ANSWER = 384 << 20  # bytes: more than a page of 64 records of the largest size, in base64
MOST_MESSAGES = 64 << 20  # bytes of a watch that are received but not read yet
_BLOCK = 1 << 20
ALARMS = "/v3/maintenance/alarm"
MISUNDERSTOOD = (LookupError, TypeError, AttributeError, ValueError, msgspec.DecodeError, RecursionError)
"""The errors that parsing raises for a response that is not etcd's."""
NOT_ETCD = "its response is not etcd's, or its records are damaged"
_UNSAFE = (
    ("3.5.0", "3.5.2", "can lose acknowledged data when it is killed under load (etcd issue 13766)"),
    ("3.5.3", "3.5.5", "has known defects that can make its members disagree"),
    ("3.4.20", "3.4.21", "has known defects that can make its members disagree"),
)
"""The versions that etcd's maintainers advise against for production: first, last, and why."""
_WINDOW = 60.0  # bounds are kept for one to two of these: the clocks of two machines drift apart

_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 3, 5, 7, 8, 9, 16
"""gRPC codes which promise that the request had no effect."""


class ServerTime:
    """The servers' time: the highest bound from the dates of their answers, advanced by this machine's boot clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bounds: list[float | None] = [None, None]  # of this window and the previous one
        self._window_ends = 0.0
        self._last = 0.0

    def heard(self, date: str | None) -> None:
        """Note the date of an answer, a lower bound on the current time."""
        try:
            fields = parsedate(date) if date else None
            heard = None if fields is None else calendar.timegm(fields)
        except (ValueError, OverflowError):  # not a date
            heard = None
        if heard is None:
            return
        here = self._clock.boot()
        bound = heard - here
        with self._lock:
            if here >= self._window_ends:
                self._bounds = [None, self._bounds[0] if here < self._window_ends + _WINDOW else None]
                self._window_ends = here + _WINDOW
            self._bounds[0] = bound if self._bounds[0] is None else max(self._bounds[0], bound)

    def is_known(self) -> bool:
        """Whether an answer has arrived recently."""
        return self._clock.boot() < self._window_ends + _WINDOW

    def now(self, last_commit_at: float = 0.0) -> float:
        """The current time; never before a commit that was seen, nor before the last result."""
        with self._lock:
            known = [each for each in self._bounds if each is not None]
            found = self._clock.boot() + max(known, default=0.0)
            for earlier in (last_commit_at, self._last):
                if found < earlier <= found + MARGIN:
                    found = earlier
            self._last = found
            return found


class GatewayError(Exception):
    """etcd answered with an error. `code` is a gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def nothing_happened(self) -> bool:
        return self.code in (_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED)


class NotSent(Exception):
    """No member could be reached, so nothing was sent. `untrusted`: the cause is a certificate."""

    def __init__(self, reason: str, *, untrusted: bool = False) -> None:
        super().__init__(reason)
        self.untrusted = untrusted


class Gateway:
    """The members of one cluster, as seen by one process."""

    def __init__(self, address: EtcdAddress, *, timeout: float = TIMEOUT, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = address
        self.timeout = timeout
        self.time = ServerTime(clock)
        self._members = list(address.members)
        CHANCE.shuffle(self._members)  # spread many clients over the members
        self._idle: list[HTTPConnection] = []
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle)
        self._token = ""
        self.deadline = TimeLimit()
        self._lock = threading.Lock()
        self._answer_within = timeout / len(address.members)  # leaves time for the other members
        self._tls = self._context() if address.secure else None
        self.server: ServerVersion | None = None  # of the member that was connected to last
        if (
            self._tls is None
            and address.display not in _warned
            and not all(is_local(host) for host, _ in self._members)
        ):
            _warned.add(address.display)
            warnings.warn(NotEncrypted(address.display), stacklevel=2)

    def ask(self, path: str, request: object, *, patience: float | None = None) -> Any:
        """Send an idempotent request, and repeat it with other members until one answers."""
        with self.deadline.within(self.timeout if patience is None else patience) as deadline:
            return self._persist(path, request, deadline)

    def _persist(self, path: str, request: object, deadline: float) -> Any:
        untrusted = 0
        while True:
            try:
                return self.ask_once(path, request)
            except GatewayError as error:
                if error.nothing_happened:
                    raise self.failure(error) from error
                problem: Exception = error
            except (OSError, HTTPException, NotSent) as error:
                problem = error
            left = deadline - time.monotonic()
            untrusted = untrusted + 1 if _is_untrusted(problem) else 0
            if untrusted >= len(self.address.members):  # all of them: waiting does not help
                raise StoreUntrusted(self.address.display, _reason(problem)) from problem
            if left <= 0:
                raise self._away(problem) from problem
            time.sleep(min(left, 0.02 + CHANCE.random() * 0.08))

    def _away(self, problem: Exception) -> StoreUnavailable:
        hint = None
        signs = ("EOF", os.strerror(errno.ECONNRESET))
        if isinstance(problem, ConnectionResetError) or any(each in str(problem) for each in signs):
            hint = "The server closes the connection: if it expects TLS, add tls=true to the address."
            if self._tls is not None:
                hint = "The server closes the connection: if it runs without TLS, remove TLS options from the address."
        return StoreUnavailable(self.address.display, _reason(problem), hint=hint)

    def ask_once(self, path: str, request: object) -> Any:
        """Send a request to one member and return its answer. Raises `GatewayError`, `NotSent` or a network error."""
        connection = self._take()
        try:
            answer = self._exchange_as_user(connection, path, request)
        except BaseException:
            connection.close()
            self._next_member(connection)
            raise
        self._give_back(connection)
        return answer

    def metrics(self, *names: str) -> list[int]:
        """Some of the metrics that a member publishes; 0 for those that are not available."""
        try:
            connection = self._take()
            status, content = self._ask_member(connection, "GET", "/metrics", None)
        except (OSError, HTTPException, NotSent):
            return [0] * len(names)
        self._give_back(connection)
        text = content.decode("utf-8", "replace") if status == HTTPStatus.OK else ""
        found = (re.search(rf"^{name} (\S+)$", text, re.MULTILINE) for name in names)
        return [int(float(each[1])) if each else 0 for each in found]

    def _exchange_as_user(self, connection: HTTPConnection, path: str, request: object) -> Any:
        try:
            return self._exchange(connection, path, request)
        except GatewayError as error:
            if not self.address.user or error.code != _UNAUTHENTICATED:
                raise
        self._authenticate(connection)  # the token has expired; nothing has happened, so try again
        return self._exchange(connection, path, request)

    def _exchange(self, connection: HTTPConnection, path: str, request: object) -> Any:
        status, content = self._ask_member(connection, "POST", path, msgspec.json.encode(request))
        try:
            answer = msgspec.json.decode(content, type=dict[str, Any]) if content else {}
        except MISUNDERSTOOD:
            said = content[:100].decode("ascii", "replace").strip()
            raise GatewayError(0, f"{status} {said}: this does not look like the gateway of etcd") from None
        if status == 200 and "error" not in answer:
            # Every answer of etcd has a header (except that about alarms, in 3.4): one without it was cut off.
            if "header" not in answer and not (content and path == ALARMS):
                raise _incomplete(connection)
            return answer
        code = answer.get("code")
        raise GatewayError(code if isinstance(code, int) else 0, str(answer.get("message") or answer.get("error")))

    def _ask_member(self, connection: HTTPConnection, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """The status and content of an answer. Raises unless it is complete and within the time and size limits."""
        limit = self.deadline.left(self._answer_within)
        connection.response_class = partial(_TimedResponse, time.monotonic() + limit)  # type: ignore[assignment]
        if connection.sock is not None:
            connection.sock.settimeout(limit)
        try:
            connection.request(method, path, body, self.headers() if body is not None else {})
            response = connection.getresponse()
            blocks, size = [], 0
            while block := response.read(_BLOCK):
                blocks.append(block)
                size += len(block)
                if size > MOST_ANSWER:
                    most = format_size(MOST_ANSWER)
                    raise HTTPException(f"the response from {connection.host}:{connection.port} has more than {most}")
            if response.length:  # the connection ended before the content
                raise _incomplete(connection)
        except TimeoutError as error:
            within = format_duration(limit)
            raise TimeoutError(f"no answer from {connection.host}:{connection.port} within {within}") from error
        except OSError:
            raise
        except ValueError as error:  # from `http.client`, for a length that is not a number
            raise HTTPException(_reason(error)) from error
        self.time.heard(response.getheader("Date"))
        return response.status, b"".join(blocks)

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        return headers

    def failure(self, error: GatewayError) -> Failure:
        """The failure to raise for an error that repeating the request would not cure."""
        display = self.address.display
        if "too large" in str(error) or "too many operations" in str(error):
            return UsageFailure(
                f"{display} does not accept a commit of this size: {error}",
                hint="Start etcd with larger '--max-request-bytes' and '--max-txn-ops', or commit less at once.",
            )
        if error.code == _EXHAUSTED:
            return StoreFull(display, error)
        return StoreAccessRefused(display, error)

    def _take(self) -> HTTPConnection:
        if self._pid != os.getpid():  # after a fork: the parent's connections are not ours
            self._pid, self._idle = os.getpid(), []
            weakref.finalize(self, _close_all, self._idle)
        while self._idle:
            with contextlib.suppress(IndexError):
                connection = self._idle.pop()
                if not _has_ended(connection):
                    return connection
                connection.close()
        return self.connect()

    def _give_back(self, connection: HTTPConnection) -> None:
        if connection.sock is not None and len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def connect(self) -> HTTPConnection:
        """A connection to the first member that accepts one."""
        reason, untrusted = "the cluster has no members", 0
        for host, port in list(self._members):
            connection = self._connection(host, port)
            try:
                connection.connect()
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.timeout = self._answer_within
                connection.sock.settimeout(self._answer_within)
                self._check_version(connection)
                if self.address.user and not self._token:
                    self._authenticate(connection)
                return connection
            except (OSError, HTTPException) as error:
                connection.close()
                reason = f"{host}:{port}: {_reason(error)}"
                untrusted += _is_untrusted(error)
                self._next_member(connection)
            except Failure:
                connection.close()
                raise
        raise NotSent(reason, untrusted=untrusted == len(self._members))

    def _connection(self, host: str, port: int) -> HTTPConnection:
        limit = self.deadline.left(max(0.05, self.timeout / (2 * len(self._members))))  # leaves time for the others
        if self._tls is not None:
            return HTTPSConnection(host, port, timeout=limit, context=self._tls)
        return HTTPConnection(host, port, timeout=limit)

    def _next_member(self, connection: HTTPConnection) -> None:
        """Move a member that failed to the end of the list."""
        with self._lock:
            failed = (connection.host, connection.port)
            if failed in self._members:
                self._members.remove(failed)
                self._members.append(failed)

    def _check_version(self, connection: HTTPConnection) -> None:
        """Refuse a member whose version is known to lose data. Asks each member once per process, if it answers."""
        member = (connection.host, connection.port)
        version = _versions.get(member)
        if version is None:
            content = self._ask_member(connection, "GET", "/version", None)[1]
            if not content:
                raise _incomplete(connection)
            version = _version_in(content)
        self.server = server = server_version(version)
        if server.risk and not self.address.accepts_unsafe:
            reason = f"{connection.host}:{connection.port} runs {server}, which {server.risk}"
            raise StoreUnsafe(self.address.display, reason)  # not remembered: it may be upgraded
        if version:  # else a proxy answered, perhaps only this time
            _versions[member] = version

    def _authenticate(self, connection: HTTPConnection) -> None:
        request = {"name": self.address.user, "password": self.address.password}
        self._token = ""
        try:
            self._token = str(self._exchange(connection, "/v3/auth/authenticate", request)["token"])
            if not self._token.isascii() or not self._token.isprintable():
                raise KeyError
        except KeyError:
            raise HTTPException("the response has no token") from None
        except GatewayError as error:
            if "not enabled" not in str(error):  # the user may be that of a certificate
                raise self.failure(error) from error

    def _context(self) -> ssl.SSLContext:
        options = self.address.options
        try:
            context = ssl.create_default_context(cafile=options.get("cacert"))
            if "cert" in options:
                context.load_cert_chain(options["cert"], options.get("key"))
        except (OSError, ssl.SSLError) as error:
            expected = f"with valid certificates: {error}"
            raise SettingInvalid("store", self.address.display, expected) from error
        return context

    def close(self) -> None:
        """Close idle connections."""
        _close_all(self._idle)


@contextlib.contextmanager
def understanding(place: str) -> Iterator[None]:
    """Raise `StoreUnavailable` if the block cannot parse an answer."""
    try:
        yield
    except MISUNDERSTOOD as error:
        raise StoreUnavailable(place, NOT_ETCD) from error


class _TimedResponse(HTTPResponse):
    """A response that ends with `TimeoutError` at a deadline, even if a byte arrives now and then."""

    def __init__(self, deadline: float, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_UntilDeadline(self.fp.detach(), sock, deadline))


class _UntilDeadline(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the response takes too long")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


_versions: dict[tuple[str, int], str] = {}
"""The versions of the members that this process has connected to."""
_warned: set[str] = set()
"""The addresses whose unencrypted connections this process has already warned about."""


def _incomplete(connection: HTTPConnection) -> HTTPException:
    return HTTPException(f"the response from {connection.host}:{connection.port} is incomplete")


def _version_in(content: bytes) -> str:
    """The version in the answer to `/version`; "" if a proxy answers something else."""
    try:
        return str(msgspec.json.decode(content, type=dict[str, Any]).get("etcdserver", ""))
    except MISUNDERSTOOD:
        return ""


def server_version(version: str) -> ServerVersion:
    found = _numbers(version)
    risks = (risk for first, last, risk in _UNSAFE if _numbers(first) <= found <= _numbers(last))
    return ServerVersion("etcd", version, next(risks, ""))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version[:50].partition("-")[0].split(".") if part.isdecimal())


def _close_all(idle: list[HTTPConnection]) -> None:
    while idle:
        with contextlib.suppress(IndexError):
            idle.pop().close()


def _has_ended(connection: HTTPConnection) -> bool:
    """Whether the server has closed an idle connection."""
    if connection.sock is None:
        return True
    connection.sock.setblocking(False)
    try:
        connection.sock.recv(1)
        return True  # the end, or unexpected data
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            connection.sock.settimeout(connection.timeout)


def _is_untrusted(problem: Exception) -> bool:
    """Whether one side rejects the other's certificate or does not use TLS. An interrupted handshake does not count."""
    if isinstance(problem, NotSent):
        return problem.untrusted
    return isinstance(problem, ssl.SSLError) and not isinstance(
        problem, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError
    )


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__


def encoded(content: bytes) -> str:
    """Bytes in etcd's JSON."""
    return base64.b64encode(content).decode("ascii")


def decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def end_of(prefix: bytes) -> bytes:
    """The first key after all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Messages:
    """An endless response: one JSON object per line, in chunks."""

    def __init__(self, gateway: Gateway, path: str, request: object) -> None:
        self._connection = gateway.connect()
        self._connection.request("POST", path, msgspec.json.encode(request), gateway.headers())
        self._raw = b""
        self._body = b""
        self._in_body = False

    def wait(self, timeout: float) -> Iterator[Any]:
        """Wait for messages and yield those that arrived; none after the timeout. `OSError` if the response ends."""
        deadline, received = time.monotonic() + timeout, b""
        while b"\n" not in self._body:
            left = deadline - time.monotonic()
            if received and left <= 0:
                return
            try:
                self._connection.sock.settimeout(max(0.001, left))
                received = self._connection.sock.recv(1 << 16)
            except (TimeoutError, ssl.SSLWantReadError):
                return
            if not received:
                raise ConnectionError("etcd has ended the watch")
            self._raw += received
            self._unwrap()
            if len(self._raw) + len(self._body) > MOST_MESSAGES:
                raise ConnectionError(f"etcd sends a message of more than {format_size(MOST_MESSAGES)}")
        *lines, self._body = self._body.split(b"\n")
        yield from (msgspec.json.decode(line) for line in lines if line.strip())

    def _unwrap(self) -> None:
        """Move complete chunks from the received bytes to the body."""
        if not self._in_body:
            head, blank, rest = self._raw.partition(b"\r\n\r\n")
            if not blank:
                return
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise ConnectionError(f"etcd refuses the watch: {head[:200]!r}")
            self._in_body, self._raw = True, rest
        while True:
            size, line, rest = self._raw.partition(b"\r\n")
            if not line:
                return
            length = int(size.split(b";")[0], 16)
            if length <= 0:
                raise ConnectionError("etcd has ended the watch")
            if len(rest) < length + 2:
                return
            self._body += rest[:length]
            self._raw = rest[length + 2 :]

    def close(self) -> None:
        self._connection.close()
