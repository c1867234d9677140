"""Retries with backoff: attempts, pauses and settings."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import (
    Corrupt,
    ExitStatus,
    LockConflict,
    LockReentry,
    LockTimeout,
    SettingInvalid,
    TooManyRetries,
)
from holdfast.locks.retry import (
    DEFAULT_LOCK_TIMEOUT,
    INITIAL_DELAY_MS,
    LOCK_TIMEOUT,
    MAX_ATTEMPTS,
    RetryConfig,
    lock_timeout,
    retry_config,
    retry_with_backoff,
)
from proof.effort import rounds


class Flaky:
    """An operation that raises each failure in turn and then succeeds, counting its calls."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= len(self.failures):
            raise self.failures[self.calls - 1]
        return "done"


def busy() -> LockConflict:
    return LockConflict("somebody has it")


def pauses_of(config: RetryConfig, *, chance: Callable[[], float]) -> list[float]:
    """The pauses of an operation that never succeeds."""
    pauses: list[float] = []
    with pytest.raises(TooManyRetries):
        retry_with_backoff(config, Flaky(*[busy()] * 100), sleep=pauses.append, chance=chance)
    return pauses


def no_sleep(_: float) -> None:
    pytest.fail("must not pause")


# --- Attempts -----------------------------------------------------------------------------------------


@pytest.mark.req("FL-13")
def test_the_defaults_are_three_attempts_50_ms_2_s_and_a_factor_of_two() -> None:
    assert RetryConfig() == (3, 0.05, 2.0, 2.0)
    assert RetryConfig() == RetryConfig(max_attempts=3, initial_delay=0.05, max_delay=2.0, backoff_factor=2.0)


@pytest.mark.req("FL-13")
def test_an_operation_that_succeeds_is_called_once_without_a_pause() -> None:
    operation = Flaky()

    assert retry_with_backoff(RetryConfig(), operation, sleep=no_sleep) == "done"
    assert operation.calls == 1


@pytest.mark.req("FL-13")
@pytest.mark.parametrize("failures", [1, 2])
def test_an_operation_that_fails_and_then_succeeds_is_a_success(failures: int) -> None:
    operation = Flaky(*[busy()] * failures)
    pauses: list[float] = []

    assert retry_with_backoff(RetryConfig(), operation, sleep=pauses.append) == "done"
    assert operation.calls == failures + 1
    assert len(pauses) == failures


@pytest.mark.req("FL-13")
@pytest.mark.parametrize("attempts", [1, 2, 3, 10])
def test_exactly_max_attempts_are_made_with_no_pause_after_the_last(attempts: int) -> None:
    failures = [busy() for _ in range(20)]
    operation = Flaky(*failures)
    pauses: list[float] = []

    with pytest.raises(TooManyRetries) as caught:
        retry_with_backoff(RetryConfig(max_attempts=attempts), operation, sleep=pauses.append)

    assert operation.calls == attempts
    assert len(pauses) == attempts - 1
    assert caught.value.attempts == attempts
    assert caught.value.last is failures[attempts - 1]
    assert caught.value.__cause__ is failures[attempts - 1]


@pytest.mark.req("FL-13", "FL-15")
def test_too_many_retries_reports_the_failure_of_the_last_attempt() -> None:
    last = LockTimeout("/a/b.lock", 5.0, "5s")

    with pytest.raises(TooManyRetries) as caught:
        retry_with_backoff(RetryConfig(max_attempts=1), Flaky(last))

    record = caught.value.as_record()
    assert str(caught.value).startswith("Lock contention: too many retries (1)")
    assert "/a/b.lock" in str(caught.value)
    assert record["code"] == "E_TOO_MANY_RETRIES"
    assert record["attempts"] == 1
    assert record["last"] == last.as_record()
    assert caught.value.exit_status is ExitStatus.TIMED_OUT


