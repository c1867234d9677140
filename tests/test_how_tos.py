"""Every how-to page is run block by block and must behave as written.

The `sh` and `python` blocks of a page run in order, in one shell, in an empty directory with `holdfast` on the
PATH. A `text` block right after another block is the exact output of that block, with `…` as a wildcard.
A block `sh status=75` must exit with that status; all others with 0.
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
    """A runnable block of a page, with its expected output (if the page shows it) and exit status."""

    line: int
    kind: str
    text: str
    expected: str | None
    status: int


def blocks_of(page: str) -> list[Block]:
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
    """One script that runs all blocks and stores the output and status of each in its own files."""
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
    """A directory with `holdfast` and `python3`, both from this environment."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for name, command in {"holdfast": '-m holdfast "$@"', "python3": '"$@"'}.items():
        script = f'#!/bin/sh\nexport PYTHONPATH="{ROOT / "src"}"\nexec "{sys.executable}" {command}\n'
        (directory / name).write_text(script)  # some programs clear the environment of their children
        (directory / name).chmod(0o755)
    return directory


def run_page(page: str, directory: Path, programs: Path) -> list[str]:
    """Run all blocks of a page and return the deviations from it."""
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
    return [problem for number, block in enumerate(blocks) if (problem := deviation(block, number, out))]


def deviation(block: Block, number: int, out: Path) -> str:
    """How a block deviated from the page; empty if it did not."""
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
    assert run_page(page.read_text(encoding="utf-8"), tmp_path, programs) == []


PREPARED = """```sh
git init -q my-repo
git -C my-repo config user.name 'A. Person' && git -C my-repo config user.email person@example.org
printf '#!/bin/sh\\necho done >> result\\n' > my-repo/work && chmod +x my-repo/work
git -C my-repo add work && git -C my-repo commit -qm first
```
"""


def test_the_readme_does_what_it_says(tmp_path: Path, programs: Path) -> None:
    """In a real git repository, with a program in place of the coding agent."""
    agent = programs / "claude"
    agent.write_text('#!/bin/sh\nprintf "%s" "$2" > prompt && git add prompt && git commit -qm "Write the parser"\n')
    agent.chmod(0o755)
    shell, _, python = (ROOT / "README.md").read_text(encoding="utf-8").partition("```python")
    shell = shell.replace("issue-4f1c2a9b", "$(git branch --list 'hf/*' --format='%(refname:lstrip=3)')")

    assert run_page(f"{PREPARED}{shell}```sh\ncd ..\n```\n```python{python}", tmp_path, programs) == []
    assert "Write the parser" in (tmp_path / "work/my-repo/prompt").read_text()
    assert (tmp_path / "work/my-repo.worktrees/parser/result").read_text() == "done\n"


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
def test_a_wrong_page_is_found(page: str, tmp_path: Path, programs: Path) -> None:
    assert run_page(page, tmp_path, programs) != []
