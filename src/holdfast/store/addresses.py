"""Addresses of stores (`postgresql://…`, `etcd://…`), and keeping their secrets out of files and output.

If its author forgot to escape a password, any part of an address may contain it. So an address that cannot be parsed
completely is refused and never quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import SettingInvalid

FILES = "files"  # the address of the store in the plain files of the directory itself
EXPECTED = "'files', file:///directory, postgresql://host/database?schema=name, or etcd://host:port,…/prefix"
SECRETS = ("password", "sslpassword")  # query parameters that are secret
ACCEPT_UNSAFE = "accept-unsafe-server"  # the option of an etcd address that accepts a version known to lose data
ETCD_OPTIONS = ("cacert", "cert", "key", "password", "tls", ACCEPT_UNSAFE)
POSTGRES_OPTIONS = (
    *"user password host hostaddr port dbname schema sslmode sslrootcert sslcert sslkey sslpassword".split(),
    *"channel_binding require_auth gssencmode application_name connect_timeout target_session_attrs".split(),
    *"load_balance_hosts keepalives keepalives_idle keepalives_interval keepalives_count tcp_user_timeout".split(),
)
"""The allowed parameters of libpq. Others write files (`sslkeylogfile`), read secrets from files that the address
chooses (`passfile`, `service`), or are secrets themselves."""
_OPTIONS = {"postgresql": POSTGRES_OPTIONS, "postgres": POSTGRES_OPTIONS, "etcd": ETCD_OPTIONS, "file": ()}
ETCD_PORT = 2379
_MOST_HOSTS = 100
_LOOPBACK = r"127(\.[0-9]{1,3}){3}|::1|localhost"  # not compiled here: few commands need it

_remembered: dict[str, str] = {}
opened: set[str] = set()
"""The schemes of the stores that this process has opened."""


def parts_of(address: str) -> SplitResult:
    """The parts of an address. An invalid one is refused without quoting it, since it may contain secrets."""
    scheme, separator, _ = address.partition("://")
    options = _OPTIONS.get(scheme.lower()) if separator else None
    if options is None:
        raise SettingInvalid("store", "…", EXPECTED)
    problem = ""
    try:
        parts = urlsplit(address)
        user, _, hosts = parts.netloc.rpartition("@")
        if not address.isprintable():
            problem = "printable"
        elif "#" in address or "@" in user + parts.path + parts.query:
            problem = "with # / ? @ in a password or name escaped as %23 %2F %3F %40"
        elif not {name for name, _ in query_of(parts)}.issubset(options):
            problem = f"with no other options than {', '.join(options) or 'none'}"
        elif options:
            _hosts_in(hosts)
    except ValueError:  # whose message may quote a password
        problem = f"an address with at most {_MOST_HOSTS} hosts, each valid, and ports from 1 to 65535"
    if problem:
        raise SettingInvalid("store", f"{scheme.lower()}://…", problem)
    return parts


def query_of(parts: SplitResult) -> list[tuple[str, str]]:
    """The options of an address."""
    return parse_qsl(parts.query, keep_blank_values=True)


def _hosts_in(text: str) -> tuple[tuple[str, int | None], ...]:
    """The hosts and ports of an address; `ValueError` if there are too many, or one is invalid."""
    hosts = tuple(map(_host_and_port, text.split(",")))
    if len(hosts) > _MOST_HOSTS:
        raise ValueError
    return hosts


def _host_and_port(text: str) -> tuple[str, int | None]:
    host, _, port = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if (port and not 0 < number < 65536) or (not bracketed and set(host) & set(":[]")):
        raise ValueError
    host = host.strip("[]")
    if not host.startswith("%"):  # the path of a socket
        host.encode("idna")  # a `UnicodeError` is a `ValueError`
    return host, number or None


def is_local(host: str) -> bool:
    """Whether a host is this machine: a loopback address or the directory of a socket."""
    return not host or host[0] in "/@" or re.fullmatch(_LOOPBACK, host) is not None


def remember(address: str) -> None:
    """Remember for the rest of the process that the user named this address, and its secrets."""
    if address != FILES:
        _remembered[without_secrets(address)] = address


def is_remembered(address: str) -> bool:
    return without_secrets(address) in _remembered


def with_secrets(address: str) -> str:
    """The address, with its remembered secrets if there are any."""
    return _remembered.get(address, address)


def without_secrets(address: str) -> str:
    """The address without its secrets, to be displayed and stored."""
    if address == FILES:
        return address
    parts = parts_of(address)
    user, at, hosts = parts.netloc.rpartition("@")
    kept = [each for each in query_of(parts) if each[0] not in SECRETS]
    return joined(parts._replace(netloc=user.partition(":")[0] + at + hosts), kept)


def joined(parts: SplitResult, query: list[tuple[str, str]]) -> str:
    """The address with these parts and this query. Without a host, it keeps its slashes."""
    text = urlencode(query, quote_via=quote, safe="/")
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{text}" if text else "")


def accepting_unsafe_server(address: str, *, accept: bool = True) -> str:
    """The address with or without the option that accepts an unsafe version of etcd."""
    if not address.lower().startswith("etcd:"):
        return address
    parts = parts_of(address)
    kept = [each for each in query_of(parts) if each[0] != ACCEPT_UNSAFE]
    return joined(parts, [*kept, (ACCEPT_UNSAFE, "true")] if accept else kept)


def advice_about_secrets(address: str) -> list[str]:
    """Advice where to put the secrets of an address so that later commands find them; empty if it has none."""
    if not has_secrets(address):
        return []
    elsewhere = "it in ~/.pgpass, or " if address.startswith("postgres") else ""
    return [f"The password is not stored: put {elsewhere}the whole address in HOLDFAST_STORE."]


def has_secrets(address: str) -> bool:
    if address in ("", FILES):
        return False
    parts = parts_of(address)
    secret = any(name in SECRETS for name, _ in query_of(parts))
    return ":" in parts.netloc.rpartition("@")[0] or secret


class EtcdAddress(NamedTuple):
    """A parsed etcd address: members of the cluster, prefix of the keys, credentials, and the address for display."""

    members: tuple[tuple[str, int], ...]
    prefix: str
    user: str
    password: str
    options: Mapping[str, str]
    display: str

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Parse `etcd://[user@]host:port,host:port/prefix[?tls=true&cacert=…&cert=…&key=…]`."""
        parts = parts_of(url)
        options = dict(query_of(parts))
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        prefix = unquote(parts.path).strip("/")
        members = tuple((host, port or ETCD_PORT) for host, port in _hosts_in(hosts))
        if not all(host for host, _ in members) or not prefix.isprintable():
            raise SettingInvalid("store", without_secrets(url), "etcd://host:port,…/prefix, with hosts and a prefix")
        secret = unquote(password) or options.get("password", "")
        return cls(members, prefix or "holdfast", unquote(name), secret, options, without_secrets(url))

    @property
    def secure(self) -> bool:
        return bool({"cacert", "cert", "key"} & set(self.options)) or self._says("tls")

    @property
    def accepts_unsafe(self) -> bool:
        return self._says(ACCEPT_UNSAFE)

    def _says(self, option: str) -> bool:
        return self.options.get(option) in ("true", "1")