@pytest.mark.req("FL-13")
@pytest.mark.parametrize(
    "failure",
    [
        Corrupt("it is not what it must be"),
        LockReentry("by this thread already"),
        ValueError("a mistake of the caller"),
        OSError(5, "not a failure of ours"),
        KeyboardInterrupt(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_that_is_not_retryable_is_raised_at_once(failure: BaseException) -> None:
    operation = Flaky(failure)

    with pytest.raises(type(failure)) as caught:
        retry_with_backoff(RetryConfig(), operation, sleep=no_sleep)

    assert caught.value is failure
    assert operation.calls == 1


@pytest.mark.req("FL-13")
def test_a_failure_that_is_not_retryable_ends_the_retries_after_one_that_is() -> None:
    operation = Flaky(busy(), Corrupt("broken"), busy())

    with pytest.raises(Corrupt):
        retry_with_backoff(RetryConfig(), operation, sleep=lambda _: None)

    assert operation.calls == 2


# --- Pauses -------------------------------------------------------------------------------------------


@pytest.mark.req("FL-13")
def test_without_jitter_the_pauses_double_up_to_the_maximum() -> None:
    assert pauses_of(RetryConfig(max_attempts=9), chance=lambda: 0.0) == pytest.approx(
        [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    )


@pytest.mark.req("FL-13")
def test_jitter_shortens_a_pause_by_up_to_half() -> None:
    assert pauses_of(RetryConfig(max_attempts=4), chance=lambda: 1.0) == pytest.approx([0.025, 0.05, 0.1])
    assert pauses_of(RetryConfig(max_attempts=4), chance=lambda: 0.5) == pytest.approx([0.0375, 0.075, 0.15])


@pytest.mark.req("FL-13")
def test_jitter_gives_colliding_operations_different_pauses() -> None:
    config = RetryConfig(max_attempts=8)

    assert pauses_of(config, chance=random.Random(1).random) != pauses_of(config, chance=random.Random(2).random)


configs = st.builds(
    RetryConfig,
    max_attempts=st.integers(1, 10_000),
    initial_delay=st.floats(0, 10),
    max_delay=st.floats(10, 1e6),
    backoff_factor=st.floats(1, 1e6),
)


@pytest.mark.req("FL-13")
@settings(deadline=None, max_examples=rounds(100, least=5))
@given(configs, st.integers(1, 10_000), st.floats(0, 1))
def test_every_pause_is_between_half_the_full_pause_and_the_full_pause(
    config: RetryConfig, attempt: int, chance: float
) -> None:
    full = config.checked().pause_after(attempt, 0.0)

    assert 0 <= full <= config.max_delay
    assert full / 2 <= config.pause_after(attempt, chance) <= full
    assert config.pause_after(attempt + 1, 0.0) >= full, "a later pause is shorter"
    assert math.isfinite(full)


def test_a_pause_after_very_many_attempts_is_the_maximum_and_does_not_overflow() -> None:
    assert RetryConfig(max_attempts=10_000).pause_after(9_999, 0.0) == 2.0
    assert RetryConfig(initial_delay=0.0).pause_after(9_999, 0.0) == 0.0


@pytest.mark.req("FL-13")
def test_retries_really_pause() -> None:
    started = time.monotonic()

    retry_with_backoff(RetryConfig(initial_delay=0.02), Flaky(busy(), busy()))

    assert time.monotonic() - started >= (0.02 + 0.04) / 2


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (RetryConfig(max_attempts=0), "max_attempts"),
        (RetryConfig(max_attempts=-1), "max_attempts"),
        (RetryConfig(initial_delay=-0.1), "initial_delay"),
        (RetryConfig(initial_delay=math.nan), "initial_delay"),
        (RetryConfig(initial_delay=3.0), "initial_delay"),
        (RetryConfig(max_delay=math.nan), "initial_delay"),
        (RetryConfig(backoff_factor=0.5), "backoff_factor"),
        (RetryConfig(backoff_factor=math.nan), "backoff_factor"),
    ],
)
def test_an_invalid_config_is_refused_before_the_first_attempt(config: RetryConfig, wrong: str) -> None:
    operation = Flaky()

    with pytest.raises(SettingInvalid) as caught:
        retry_with_backoff(config, operation)

    assert caught.value.facts["setting"] == wrong
    assert operation.calls == 0


# --- Settings -----------------------------------------------------------------------------------------


@pytest.mark.req("FL-14")
def test_an_empty_environment_gives_the_defaults() -> None:
    assert lock_timeout({}) == DEFAULT_LOCK_TIMEOUT == 5.0
    assert retry_config({}) == RetryConfig()


@pytest.mark.req("FL-14")
@pytest.mark.parametrize(("text", "seconds"), [("10", 10.0), ("0", 0.0), ("0.25", 0.25), ("1e3", 1000.0), (" 7 ", 7.0)])
def test_the_lock_timeout_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert lock_timeout({LOCK_TIMEOUT: text}) == seconds


@pytest.mark.req("FL-14")
def test_attempts_and_initial_delay_are_read_and_the_rest_keeps_its_default() -> None:
    config = retry_config({MAX_ATTEMPTS: "7", INITIAL_DELAY_MS: "125"})

    assert config == RetryConfig(max_attempts=7, initial_delay=0.125)


@pytest.mark.req("FL-14")
def test_an_initial_delay_beyond_the_maximum_raises_the_maximum() -> None:
    config = retry_config({INITIAL_DELAY_MS: "3000"})

    assert (config.initial_delay, config.max_delay) == (3.0, 3.0)
    config.checked()


MALFORMED = ["", " ", "-1", "-0.5", "nan", "NaN", "inf", "-inf", "Infinity", "1e999"]
MALFORMED += ["five", "5s", "0x10", "1,5", "--", "1 2"]


def read_timeout(text: str) -> object:
    return lock_timeout({LOCK_TIMEOUT: text})


def read_attempts(text: str) -> object:
    return retry_config({MAX_ATTEMPTS: text})


def read_delay(text: str) -> object:
    return retry_config({INITIAL_DELAY_MS: text})


@pytest.mark.req("FL-14")
@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize(
    ("read", "name"),
    [(read_timeout, LOCK_TIMEOUT), (read_attempts, MAX_ATTEMPTS), (read_delay, INITIAL_DELAY_MS)],
    ids=["timeout", "attempts", "delay"],
)
def test_a_malformed_value_is_an_error_that_names_the_variable_and_the_value(
    read: Callable[[str], object], name: str, text: str
) -> None:
    with pytest.raises(SettingInvalid) as caught:
        read(text)

    assert caught.value.code == "E_SETTING_INVALID"
    assert caught.value.exit_status is ExitStatus.USAGE
    assert str(caught.value).startswith(f"{name} is ")
    assert text.strip() in str(caught.value)
    assert "remove it to use the default" in caught.value.hint


@pytest.mark.req("FL-14")
@pytest.mark.parametrize("text", ["0", "1.5", "3e0", "10001", "9" * 5000, "٣", "+3"])
def test_attempts_are_a_whole_number_from_1_to_10000(text: str) -> None:
    with pytest.raises(SettingInvalid, match="a whole number from 1 to 10000"):
        read_attempts(text)


@pytest.mark.req("FL-14")
@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.text())
def test_any_value_of_a_variable_is_either_a_valid_number_or_a_setting_error(text: str) -> None:
    for read in (read_timeout, read_attempts, read_delay):
        try:
            value = read(text)
        except SettingInvalid:
            continue
        if isinstance(value, RetryConfig):
            value.checked()
        else:
            assert isinstance(value, float)
            assert 0 <= value < math.inf
