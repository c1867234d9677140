"""The configuration of a ledger, `meta.json`. Other programs keep their own fields there: all are kept."""

from __future__ import annotations

from typing import Any

from holdfast.clock import format_duration, parse_duration
from holdfast.errors import SettingInvalid
from holdfast.store.model import Create, Decision, Key, Store, StructCodec, View

DEFAULT_LOCK_TIMEOUT = 300.0
SHORTEST, LONGEST = 1.0, 3600.0
"""How long a claim may last."""

META: Key[dict[str, Any]] = Key("ledger/meta", StructCodec(dict[str, Any]))


def create_meta(
    store: Store, *, lock_timeout: float = DEFAULT_LOCK_TIMEOUT, claim_files: bool = False
) -> None:
    """Write the configuration of a new ledger; `AlreadyExists` if there is one."""
    record: dict[str, Any] = {"lock_timeout": format_duration(checked_ttl(lock_timeout, "lock_timeout"))}
    if claim_files:
        record["claim_files"] = True

    def decide(view: View, now: float) -> Decision[None]:
        return Decision([Create(META, record)], None)

    store.transact([META], decide)


def read_meta(store: Store) -> dict[str, Any] | None:
    """The configuration, None if there is none."""
    document = store.read(META)
    return None if document is None else document.record


def lock_timeout(meta: dict[str, Any] | None) -> float:
    """How long a claim lasts if nobody says otherwise: `lock_timeout`, from 1 s to 1 h, else 5 minutes."""
    value = (meta or {}).get("lock_timeout")
    if value is None:
        return DEFAULT_LOCK_TIMEOUT
    setting, expected = "lock_timeout in meta.json", 'a duration from 1s to 1h, such as "5m"'
    if not isinstance(value, str):
        raise SettingInvalid(setting, str(value), expected)
    try:
        seconds = parse_duration(value, setting=setting)
    except SettingInvalid:
        raise SettingInvalid(setting, value, expected) from None
    if not SHORTEST <= seconds <= LONGEST:
        raise SettingInvalid(setting, value, expected)
    return seconds


def has_claim_files(meta: dict[str, Any] | None) -> bool:
    """Whether claims are kept as files in `locks/` too."""
    value = (meta or {}).get("claim_files", False)
    if not isinstance(value, bool):
        raise SettingInvalid("claim_files in meta.json", str(value), "true or false")
    return value


def checked_ttl(ttl: float, setting: str = "ttl") -> float:
    """A duration that a claim may last."""
    if not SHORTEST <= ttl <= LONGEST:
        raise SettingInvalid(setting, f"{ttl:g}s", "a duration from 1s to 1h")
    return float(ttl)
