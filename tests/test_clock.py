"""Injected clocks, and the text forms of durations and instants."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.clock import (
    SYSTEM_CLOCK,
    Clock,
    ManualClock,
    format_duration,
    format_instant,
    parse_duration,
    parse_instant,
)
from holdfast.errors import SettingInvalid
from proof.effort import rounds

# --- Clocks -------------------------------------------------------------------------------------------


def test_the_system_clock_matches_the_time_module() -> None:
    before = time.time(), time.monotonic()
    wall, monotonic = SYSTEM_CLOCK.wall(), SYSTEM_CLOCK.monotonic()

    assert before[0] <= wall <= time.time()
    assert before[1] <= monotonic <= time.monotonic()
    assert SYSTEM_CLOCK.boot() <= SYSTEM_CLOCK.boot()


def test_a_manual_clock_stands_still_until_it_is_told_to_move() -> None:
    clock: Clock = ManualClock(wall=1000.0, monotonic=5.0)

    assert [clock.wall(), clock.monotonic(), clock.boot()] == [1000.0, 5.0, 5.0]
    assert [clock.wall(), clock.monotonic(), clock.boot()] == [1000.0, 5.0, 5.0]


def test_advancing_moves_all_clocks() -> None:
    clock = ManualClock(wall=1000.0, monotonic=5.0)

    clock.advance(2.5)

    assert [clock.wall(), clock.monotonic(), clock.boot()] == [1002.5, 7.5, 7.5]


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_setting_the_wall_clock_moves_no_other(seconds: float) -> None:
    clock = ManualClock(wall=10_000.0, monotonic=5.0)

    clock.step_wall(seconds)

    assert [clock.wall(), clock.monotonic(), clock.boot()] == [10_000.0 + seconds, 5.0, 5.0]


# --- Instants -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("2023-11-14T22:13:20Z", 1_700_000_000.0),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000.0),
        ("2023-11-14T22:13:20.5Z", 1_700_000_000.5),
        ("2023-11-14T22:13:20.123456Z", 1_700_000_000.123456),
        ("2023-11-14T22:13:20.123456789Z", 1_700_000_000.123456),
        ("2023-11-14T22:13:20.123456789+00:00", 1_700_000_000.123456),
        ("2023-11-14T17:13:20.000000001-05:00", 1_700_000_000.0),
        ("2023-11-14t22:13:20z", 1_700_000_000.0),
        ("2023-11-14t22:13:20.5z", 1_700_000_000.5),
        ("2023-11-14T22:12:60Z", 1_699_999_980.0),
        ("2023-11-14T22:12:60.25z", 1_699_999_980.25),
        ("2023-11-14T23:12:60+01:00", 1_699_999_980.0),
    ],
)
def test_an_instant_with_a_time_zone_is_parsed_including_nanoseconds(text: str, instant: float) -> None:
    assert parse_instant(text) == pytest.approx(instant, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["", "now", "2023-11-14", "2023-11-14T22:13:20", "2023-13-14T22:13:20Z", "1700000000", "Z", "\0"]
)
def test_any_other_text_is_not_an_instant(text: str) -> None:
    with pytest.raises(ValueError, match=r"no time zone|Invalid isoformat|must be in|out of range"):
        parse_instant(text)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.floats(min_value=-6e10, max_value=2.5e11))
@example(0.0)
@example(1_700_000_000.999_999_6)
def test_a_formatted_instant_parses_back_to_the_microsecond(instant: float) -> None:
    text = format_instant(instant)

    assert text.endswith("Z")
    assert parse_instant(text) == pytest.approx(instant, abs=2e-5)
    assert format_instant(parse_instant(text)) == text


def test_formatted_instants_sort_chronologically() -> None:
    instants = [0.0, 0.5, 1_699_999_999.999_999, 1_700_000_000.0, 1_700_000_000.000_001]

    texts = [format_instant(each) for each in instants]

    assert texts == sorted(texts)
    assert texts[0] == "1970-01-01T00:00:00.000000Z"


@settings(deadline=None, max_examples=rounds(300, least=5))
@given(st.text() | st.text("0123456789-:.TZ+W ,", max_size=40))
@example("0001-01-01T00:00:00+23:59")
@example("9999-12-31T23:59:59.999999-23:59")
@example("9999-12-31T23:59:60Z")
def test_any_text_is_an_instant_that_can_be_written_or_a_value_error(text: str) -> None:
    try:
        instant = parse_instant(text)
    except ValueError:
        return
    assert format_instant(instant)


# --- Durations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("1.5", 1.5),
        ("250ms", 0.25),
        ("30s", 30.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1m30s", 90.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (" 10s ", 10.0),
        ("1s500ms", 1.5),
        ("1500000us", 1.5),
        ("1500000µs", 1.5),
        ("1500000μs", 1.5),
        ("1s500000000ns", 1.5),
    ],
)
def test_durations_are_parsed_in_every_common_notation(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", " ", "s", "5x", "-5s", "5 s", "5s ago", "1e3", "nan", "inf", "٣s", "5S", "1h-30m", "1..5s", ".5s"],
)
def test_any_other_duration_is_refused_naming_the_setting(text: str) -> None:
    with pytest.raises(SettingInvalid, match="a duration such as") as caught:
        parse_duration(text, setting="lock_timeout")

    assert caught.value.facts["setting"] == "lock_timeout"
    assert caught.value.facts["value"] == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.05, "50ms"),
        (0.9999, "1000ms"),
        (1.0, "1s"),
        (5.0, "5s"),
        (1.25, "1.2s"),
        (59.0, "59s"),
        (60.0, "1m"),
        (90.0, "1m30s"),
        (3600.0, "1h"),
        (3601.0, "1h1s"),
        (7200.0, "2h"),
        (100_000.0, "1d3h"),
        (-5.0, "-5s"),
    ],
)
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.floats(0, 1e9))
@example(59.96)
@example(0.9996)
@example(3599.6)
def test_a_formatted_duration_parses_back_to_nearly_the_same(seconds: float) -> None:
    read = parse_duration(format_duration(seconds))

    if seconds < 1:
        assert read == pytest.approx(seconds, abs=0.0006)
    elif seconds < 60:
        assert read == pytest.approx(seconds, abs=0.06)
    else:
        assert read <= seconds + 0.5
        assert read == pytest.approx(seconds, rel=0.05)


@settings(deadline=None, max_examples=rounds(100, least=5))
@given(st.integers(0, 59), st.integers(0, 23), st.integers(0, 59), st.integers(1, 999))
def test_whole_numbers_of_units_survive_the_round_trip(seconds: int, hours: int, minutes: int, days: int) -> None:
    for duration in (
        seconds,
        minutes * 60 + seconds,
        hours * 3600 + minutes * 60,
        days * 86400 + hours * 3600,
    ):
        assert parse_duration(format_duration(float(duration))) == duration
