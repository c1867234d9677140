"""The requirement accounting is a detector itself, so these tests plant the gaps that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof import effort
from tests import requirements_plugin
from tests.requirements_plugin import PAGE, read_requirements

ROOT = Path(__file__).parents[1]
PLUGIN = "pytest_plugins = ['tests.requirements_plugin']\n"
ROWS = """
| ID | demand | since |
|---|---|---|
| AA-01 | delivered, by `A\\|B` | 0.1.0 |
| AA-02 | delivered as well | 0.1.0 |
| AA-03 | not yet |  |
"""
PROVES_ALL = """
import pytest

@pytest.mark.req("AA-01", "AA-02")
def test_both(): pass
"""

PROVES_FIRST = PROVES_ALL.replace(', "AA-02"', "")
FIXTURES = """
@pytest.fixture
def breaks_before(): assert False

@pytest.fixture
def breaks_after(): yield; assert False
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with three requirements, two of them delivered, and no tests yet."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing the plugins takes a second per run
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers =\n    req(*ids): requirements")
    pytester.makeconftest(PLUGIN)
    for name, text in ((PAGE, ROWS), ("tests/test_all.py", "")):
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return pytester


def run(suite: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    """Run the suite with `tests` as the content of its only test file."""
    (suite.path / "tests/test_all.py").write_text(tests, encoding="utf-8")
    return suite.runpytest_inprocess(*arguments)


def test_a_run_that_proves_every_delivered_requirement_passes_and_reports_it(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_ALL)

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["proven by a passing test: 2 of all 3, 2 of the 2 delivered"])
    result.stdout.no_fnmatch_line("*NOT PROVEN*")


def test_a_mark_on_a_class_or_module_counts_for_each_test_in_it(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
        import pytest

        pytestmark = pytest.mark.req("AA-03")

        @pytest.mark.req("AA-02")
        class TestAll:
            @pytest.mark.req("AA-01")
            def test_it(self): pass
        """.replace("\n        ", "\n"),
    )

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["proven by a passing test: 3 of all 3, 2 of the 2 delivered"])


def test_a_delivered_requirement_without_a_test_fails_the_run(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_FIRST)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["proven by a passing test: 1 of all 3, 1 of the 2 delivered", "NOT PROVEN: AA-02 *"])


@pytest.mark.parametrize(
    "test",
    [
        "def test_second(): assert False",
        "def test_second(): pytest.skip('not here')",
        "@pytest.mark.skip(reason='not here')\ndef test_second(): pass",
        "@pytest.mark.xfail(reason='broken')\ndef test_second(): assert False",
        "@pytest.mark.xfail(reason='mended')\ndef test_second(): pass",
        "def test_second(breaks_after): pass",
        "def test_second(breaks_before): pass",
    ],
    ids=[
        "fails",
        "skips",
        "is skipped",
        "is expected to fail",
        "passes unexpectedly",
        "teardown fails",
        "setup fails",
    ],
)
def test_a_test_that_does_not_plainly_pass_proves_nothing(suite: pytest.Pytester, test: str) -> None:
    result = run(suite, f"{PROVES_FIRST}\n{FIXTURES}\n@pytest.mark.req('AA-02')\n{test}\n")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["NOT PROVEN: AA-02 *"])


def test_a_mark_with_an_unknown_id_ends_the_run_at_collection(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_ALL.replace("AA-02", "AA-99"))

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: tests/test_all.py::test_both: {PAGE} has no 'AA-99'"])
    result.assert_outcomes()


def test_a_mark_without_an_id_ends_the_run_at_collection(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_ALL.replace('"AA-01", "AA-02"', ""))

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*names no requirement*"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "both"],
        ["-m", "req"],
        ["tests/test_all.py"],
        ["tests/test_all.py::test_both"],
        ["--deselect", "tests/test_all.py::test_other"],
        ["--ignore", "tests/elsewhere"],
        ["--lf"],
    ],
    ids=" ".join,
)
def test_a_partial_run_is_not_judged(suite: pytest.Pytester, arguments: list[str]) -> None:
    result = run(suite, PROVES_FIRST, *arguments)

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["(partial run*"])


def test_the_whole_suite_named_by_its_path_is_judged(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_FIRST, "tests")

    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_skipped_tests_are_listed_with_their_reasons(suite: pytest.Pytester) -> None:
    result = run(suite, PROVES_ALL + "\ndef test_loop_device(): pytest.skip('needs root')\n")

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["!*NOT RUN HERE*!", "tests/test_all.py::test_loop_device: needs root"])


def test_nothing_is_listed_when_nothing_was_skipped(suite: pytest.Pytester) -> None:
    run(suite, PROVES_ALL).stdout.no_fnmatch_line("*NOT RUN HERE*")


def test_a_malformed_row_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="AA-04"):
        read_requirements("| AA-04 | no third column |\n")


def test_a_duplicate_id_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="AA-01 is listed twice"):
        read_requirements(ROWS + "| AA-01 | again | |\n")


def test_the_requirements_of_this_project_are_well_formed(pytestconfig: pytest.Config) -> None:
    requirements = read_requirements((pytestconfig.rootpath / PAGE).read_text(encoding="utf-8"))

    assert len(requirements) == 91
    assert requirements["RL-02"].demand.startswith("One writer per `repo_id`")
    assert requirements["RL-02"].since == "0.1.0"
    assert requirements["LC-30"].since == "0.1.0"


def test_scratch_is_an_empty_writable_directory(scratch: Path) -> None:
    assert list(scratch.iterdir()) == []
    (scratch / "file").write_bytes(b"content")


TEN = "import pytest\n\n@pytest.mark.parametrize('number', range(10))\ndef test_one(number): pass\n"


@pytest.mark.parametrize(
    ("share", "arguments", "passed"),
    [(0.01, [], 6), (0.01, ["tests"], 6), (0.01, ["tests/test_all.py"], 12), (0.01, ["-k", "test"], 12), (1.0, [], 12)],
)
def test_a_run_of_everything_takes_a_third_of_a_costly_file_and_what_proves_requirements(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, share: float, arguments: list[str], passed: int
) -> None:
    monkeypatch.setattr(effort, "SHARE", share)
    monkeypatch.setattr(requirements_plugin, "COSTLY", ["tests/test_all.py"])
    both = PROVES_FIRST.replace("AA-01", "AA-02").replace("test_both", "test_other").replace("import pytest", "")
    run(suite, TEN + PROVES_FIRST + both, *arguments).assert_outcomes(passed=passed)


def test_every_costly_file_exists() -> None:
    assert [each for each in requirements_plugin.COSTLY if not (ROOT / each).is_file()] == []
