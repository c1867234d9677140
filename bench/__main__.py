"""`python -m bench [suite ...] [--quick] [--strict] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from bench import SUITES

if TYPE_CHECKING:
    from bench.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named suites, or all; print their reports and save them as JSON."""
    options = _parse(arguments)
    load = _load()
    print(_machine(load))
    reports: dict[str, Report] = {}
    for name in options.suites or SUITES:
        reports[name] = _run(name, quick=options.quick)
    record = {
        "schema_version": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": load,
        "quick": options.quick,
        "suites": {name: report.record() for name, report in reports.items()},
    }
    options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    print(f"\nwritten to {options.json}")
    return 1 if options.strict and not all(report.all_met for report in reports.values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Compare Holdfast with its peers.")
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"which to run: {', '.join(SUITES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds; noisy")
    parser.add_argument("--strict", action="store_true", help="end with status 1 unless every target is met")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-results.json"), metavar="FILE", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        parser.error(f"there is no suite {unknown[0]!r}; the suites are {', '.join(SUITES)}")
    return options


def _run(name: str, *, quick: bool) -> Report:
    started = monotonic()
    report: Report = import_module(SUITES[name]).run(quick=quick)
    print(f"\n== {name} ({monotonic() - started:.0f} s)\n")
    print("\n".join(report.lines()), flush=True)
    for action in report.afterwards:
        action()
    return report


def _load() -> float | None:
    if sys.platform == "win32":
        return None
    return os.getloadavg()[0]


def _machine(load: float | None) -> str:
    busy = "" if load is None else f", load {load:.1f}"
    return f"Python {platform.python_version()} on {platform.system()}, {os.cpu_count()} CPUs{busy}"


if __name__ == "__main__":
    sys.exit(main())
