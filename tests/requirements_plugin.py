"""Pytest plugin that reports which requirements a run has proven, and which tests it skipped.

`docs/requirements.md` lists the requirements. A test that proves one carries `@pytest.mark.req("RL-08")`.
A requirement is proven when a test that carries its ID passes, including its setup and teardown.
A run of the whole suite fails if a delivered requirement (its column `since` is filled) is not proven.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from proof import effort
from tests.support import homes

PAGE = "docs/requirements.md"

_ROW = re.compile(r"\| (?P<id>[A-Z]{2}-\d{2}) \| (?P<demand>(?:\\\||[^|])+) \| (?P<since>[^|]*)\|")
_NARROWING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "collectonly")
_PROPERTY = "requirement"
_TRIED = "tried"
COSTLY = [
    f"tests/{name}.py"
    for name in """
    attacks/test_shared_machines cli/test_agent_run cli/test_archive cli/test_config cli/test_demo cli/test_guard
    cli/test_issue cli/test_land cli/test_lock cli/test_progress cli/test_run cli/test_snapshots cli/test_top
    cli/test_trust cli/test_who cli/test_worktree fs/test_directory fs/test_durable_crash git/test_merging
    git/test_snapshots issues/test_batches issues/test_foreign_programs issues/test_merging
    issues/test_served_trackers issues/test_storms ledger/test_crashes ledger/test_storms
    locks/test_file_lock_races locks/test_file_locker locks/test_ledger_lock_processes locks/test_repo_lock_races
    repository/test_conflicts repository/test_content repository/test_content_sweep repository/test_full_disk
    repository/test_git_assignments repository/test_git_home repository/test_git_isolated
    repository/test_git_records repository/test_interruptions repository/test_joining repository/test_landing
    repository/test_landing_checks repository/test_landing_kills repository/test_lifecycle
    repository/test_lock_waits repository/test_migration repository/test_publish_fencing repository/test_remnants
    repository/test_restoring repository/test_second_machine repository/test_sites repository/test_store_away
    repository/test_transfer repository/test_worktree_crashes store/test_archive store/test_etcd_store
    store/test_file_store store/test_file_store_details store/test_flat_streams store/test_late_lines
    store/test_loose_records store/test_postgres_store store/test_servers_over_the_network store/test_store_crashes
    test_bench test_every_store testing/test_contract trees/test_scan_worker web/test_browser web/test_looks
    web/test_pages
    """.split()
]
"""The files that take most of the time. A run of everything takes a third of their tests, chosen by the seed; a run of
such a file, and a proof, takes all of them."""

_DETECTOR = re.compile(r"planted|_finds?_|_catch|is_found|would_be_found|is_noticed")  # by naming convention


class Requirement(NamedTuple):
    """One row of the page; `since` is the version that delivers it, or empty."""

    id: str
    demand: str
    since: str


def read_requirements(page: str) -> dict[str, Requirement]:
    """Parse the rows of the page by ID; a malformed row or a duplicate ID is an error."""
    found: dict[str, Requirement] = {}
    for line in page.splitlines():
        if not re.match(r"\| [A-Z]{2}-\d", line):
            continue
        row = _ROW.fullmatch(line)
        if row is None:
            raise pytest.UsageError(f"{PAGE}: this row is not 'ID, demand, since': {line}")
        if row["id"] in found:
            raise pytest.UsageError(f"{PAGE}: {row['id']} is listed twice")
        found[row["id"]] = Requirement(row["id"], row["demand"], row["since"].strip())
    return found


class Accounting:
    """Collects the results of one run and reports the proven requirements at its end."""

    def __init__(self, requirements: Mapping[str, Requirement], *, whole: bool) -> None:
        self.requirements = requirements
        self.delivered = {each.id for each in requirements.values() if each.since}
        self.whole = whole
        self.left_out = 0
        self.tried: Counter[str] = Counter()
        self._passed: dict[str, set[str]] = {}

    def pytest_report_header(self) -> str:
        return f"effort: HOLDFAST_ROUNDS={effort.SHARE:g} HOLDFAST_SEED={effort.SEED}"

    @property
    def proven(self) -> set[str]:
        """The requirements that have a passing test."""
        return set().union(*self._passed.values())

    @property
    def missing(self) -> list[str]:
        """Delivered requirements that are not proven; empty for a partial run."""
        return sorted(self.delivered - self.proven) if self.whole else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = _sampled(items)
        if _covers_everything(config):
            kept = _thinned(kept)
        self.left_out = len(items) - len(kept)
        items[:] = kept
        problems: list[str] = []
        for item in items:
            for mark in item.iter_markers("req"):
                if not mark.args:
                    problems.append(f"{item.nodeid}: its mark 'req' names no requirement")
                problems += [
                    f"{item.nodeid}: {PAGE} has no {name!r}" for name in mark.args if name not in self.requirements
                ]
                item.user_properties += [(_PROPERTY, name) for name in mark.args]
        if problems:
            raise pytest.UsageError(*problems)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if items:
            self.whole = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = effort.tried.copy()
        yield
        item.user_properties += [(_TRIED, each) for each in (effort.tried - before).items()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.tried["planted faults, each found"] += bool(_DETECTOR.search(report.nodeid))
            for key, found in report.user_properties:
                if key == _TRIED and isinstance(found, tuple | list):
                    self.tried[found[0]] += found[1]
        if report.failed:
            self._passed.pop(report.nodeid, None)
        elif report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self._passed[report.nodeid] = {str(name) for key, name in report.user_properties if key == _PROPERTY}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.shouldfail or session.shouldstop:
            self.whole = False
        if self.missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        _list_skipped(terminalreporter)
        proven = self.proven
        terminalreporter.section("requirements", green=not self.missing, red=bool(self.missing))
        terminalreporter.write_line(
            f"proven by a passing test: {len(proven)} of all {len(self.requirements)}, "
            f"{len(proven & self.delivered)} of the {len(self.delivered)} delivered"
        )
        if not self.whole:
            terminalreporter.write_line("(partial run: unproven requirements are not judged)")
        if self.tried.total():
            terminalreporter.section("trials")
            for kind, count in sorted(self.tried.items()):
                terminalreporter.write_line(f"{count:>12,} {kind}")
            terminalreporter.write_line(f"{len(terminalreporter.stats.get('failed', [])):>12,} failures found")
        if self.left_out:
            terminalreporter.write_line(f"left to `make proof`: {self.left_out} tests")
        for name in self.missing:
            demand = self.requirements[name].demand
            terminalreporter.write_line(f"NOT PROVEN: {name} {demand}", red=True, bold=True)


def _sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Select the tests of this run: all of them at full rounds.

    Otherwise leave out the long ones and most of those in a git home, and of each test marked `sampled` keep as many
    parameters as the mark says.
    """
    if effort.SHARE >= 1:
        return items
    items = [item for item in items if item.get_closest_marker("long") is None and not homes.is_left_out(item)]
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[str] = set()
    for name, family in families.items():
        count = family[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        chosen = random.Random(f"{effort.SEED} {name}").sample(family, min(count, len(family)))
        dropped |= {item.nodeid for item in family} - {item.nodeid for item in chosen}
    return [item for item in items if item.nodeid not in dropped]


def _thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of the tests of costly files, select a third, and those that prove requirements."""
    if effort.SHARE >= 1:
        return items
    files: dict[str, list[pytest.Item]] = {name: [] for name in COSTLY}
    for item in items:
        if item.get_closest_marker("req") is None:
            files.get(item.nodeid.partition("::")[0], []).append(item)
    dropped: set[str] = set()
    for name, family in files.items():
        dropped |= {item.nodeid for item in random.Random(f"{effort.SEED} {name}").sample(family, 2 * len(family) // 3)}
    return [item for item in items if item.nodeid not in dropped]


def _list_skipped(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests with their reasons, impossible to overlook."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section("NOT RUN HERE", sep="!", yellow=True, bold=True)
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}", yellow=True)


def _is_whole(config: pytest.Config) -> bool:
    """Whether the run covers all configured test paths.

    When several processes share the tests, only the one that collects their reports sees the whole run.
    """
    return not hasattr(config, "workerinput") and _covers_everything(config)


def _covers_everything(config: pytest.Config) -> bool:
    """Whether all configured test paths were asked for."""
    asked = {(config.invocation_params.dir / each).resolve() for each in config.args}
    all_paths = {(config.rootpath / each).resolve() for each in config.getini("testpaths")}
    return asked == all_paths and not any(config.getoption(name, default=None) for name in _NARROWING)


def pytest_configure(config: pytest.Config) -> None:
    page = config.rootpath / PAGE
    if not page.is_file():
        raise pytest.UsageError(f"there is no {PAGE} in {config.rootpath}")
    requirements = read_requirements(page.read_text(encoding="utf-8"))
    config.pluginmanager.register(Accounting(requirements, whole=_is_whole(config)), "requirement-accounting")
