"""Sizes as people write and read them: `500M`, `10 GiB`."""

from __future__ import annotations

import re

from holdfast.errors import SettingInvalid

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


def parse_size(text: str, *, setting: str = "size") -> int:
    """Read `4096`, `500M`, `1.5GiB`: bytes, or so many times 1024 of them."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingInvalid(setting, text, "a size such as 4096, 500M, 10G")
    return int(float(match[1]) * 1024 ** " kmgtp".index(match[2].lower() or " "))


def format_size(size: int) -> str:
    """Write a size with three digits or so: `512 B`, `1.5 MiB`."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
