"""One interface to the locks of three platforms, checked by its types, which works on any one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
from holdfast.locks import flock

granted: bool = flock.try_lock(3, True)
flock.lock(3, False)
flock.unlock(3)
"""
MISUSE = USE + 'flock.try_lock("lock", True)\n'


def check(source: str, platform: str, directory: Path) -> subprocess.CompletedProcess[str]:
    program = directory / "program.py"
    program.write_text(source)
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", f".mypy_cache/{platform}"]
    return subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.req("FL-18")
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.sampled(1)
def test_the_lock_call_of_every_platform_is_behind_the_same_interface(platform: str, tmp_path: Path) -> None:
    right = check(USE, platform, tmp_path)
    assert right.returncode == 0, right.stdout
    wrong = check(MISUSE, platform, tmp_path)
    assert "arg-type" in wrong.stdout, "the misuse was not found"
