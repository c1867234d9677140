"""Generates the reference pages from the code: `make docs`.

A page is a function that returns its text. `PAGES` lists them; a test compares each with the file in
`docs/reference/`, so an outdated page fails the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.cli.entry import MEANINGS
from holdfast.errors import ExitStatus, Failure, all_failures
from tools.command_reference import GENERATED, commands_page
from tools.man_page import man_page
from tools.python_reference import python_page

DIRECTORY = Path(__file__).parents[1] / "docs/reference"


def errors_page() -> str:
    """The exit statuses and all failures."""
    return "\n".join([GENERATED, "", "# Errors", "", *_introduction(), "", *_statuses(), "", *_failures(), ""])


def _introduction() -> Iterator[str]:
    yield "Every failure has a stable code, an exit status and a hint. With `--json`, it is printed as"
    yield ""
    yield '    {"schema_version":1,"ok":false,"error":{"code":"E_…","message":"…","retryable":…,"hint":"…"}}'
    yield ""
    yield "together with the facts of the case. Codes and exit statuses are part of the interface: they are never"
    yield "renamed or given another meaning."


def _statuses() -> Iterator[str]:
    yield "## Exit statuses"
    yield ""
    yield from _table(("status", "name", "meaning"), ((int(each), each.name, MEANINGS[each]) for each in ExitStatus))


def _failures() -> Iterator[str]:
    yield "## Failures"
    yield ""
    yield "*retry*: repeating the same call may succeed."
    yield ""
    columns = ("code", "exit status", "retry", "meaning", "hint")
    ours = (each for each in all_failures() if each.__module__.startswith("holdfast.errors"))
    yield from _table(columns, map(_row, sorted(ours, key=lambda each: each.exit_status)))


def _row(failure: type[Failure]) -> tuple[object, ...]:
    meaning = " ".join((failure.__doc__ or "").split("\n\n")[0].split())
    return (
        f"`{failure.code}`",
        int(failure.exit_status),
        "yes" if failure.retryable else "no",
        meaning,
        failure.hint,
    )


def _table(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "errors.md": errors_page,
    "python.md": python_page,
    "holdfast.1": man_page,
}
"""The generated pages by file name."""


def main() -> None:
    """Write all pages, and say which have changed."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = DIRECTORY / name, page()
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        if changed:
            path.write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}: {'written' if changed else 'up to date'}")


if __name__ == "__main__":
    main()
