"""The agent that called a command: shells started only for that command are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.locks.identity import calling_agent, current_holder, holder_with_pid, is_ours

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX shells")

SHOW = "from holdfast.locks.identity import calling_agent; print(calling_agent().pid)"


def run(command: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_the_caller_of_a_command_is_its_parent_process() -> None:
    assert run([sys.executable, "-c", SHOW]) == os.getpid()


@pytest.mark.parametrize("options", [["-c"], ["-e", "-c"], ["-ec"]])
def test_a_shell_started_for_one_command_is_not_the_caller(options: list[str]) -> None:
    inner = f"sh -c '{sys.executable} -c \"{SHOW}\"; true'; true"

    assert run(["sh", *options, inner]) == os.getpid()


def test_a_script_is_the_caller_of_its_commands(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(f'{sys.executable} -c "{SHOW}" > {tmp_path}/out; echo $$\n')

    pid = run(["sh", str(script)])

    assert json.loads((tmp_path / "out").read_text()) == pid


def test_a_descendant_of_a_holder_acts_for_it() -> None:
    parent = holder_with_pid(os.getppid())

    assert is_ours(current_holder())
    assert parent is not None
    assert is_ours(parent)
    assert not is_ours(parent._replace(start_time="1"))
    assert not is_ours(parent._replace(boot_id="another"))
    assert calling_agent() != current_holder()


def test_a_process_does_not_act_for_its_child() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        holder = holder_with_pid(child.pid)
        assert holder is not None
        assert not is_ours(holder)
    finally:
        child.kill()
        child.wait()
