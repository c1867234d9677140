"""Every how-to page is carried out, block by block, and says what it says that it says.

In a page, blocks of `sh` (and `python`) are run in their order, all of a page in one shell, in an empty
directory with `holdfast` on the PATH. A block that is followed by a `text` block must print just that,
where `…` stands for anything. `sh status=75` must end with that status; all others with 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.platform == "win32":
    pytest.skip("the pages are for a POSIX shell", allow_module_level=True)

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))
FENCE = re.compile(r"^```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = ("sh", "python")
OURS = ("HOLDFAST_", "JIT_", "JVS_")


class Block(NamedTuple):
    """A piece of a page that is run: what it is, what it must print (if the page says) and end with."""

    line: int
    kind: str
    text: str
    expected: str | None
    status: int


def blocks_of(page: str) -> list[Block]:
    """The runnable blocks of a page."""
    found = list(FENCE.finditer(page))
    blocks = []
    for index, fence in enumerate(found):
        if fence["kind"] not in RUNNABLE:
            continue
        following = found[index + 1] if index + 1 < len(found) else None
        told = following and following["kind"] == "text" and not page[fence.end() : following.start()].strip()
        status = re.search(r"status=(\d+)", fence["options"])
        blocks.append(
            Block(
                line=page.count("\n", 0, fence.start()) + 1,
                kind=fence["kind"],
                text=fence["text"],
                expected=following["text"] if told and following else None,
                status=int(status[1]) if status else 0,
            )
        )
    return blocks


def as_script(blocks: list[Block]) -> str:
    """One script that runs all blocks, each with its output and status in files of its own."""
    parts = ["set -u"]
    for number, block in enumerate(blocks):
        text = block.text
        if block.kind == "python":
            text = f"python3 - <<'END-OF-PYTHON'\n{text}END-OF-PYTHON\n"
        parts.append(
            f"set -e; trap 'echo $? > $OUT/{number}.status' EXIT\n"
            f"{{\n{text}\n}} > $OUT/{number}.out 2> $OUT/{number}.err\n"
            if block.status == 0
            else f"set +e; ( {text.strip()} ) > $OUT/{number}.out 2> $OUT/{number}.err; s=$?; set -e\n"
            f"[ $s -eq {block.status} ] || {{ echo $s > $OUT/{number}.status; exit 99; }}\n"
        )
        parts.append(f"echo ok > $OUT/{number}.status; trap - EXIT\n")
    return "\n".join(parts)


def matches(expected: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.rstrip("\n").split("…"))
    return re.fullmatch(pattern, printed.rstrip("\n"), re.DOTALL) is not None


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with `holdfast` and `python3`, both of this very environment."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for name, command in {"holdfast": '-m holdfast "$@"', "python3": '"$@"'}.items():
        script = f'#!/bin/sh\nexport PYTHONPATH="{ROOT / "src"}"\nexec "{sys.executable}" {command}\n'
        (directory / name).write_text(script)  # some programs start others in an environment of their own
        (directory / name).chmod(0o755)
    return directory


def carry_out(page: str, directory: Path, programs: Path) -> list[str]:
    """Run all blocks of a page; what is not as the page says."""
    blocks = blocks_of(page)
    work, out = directory / "work", directory / "out"
    work.mkdir()
    out.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment = {
        **own,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OUT": str(out),
        "HOME": str(directory),
    }
    shell = subprocess.Popen(["bash", "-c", as_script(blocks)], cwd=work, env=environment, start_new_session=True)
    try:
        shell.wait(120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    return [problem for number, block in enumerate(blocks) if (problem := judged(block, number, out))]


def judged(block: Block, number: int, out: Path) -> str:
    """What a block did otherwise than the page says; nothing if it did not."""
    files = {end: out / f"{number}.{end}" for end in ("out", "err", "status")}
    told = {end: file.read_text() for end, file in files.items() if file.exists()}
    if told.get("status", "").strip() != "ok":
        return f"line {block.line}: {told or 'was not reached'}"
    if block.expected is not None and not matches(block.expected, told["out"]):
        return f"line {block.line} printed:\n{told['out']}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.sampled(1)
def test_the_page_does_what_it_says(page: Path, tmp_path: Path, programs: Path) -> None:
    assert carry_out(page.read_text(encoding="utf-8"), tmp_path, programs) == []


def test_the_first_page_does_what_it_says(tmp_path: Path, programs: Path) -> None:
    project = tmp_path / "my-project"
    project.mkdir()
    for name in ("work", "my-agent"):
        (project / name).write_text("#!/bin/sh\necho done >> result\n")
        (project / name).chmod(0o755)
    shell, _, python = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python")
    page = shell + "```sh\ncd ..\n```\n```python" + python

    assert carry_out(page, tmp_path, programs) == []
    assert (tmp_path / "work/project/worktrees/parser/result").read_text() == "done\n"


@pytest.mark.parametrize(
    "page",
    [
        "```sh\necho one\n```\n```text\ntwo\n```\n",
        "```sh\nfalse\n```\n",
        "```sh\nfalse; true\n```\n```sh\necho reached\n```\n",
        "```sh status=4\nexit 3\n```\n",
        "```sh status=4\ntrue\n```\n",
        "```python\nraise SystemExit(1)\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_found_out(page: str, tmp_path: Path, programs: Path) -> None:
    assert carry_out(page, tmp_path, programs) != []
