"""Lock settings from an environment that a face hands in. A value that makes no sense is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping

from holdfast.errors import SettingInvalid
from holdfast.locks.retry import RetryConfig

LOCK_TIMEOUT = "JIT_LOCK_TIMEOUT"
MAX_ATTEMPTS = "JIT_RETRY_MAX_ATTEMPTS"
INITIAL_DELAY_MS = "JIT_RETRY_INITIAL_DELAY_MS"

DEFAULT_LOCK_TIMEOUT = 5.0


def lock_timeout(environment: Mapping[str, str]) -> float:
    """Seconds to wait for a lock: `JIT_LOCK_TIMEOUT`, or 5."""
    return _number(environment, LOCK_TIMEOUT, DEFAULT_LOCK_TIMEOUT, "a number of seconds, 0 or more")


def retry_config(environment: Mapping[str, str]) -> RetryConfig:
    """`JIT_RETRY_MAX_ATTEMPTS` and `JIT_RETRY_INITIAL_DELAY_MS`, or the defaults."""
    default = RetryConfig()
    attempts = environment.get(MAX_ATTEMPTS, str(default.max_attempts)).strip()
    if not (
        attempts.isascii() and attempts.isdigit() and len(attempts) < 10 and 1 <= int(attempts) <= 10_000
    ):
        raise SettingInvalid(MAX_ATTEMPTS, attempts, "a whole number from 1 to 10000")
    wanted = "a number of milliseconds, 0 or more"
    delay = _number(environment, INITIAL_DELAY_MS, default.initial_delay * 1000, wanted) / 1000
    return default._replace(
        max_attempts=int(attempts), initial_delay=delay, max_delay=max(default.max_delay, delay)
    )


def _number(environment: Mapping[str, str], name: str, default: float, expected: str) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        raise SettingInvalid(name, text, expected) from None
    if not (math.isfinite(value) and value >= 0):
        raise SettingInvalid(name, text, expected)
    return value
