"""Addresses of stores (`postgresql://…`, `etcd://…`), and keeping their secrets out of files and output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.errors import SettingInvalid

SECRETS = ("password", "sslpassword", "keypassword")  # query parameters that are secret
ACCEPT_UNSAFE = "accept-unsafe-server"  # the option of an etcd address that accepts a version known to lose data
ETCD_OPTIONS = ("cacert", "cert", "key", "password", "tls", ACCEPT_UNSAFE)
ETCD_PORT = 2379

_remembered: dict[str, str] = {}


def parts_of(address: str) -> SplitResult:
    """The parts of an address. An invalid one is refused without quoting it, since it may contain secrets."""
    try:
        return urlsplit(address)
    except ValueError as error:
        scheme = address.partition(":")[0]
        raise SettingInvalid("store", f"{scheme}://…", f"an address: {error}") from None


def remember_secrets(address: str) -> None:
    """Remember the secrets of this address for the rest of the process; `with_secrets` adds them again."""
    if has_secrets(address):
        _remembered[without_secrets(address)] = address


def with_secrets(address: str) -> str:
    """The address, with its remembered secrets if there are any."""
    return _remembered.get(address, address)


def without_secrets(address: str) -> str:
    """The address as it may be displayed and stored."""
    if "://" not in address:  # not a server's, such as `files`
        return address
    parts = parts_of(address)
    user, at, hosts = parts.netloc.rpartition("@")
    kept = [each for each in parse_qsl(parts.query, keep_blank_values=True) if each[0] not in SECRETS]
    return joined(parts._replace(netloc=user.partition(":")[0] + at + hosts), kept)


def joined(parts: SplitResult, query: list[tuple[str, str]]) -> str:
    """Join an address from its parts. Without a host, it keeps its slashes."""
    text = urlencode(query, quote_via=quote, safe="/")
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{text}" if text else "")


def accepting_unsafe_server(address: str, *, accept: bool = True) -> str:
    """The address, with the option that accepts an unsafe version of etcd, or without it."""
    if not address.lower().startswith("etcd:"):
        return address
    parts = parts_of(address)
    kept = [each for each in parse_qsl(parts.query, keep_blank_values=True) if each[0] != ACCEPT_UNSAFE]
    return joined(parts, [*kept, (ACCEPT_UNSAFE, "true")] if accept else kept)


def advice_about_secrets(address: str) -> list[str]:
    """Where to put the secrets of an address, so that later commands find them."""
    if not has_secrets(address):
        return []
    elsewhere = "it in ~/.pgpass, or " if address.startswith("postgres") else ""
    return [f"The password is not stored: put {elsewhere}the whole address in HOLDFAST_STORE."]


def has_secrets(address: str) -> bool:
    parts = parts_of(address)
    return ":" in parts.netloc.rpartition("@")[0] or any(
        name in SECRETS for name, _ in parse_qsl(parts.query, keep_blank_values=True)
    )


class EtcdAddress(NamedTuple):
    """The members of a cluster, the prefix of a store's keys, a user, and the address without secrets."""

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
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        prefix = unquote(parts.path).strip("/")
        unknown = sorted(set(options) - set(ETCD_OPTIONS))
        if unknown or not hosts or not prefix.isprintable():
            problem = f"not {unknown[0]!r}" if unknown else "with hosts and a prefix"
            expected = f"etcd://host:port,…/prefix, with the options {', '.join(ETCD_OPTIONS)}; {problem}"
            raise SettingInvalid("store", without_secrets(url), expected)
        members = tuple(_host_and_port(each, url) for each in hosts.split(","))
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


def _host_and_port(text: str, url: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(ETCD_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingInvalid("store", without_secrets(url), "etcd://host:port,…/prefix")
    return host.strip("[]"), int(port)
