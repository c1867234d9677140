"""What the commands say: lines for people, or one JSON envelope for programs.

Data goes to standard output and diagnostics to standard error. Under `run` standard output belongs to
the command that is run, so there the envelope goes to standard error.

Whatever is shown to people may come from a file name or from another process. It is shown with its
control characters escaped, so that nothing can move the cursor, forge a line or change the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TextIO

from holdfast.errors import Failure, IoFailure
from holdfast.fs import calls
from holdfast.fs.names import in_utf_8
from holdfast.fs.names import printable as printable

SCHEMA_VERSION = 1


class CommandFailed(Exception):
    """A failure as one command reports it: with its own exit status, or with more advice for people."""

    def __init__(
        self, failure: Failure, *, exit_status: int | None = None, advice: str | None = None
    ) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_status = failure.exit_status if exit_status is None else exit_status
        self.advice = advice


class Output:
    """The two streams of this process, and in which form to use them."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._envelopes_to_stderr = False

    def leave_stdout_to_the_command(self) -> None:
        """From now on nothing of ours goes to standard output."""
        self._envelopes_to_stderr = True

    def result(self, data: Mapping[str, object], lines: Iterable[str] = ()) -> None:
        """Say what came of it: `data` for programs, `lines` for people."""
        if self.as_json:
            self._write_envelope({"ok": True, "data": data})
        else:
            for line in lines:
                self.line(line)

    def failure(self, failure: Failure, *, advice: str | None = None) -> None:
        """Say what went wrong; `advice` is for people, instead of the failure's own hint."""
        if self.as_json:
            self._write_envelope({"ok": False, "error": failure.as_record()})
        else:
            hint = advice or printable(failure.hint)
            self.diagnostic(f"Error: {printable(failure.message)}\n\n{hint}\n\nCode: {failure.code}")

    def line(self, text: str) -> None:
        """Write one line for people to standard output."""
        _write(sys.stdout, printable(text), "standard output")

    def text(self, text: str) -> None:
        """Write lines of our own making, such as help or a script, to standard output as they are."""
        _write(sys.stdout, text, "standard output")

    def diagnostic(self, text: str) -> None:
        """Write lines of our own making to standard error."""
        _write(sys.stderr, text, "standard error")

    def _write_envelope(self, content: Mapping[str, object]) -> None:
        import json

        envelope: object = {"schema_version": SCHEMA_VERSION, **content}
        text = json.dumps(envelope, allow_nan=False, separators=(",", ":"), default=in_utf_8)
        if "\\ud" in text:  # a lone surrogate perhaps, which others may refuse: file names may have some
            text = json.dumps(in_utf_8(envelope), allow_nan=False, separators=(",", ":"))
        if self._envelopes_to_stderr:
            _write(sys.stderr, text, "standard error")
            return
        try:
            _write(sys.stdout, text, "standard output")
        except IoFailure:
            self._envelopes_to_stderr = True  # the one that tells of this
            raise


def _write(stream: TextIO | None, text: str, name: str) -> None:
    if stream is None:  # closed before we were started: nobody wants to know
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


def discard_output(stream: TextIO | None) -> None:
    """Lead a stream that cannot be written to nowhere, so that its rest does not fail again at the end."""
    if stream is None:
        return
    nowhere = calls.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    calls.close(nowhere)
