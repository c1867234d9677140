"""The metrics find the violations planted in a small package, and trace every command in their table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import metrics
from tools.metrics import Command, Imports, measure_source, read_modules, trace_command

SOUND = {
    "__init__.py": "",
    "__main__.py": "from sample.app import main\n",
    "app.py": "from sample import left, right\n\ndef main():\n    left.go()\n",
    "left.py": "from sample.base import Base\n\ndef go():\n    Base().act()\n",
    "right.py": "from sample.base import Base\n",
    "base.py": "class Base:\n    def act(self):\n        pass\n",
    "user.py": "from sample import left, right\nfrom sample.app import main\n",
}
"""No violations: `user` has no importer, every other module has two."""


def package(directory: Path, changed: dict[str, str] | None = None) -> Path:
    """Write the sound package, with these files added or replaced."""
    source = directory / "sample"
    for name, text in (SOUND | (changed or {})).items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return source


def misses(source: Path, **reasons: str) -> dict[str, tuple[str, ...]]:
    """The details of each missed target."""
    explained = {f"sample.{name}": reason for name, reason in reasons.items()}
    return {each.name.strip(): each.details for each in measure_source(source, explained) if not each.met}


def test_a_sound_package_misses_no_target(tmp_path: Path) -> None:
    assert misses(package(tmp_path)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "from sample.left import go\n",
        "import sample.left\n",
        "from sample import left as other\n",
        "from . import left\n",
        "from .left import go\n",
        "def lazy():\n    from sample.left import go\n",
        "class Lazy:\n    def lazy(self):\n        if self:\n            import sample.left as other\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import sample.left\n",
    ],
)
def test_a_cycle_is_found(tmp_path: Path, text: str) -> None:
    source = package(tmp_path, {"base.py": f"{text}\nclass Base: ...\n"})

    assert misses(source) == {
        "import cycles": ("sample.base -> sample.left -> sample.base (2 modules)",),
    }


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_type_only_imports_make_no_cycle(tmp_path: Path, test: str) -> None:
    source = package(tmp_path, {"base.py": f"import typing\nif {test}:\n    from sample.left import go\n"})

    assert misses(source) == {}


def test_a_cycle_through_a_package_that_loads_names_on_demand_is_found(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {
            "parts/__init__.py": "if TYPE_CHECKING:\n    from sample.parts.one import One as One\n",
            "parts/one.py": "import sample.base\n\nclass One: ...\n",
            "base.py": "def lazy():\n    from sample.parts import One\n",
        },
    )

    assert misses(source) == {
        "import cycles": ("sample.base -> sample.parts.one -> sample.base (2 modules)",),
    }


def test_separate_cycles_are_counted_separately(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {
            "base.py": "import sample.right\n",
            "one.py": "import sample.two\nimport sample.base",
            "two.py": "import sample.three",
            "three.py": "import sample.one\nimport sample.two\nimport sample.app",
            "user.py": "import sample.one\nimport sample.three\nfrom sample import left, app\n",
        },
    )

    assert misses(source)["import cycles"] == (
        "sample.base -> sample.right -> sample.base (2 modules)",
        "sample.one -> sample.two -> sample.three -> sample.one (3 modules)",
    )


def test_a_public_class_name_that_two_modules_define_is_found(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {
            "left.py": "import sample.base\n\nclass Base: ...\nclass _Private: ...\nclass Once: ...\n",
            "right.py": "import sample.base\nclass _Private: ...\nif x:\n class A: 1\nelse:\n class A: 1\n",
        },
    )

    assert misses(source) == {"public class names used twice": ("Base: sample.base, sample.left",)}


@pytest.mark.parametrize(
    "text",
    [
        "import sample.small\n",
        "def lazy():\n    from sample import small\n",
        "if TYPE_CHECKING:\n    from .small import x\n",
    ],
)
def test_a_small_module_with_one_importer_needs_a_reason(tmp_path: Path, text: str) -> None:
    source = package(tmp_path, {"small.py": "x = 1\n" * 149, "user.py": SOUND["user.py"] + text})

    assert misses(source) == {"of these without a reason": ("sample.small <- sample.user",)}
    assert misses(source, small="Another platform has another.") == {}


@pytest.mark.parametrize(
    ("small", "user"),
    [
        ("x = 1\n" * 150, "import sample.small\n"),
        ("x = 1\n", ""),
        ("x = 1\n", "COMMANDS = {'small': 'sample.small:x'}\n"),
        ("import sample.right\n", "from sample import right\n\nPROGRAM = 'sample.small'\n"),
    ],
    ids=["large", "without importers", "loaded by a table", "loaded by name"],
)
def test_other_modules_need_no_reason(tmp_path: Path, small: str, user: str) -> None:
    source = package(tmp_path, {"small.py": small, "user.py": SOUND["user.py"] + user})

    assert misses(source) == {}
    assert misses(source, small="Stale.") == {"reasons for other modules": ("sample.small",)}


def test_users_of_a_reexported_name_are_importers_of_its_module(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {
            "parts/__init__.py": "from sample.parts.one import One as One\n",
            "parts/one.py": "class One: ...\n",
            "user.py": "from sample.parts import One\n",
        },
    )

    assert Imports(read_modules(source)).importers["sample.parts.one"] == {"sample.parts", "sample.user"}


def test_sizes_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = package(tmp_path, {"large.py": "x = 1\n" * 501})
    monkeypatch.setattr(metrics, "MOST_LINES", 500)
    monkeypatch.setattr(metrics, "MOST_MODULES", 7)

    by_name = {each.name: each for each in measure_source(source)}

    assert (by_name["modules"].value, by_name["modules"].met) == ("8", False)
    assert (by_name["lines"].value, by_name["lines"].met) == ("516", False)
    assert by_name["modules over 500 lines"].details == ("  501 sample.large",)


def test_a_trace_lists_the_files_called_and_counts_the_calls_between_them(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {
            "__main__.py": """
