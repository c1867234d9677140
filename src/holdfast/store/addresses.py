"""Addresses of stores (`postgresql://…`, `etcd://…`), and keeping their secrets out of files and output."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

from holdfast.errors import SettingInvalid

SECRETS = ("password", "sslpassword", "keypassword")  # query parameters that are secret

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
