"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

UNLIMITED = math.inf
"""A time limit that never comes, as `duration_or_none` reads `none`."""

json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object, for programs."
)


def duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read the value of an option as seconds: `250ms`, `5s`, `1m30s`, `2h`, or a bare number."""
    if value is None:
        return None
    from holdfast.clock import parse_duration

    return parse_duration(value, setting=parameter.opts[0])


def duration_or_none(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Like `duration`, and `none` for no limit at all."""
    if value is not None and value.strip().lower() == "none":
        return UNLIMITED
    from holdfast.errors import SettingInvalid

    try:
        return duration(context, parameter, value)
    except SettingInvalid:
        expected = "a duration such as 250ms, 30s, 5m, 1h30m, or 'none' for no limit"
        raise SettingInvalid(parameter.opts[0], value or "", expected) from None
