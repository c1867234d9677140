"""Retries after contention, with exponential backoff and jitter."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from holdfast.clock import format_duration
from holdfast.errors import Failure, SettingInvalid, TooManyRetries

Result = TypeVar("Result")

CHANCE = random.Random()  # not the shared generator, which the program may have seeded


class RetryConfig(NamedTuple):
    """The number of attempts and the delays between them. The first delay is `initial_delay`; each later one is
    `backoff_factor` times longer, up to `max_delay`. Each is shortened at random by up to half."""

    max_attempts: int = 3
    initial_delay: float = 0.05
    max_delay: float = 2.0
    backoff_factor: float = 2.0

    def pause_after(self, attempt: int, chance: float) -> float:
        """The pause after an attempt, counted from 1; `chance` is between 0 and 1."""
        try:
            full = min(self.max_delay, self.initial_delay * self.backoff_factor ** (attempt - 1))
        except OverflowError:
            full = self.max_delay if self.initial_delay else 0.0
        return full * (1 - chance / 2)

    def checked(self) -> RetryConfig:
        """Return this configuration, or raise `SettingInvalid`."""
        if self.max_attempts < 1:
            raise SettingInvalid("max_attempts", str(self.max_attempts), "1 or more")
        if not 0 <= self.initial_delay <= self.max_delay:
            expected = f"a duration from 0s to max_delay, {format_duration(self.max_delay)}"
            raise SettingInvalid("initial_delay", format_duration(self.initial_delay), expected)
        if not self.backoff_factor >= 1:
            raise SettingInvalid("backoff_factor", str(self.backoff_factor), "1 or more")
        return self


def retry_with_backoff(
    config: RetryConfig,
    operation: Callable[[], Result],
    *,
    sleep: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = CHANCE.random,
) -> Result:
    """Call `operation` until it succeeds, or raises a failure that is not `retryable`. After the last attempt,
    raise `TooManyRetries` with the last failure as its cause."""
    config.checked()
    for attempt in range(1, config.max_attempts + 1):
        try:
            return operation()
        except Failure as failure:
            if not failure.retryable:
                raise
            last = failure
        if attempt < config.max_attempts:
            sleep(config.pause_after(attempt, chance()))
    raise TooManyRetries(config.max_attempts, last) from last


LOCK_TIMEOUT = "JIT_LOCK_TIMEOUT"
MAX_ATTEMPTS = "JIT_RETRY_MAX_ATTEMPTS"
INITIAL_DELAY_MS = "JIT_RETRY_INITIAL_DELAY_MS"

DEFAULT_LOCK_TIMEOUT = 5.0


def lock_timeout(environment: Mapping[str, str]) -> float:
    """Seconds to wait for a lock: `JIT_LOCK_TIMEOUT`, or 5."""
    return _number(environment, LOCK_TIMEOUT, DEFAULT_LOCK_TIMEOUT, "a number of seconds, 0 or more")


def retry_config(environment: Mapping[str, str]) -> RetryConfig:
    """The configuration in `JIT_RETRY_MAX_ATTEMPTS` and `JIT_RETRY_INITIAL_DELAY_MS`, or the defaults."""
    default = RetryConfig()
    attempts = environment.get(MAX_ATTEMPTS, str(default.max_attempts)).strip()
    if not (attempts.isascii() and attempts.isdigit() and len(attempts) < 10 and 1 <= int(attempts) <= 10_000):
        raise SettingInvalid(MAX_ATTEMPTS, attempts, "a whole number from 1 to 10000")
    expected = "a number of milliseconds, 0 or more"
    delay = _number(environment, INITIAL_DELAY_MS, default.initial_delay * 1000, expected) / 1000
    return default._replace(max_attempts=int(attempts), initial_delay=delay, max_delay=max(default.max_delay, delay))


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
