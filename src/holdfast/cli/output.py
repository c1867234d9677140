"""Output of commands: lines for people, or one JSON envelope for programs.

Data goes to standard output, diagnostics to standard error. Under `run`, standard output belongs to the
command that is run, so the envelope goes to standard error.

Text for people may come from a file name or from another process. Its control characters are escaped, so
that nothing can move the cursor, forge a line or change the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

from holdfast.errors import Failure, IoFailure, NotApplied, NotEncrypted
from holdfast.errors import format_size as format_size
from holdfast.fs import calls
from holdfast.fs.names import counted as counted
from holdfast.fs.names import in_utf_8
from holdfast.fs.names import printable as printable
from holdfast.fs.names import shortened as shortened

if TYPE_CHECKING:
    from holdfast.cli.styled import StyledLine

    Paint = Callable[[str], StyledLine]

SCHEMA_VERSION = 1
_STDOUT = "standard output"


class CommandFailed(Exception):
    """A failure with an exit status or advice for people that only this command has."""

    def __init__(self, failure: Failure, *, exit_status: int | None = None, advice: str | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_status = failure.exit_status if exit_status is None else exit_status
        self.advice = advice


class Output:
    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.quiet = False  # no progress and no warnings
        self.verbose = False  # also how long it took, and tracebacks
        self._envelopes_to_stderr = False
        self._warnings: list[str] = []

    def leave_stdout_to_the_command(self) -> None:
        """Write nothing of our own to standard output from now on."""
        self._envelopes_to_stderr = True

    def result(self, data: Mapping[str, object], lines: Iterable[str] = (), paint: Paint | None = None) -> None:
        """Print the outcome: `data` for programs, `lines` for people; on a terminal with the styles that `paint` gives
        to a line."""
        if self.as_json:
            self._write_envelope({"ok": True, "data": data})
            return
        if paint is not None:
            from holdfast.cli.styled import as_text, has_colour

            if has_colour(sys.stdout):
                for line in lines:
                    self.text(as_text(paint(printable(line)), colour=True))
                return
        for line in lines:
            self.line(line)

    def failure(self, failure: Failure, *, advice: str | None = None) -> None:
        """Print a failure; `advice` for people replaces its hint."""
        if self.as_json:
            self._envelopes_to_stderr |= sys.stdout is None  # closed before this process started
            self._write_envelope({"ok": False, "error": failure.as_record()})
        elif isinstance(failure, IoFailure) and failure.facts.get("path") == _STDOUT:
            self.diagnostic(f"Error: {printable(failure.message)}. Code: {failure.code}")
        else:
            hint = advice or printable(failure.hint)
            self.diagnostic(_error_text(printable(failure.message), hint, failure.code))

    @contextlib.contextmanager
    def showing_warnings(self) -> Iterator[None]:
        """Report as warnings changes that are committed but not yet in their files, and unencrypted connections."""

        def show(message: Warning | str, *_: object, **__: object) -> None:
            self.warning(str(message))

        with warnings.catch_warnings():
            for kind in (NotApplied, NotEncrypted):
                warnings.simplefilter("always", kind)
            warnings.showwarning = show
            yield

    def line(self, text: str) -> None:
        _write(sys.stdout, printable(text), _STDOUT)

    def text(self, text: str) -> None:
        """Print Holdfast's own text, such as help or a script, without escaping."""
        _write(sys.stdout, text, _STDOUT)

    def diagnostic(self, text: str) -> None:
        """Print Holdfast's own text to standard error, without escaping."""
        _write(sys.stderr, text, "standard error")

    def warning(self, text: str) -> None:
        """Report a problem that does not fail the command. With `--json`, it is in the envelope, even of a failure."""
        self._warnings.append(text)
        if not self.as_json and not self.quiet:
            self.diagnostic("\n".join(wrapped(f"Warning: {printable(text)}", width(sys.stderr))))

    def _write_envelope(self, content: Mapping[str, object]) -> None:
        import json

        told = {"warnings": self._warnings} if self._warnings else {}
        envelope: object = {"schema_version": SCHEMA_VERSION, **content, **told}
        text = json.dumps(envelope, allow_nan=False, separators=(",", ":"), default=in_utf_8)
        if "\\ud" in text:  # perhaps a lone surrogate from a file name, which other parsers may refuse
            text = json.dumps(in_utf_8(envelope), allow_nan=False, separators=(",", ":"))
        if self._envelopes_to_stderr:
            _write(sys.stderr, text, "standard error")
            return
        try:
            _write(sys.stdout, text, _STDOUT)
        except IoFailure:
            self._envelopes_to_stderr = True  # for the report of this failure
            raise


