"""Addresses of stores: `postgresql://…` and `etcd://…`; how they are shown and kept, without secrets."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from holdfast.errors import SettingInvalid

SECRETS = ("password", "sslpassword", "keypassword")
"""Parameters that only their owner may know."""


_remembered: dict[str, str] = {}


def parts_of(address: str) -> SplitResult:
    """The parts of an address; one that has none is refused, and not shown: there may be secrets in it."""
    try:
        return urlsplit(address)
    except ValueError as error:
        scheme = address.partition(":")[0]
        raise SettingInvalid("store", f"{scheme}://…", f"an address: {error}") from None


def remember_secrets(address: str) -> None:
    """Use the secrets of this address, as long as this process lives, wherever it is named without them: that
    is how it is written down."""
    if has_secrets(address):
        _remembered[without_secrets(address)] = address


def with_secrets(address: str) -> str:
    """An address as it was written down, with the secrets that are remembered for it, if any are."""
    return _remembered.get(address, address)


def without_secrets(address: str) -> str:
    """The address as it may be shown and written down."""
    if "://" not in address:  # not one of a server, such as `files`
        return address
    parts = parts_of(address)
    user, at, hosts = parts.netloc.rpartition("@")
    kept = [each for each in parse_qsl(parts.query, keep_blank_values=True) if each[0] not in SECRETS]
    return joined(parts._replace(netloc=user.partition(":")[0] + at + hosts), kept)


def joined(parts: SplitResult, query: list[tuple[str, str]]) -> str:
    """An address from its parts; one without a host keeps its slashes."""
    text = urlencode(query, quote_via=quote, safe="/")
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{text}" if text else "")


def advice_about_secrets(address: str) -> list[str]:
    """What to tell who gave an address with secrets: where later commands can have them from."""
    if not has_secrets(address):
        return []
    elsewhere = "it into ~/.pgpass, or " if address.startswith("postgres") else ""
    return [f"The password is not written down: put {elsewhere}the whole address into HOLDFAST_STORE."]


def has_secrets(address: str) -> bool:
    """Whether something of it must not be written down."""
    parts = parts_of(address)
    return ":" in parts.netloc.rpartition("@")[0] or any(
        name in SECRETS for name, _ in parse_qsl(parts.query, keep_blank_values=True)
    )
