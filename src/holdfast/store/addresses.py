"""Addresses of stores: `postgresql://…` and `etcd://…`; how they are shown and kept, without secrets."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

SECRETS = ("password", "sslpassword", "keypassword")
"""Parameters that only their owner may know."""


def without_secrets(address: str) -> str:
    """The address as it may be shown and written down."""
    parts = urlsplit(address)
    user, at, hosts = parts.netloc.rpartition("@")
    kept = [each for each in parse_qsl(parts.query, keep_blank_values=True) if each[0] not in SECRETS]
    return joined(parts._replace(netloc=user.partition(":")[0] + at + hosts), kept)


def joined(parts: SplitResult, query: list[tuple[str, str]]) -> str:
    """An address from its parts; one without a host keeps its slashes."""
    text = urlencode(query, quote_via=quote, safe="/")
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{text}" if text else "")


def has_secrets(address: str) -> bool:
    """Whether something of it must not be written down."""
    parts = urlsplit(address)
    return ":" in parts.netloc.rpartition("@")[0] or any(
        name in SECRETS for name, _ in parse_qsl(parts.query, keep_blank_values=True)
    )