def _write(stream: TextIO | None, text: str, name: str) -> None:
    if stream is None:  # closed before this process started
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output(stream)
        raise IoFailure("write to", name, error) from error


_LOST = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EBADF)


def lost_output(error: BaseException) -> IoFailure | None:
    """The failure to write text that another library has printed, such as help; None if `error` has another cause.

    Our own calls raise a `Failure`, so an `OSError` that names no file comes from printing. An unbuffered stream has
    nothing left to flush, so `error` itself is examined then.
    """
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as flushing:
        error = flushing
    else:
        if not isinstance(error, OSError) or error.filename is not None or error.errno not in _LOST:
            return None
    discard_output(sys.stdout)
    return IoFailure("write to", _STDOUT, error)


def discard_output(stream: TextIO | None) -> None:
    """Redirect a broken stream to the null device, so that flushing it at exit does not fail again."""
    if stream is None:
        return
    null = calls.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    calls.close(null)


def _error_text(message: str, hint: str, code: str) -> str:
    """An error for people. On a terminal, it is wrapped at words, and its first word is red."""
    wide = width(sys.stderr)
    text = f"Error: {message}\n\n{hint}\n\nCode: {code}"
    if wide is None:
        return text
    from holdfast.cli.styled import has_colour, painted

    lines = [part for line in text.splitlines() for part in wrapped(line, wide)]
    first = lines[0].removeprefix("Error:")
    return "\n".join([painted("Error:", "bold red", colour=has_colour(sys.stderr)) + first, *lines[1:]])


def width(stream: TextIO | None) -> int | None:
    """The width of the terminal behind a stream; None if the stream is not a terminal."""
    if stream is None or not stream.isatty():
        return None
    try:
        return _variable("COLUMNS") or os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _variable(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0


def wrapped(line: str, wide: int | None) -> list[str]:
    """The line, wrapped between words; further lines are indented like the first."""
    if wide is None or len(line) <= wide:
        return [line]
    import textwrap

    indent = line[: len(line) - len(line.lstrip())][: wide // 2]
    return textwrap.wrap(
        line, wide, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False, drop_whitespace=True
    )


def show_table(output: Output, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the width of the last column is not limited."""
    if not rows:
        return
    lines = plain_table(columns, rows)
    if not "".join(lines).isprintable():  # one check is faster than one per cell
        rows = [[printable(cell) for cell in row] for row in rows]
        lines = plain_table(columns, rows)
    if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _draw(columns, rows)
    else:
        output.text("\n".join(lines))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    grid = [tuple(columns), *map(tuple, rows)]
    widths = [max(map(len, map(itemgetter(number), grid))) for number in range(len(columns) - 1)]
    form = "".join(f"%-{width}s  " for width in widths) + "%s"
    return [(form % row).rstrip(" ") for row in grid]


STYLES = {"ready": "green", "in_progress": "yellow", "gated": "magenta", "done": "dim"}
STYLES |= {"rejected": "red dim", "archived": "dim", "critical": "bold red", "high": "bold"}


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in columns[:-1]:
        table.add_column(title, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def command_as_text(command: Sequence[str]) -> str:
    """A command as the purpose of a lock or lease, for others to read."""
    from shlex import join

    return shortened(printable(join(command)), 200)


def escaped_json(text: str) -> str:
    """The same JSON, with everything escaped that could move a cursor or forge a line on a terminal."""
    if text.isprintable():
        return text
    import json

    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