import os
from sample import app

os.makedirs("main", exist_ok=True)

def main():
    app.run()
""",
            "app.py": """
import threading
from contextlib import contextmanager
from sample import left, right

VALUE = right.at_import()

def run():
    with left.held():
        pass
    thread = threading.Thread(target=left.go)
    thread.start()
    thread.join()
""",
            "left.py": """
from contextlib import contextmanager
from sample.base import Base

@contextmanager
def held():
    yield

def go():
    Base().act()
""",
            "right.py": "def at_import():\n    return [each for each in 'ab']\n",
        },
    )

    files, hops = trace_command(Command(("go",), 4), source)

    assert files == ["__main__.py", "app.py", "base.py", "left.py"]
    assert hops == 4  # main -> run, run -> held at both ends, go -> act; a thread begins without a caller


def test_a_command_that_fails_is_not_measured(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        {"__main__.py": "import os\nos.makedirs('main', exist_ok=True)\ndef main():\n    exit('no')\n"},
    )

    with pytest.raises(SystemExit, match="status 1:\nno"):
        trace_command(Command((), 1), source)


@pytest.mark.parametrize(("most", "status", "met"), [(9, 0, "yes"), (8, 1, "NO")])
def test_a_missed_target_sets_the_exit_status(
    most: int, status: int, met: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["metrics"])
    monkeypatch.setattr(metrics, "COMMANDS", {"go": Command(("go",), most)})
    monkeypatch.setattr(metrics, "trace_command", lambda command: (["file.py"] * 9, 1234))
    monkeypatch.setattr(metrics, "measure_source", list)

    assert metrics.main() == status
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["measure", "value", "target", "met"],
        ["files", "of", "go", "9", "at", "most", str(most), met],
        ["hops", "of", "go", "1,234", "reported"],
    ]


def test_the_files_of_a_command_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["metrics", "--files", "ledger append"])
    monkeypatch.setattr(metrics, "trace_command", lambda command: (["a.py", "b/c.py"], 1))

    assert metrics.main() == 0
    assert capsys.readouterr().out == "a.py\nb/c.py\n"


@pytest.mark.parametrize("name", metrics.COMMANDS)
def test_every_command_is_traced_and_passes_through_few_files(name: str) -> None:
    files, hops = trace_command(metrics.COMMANDS[name])

    assert "__main__.py" in files
    assert len(files) <= metrics.COMMANDS[name].most_files
    assert hops > len(files) / 2


def test_the_architecture_page_names_every_file_of_its_operation() -> None:
    page = (metrics.ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    operation = page.partition("## One operation")[2].partition("## On disk")[0]

    files, _ = trace_command(metrics.COMMANDS["issue claim-next"])

    assert [each for each in files if f"`{each}`" not in operation] == []
