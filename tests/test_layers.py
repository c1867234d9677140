"""The layers hold, and the check finds an upward import, even a lazy one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its configuration to plant violations in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def check_layers(project: Path) -> subprocess.CompletedProcess[str]:
    """Run the project's own check on the copy in this directory."""
    program = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    environment = {**os.environ, "PYTHONPATH": str(project / "src")}
    return subprocess.run([sys.executable, "-c", program], cwd=project, env=environment, capture_output=True, text=True)


def plant(project: Path, module: str, source: str) -> None:
    """Append `source` to a module of the copy, creating the module if needed."""
    with (project / "src/holdfast" / module).open("a", encoding="utf-8") as file:
        file.write("\n\n" + source)


def test_the_layers_hold(copy: Path) -> None:
    result = check_layers(copy)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "source", "chain"),
    [
        ("fs/names.py", "import holdfast.locks\n", "holdfast.fs.names -> holdfast.locks"),
        ("fs/names.py", "def lazy():\n    import holdfast.cli\n", "holdfast.fs.names -> holdfast.cli"),
        (
            "errors.py",
            "def lazy():\n    from holdfast.clock import Clock\n",
            "holdfast.errors -> holdfast.clock",
        ),
        ("locks/__init__.py", "import holdfast.testing\n", "holdfast.locks -> holdfast.testing"),
        ("testing/__init__.py", "import holdfast.cli\n", "holdfast.testing -> holdfast.cli"),
    ],
    ids=["up", "up and lazily", "between the lowest", "up to testing", "between independent ones"],
)
def test_an_import_against_the_layers_is_found(copy: Path, module: str, source: str, chain: str) -> None:
    plant(copy, module, source)
    result = check_layers(copy)

    assert result.returncode == 1
    assert chain in result.stdout


def test_a_module_that_belongs_to_no_layer_is_found(copy: Path) -> None:
    plant(copy, "elsewhere.py", "")
    result = check_layers(copy)

    assert result.returncode == 1
    assert "elsewhere" in result.stdout
