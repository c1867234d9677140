"""What all failures have in common, the exit statuses, and the root of what is the caller's fault."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ExitStatus(IntEnum):
    """What the exit status of a command means. One meaning each; the table is part of the API."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    FENCED = 5
    CORRUPT = 6
    REFUSED = 7
    TIMED_OUT = 75
    INTERRUPTED = 130


class Failure(Exception):
    """Something that Holdfast could not or would not do, with a code, an exit status and a hint."""

    code = "E_UNEXPECTED"
    exit_status = ExitStatus.UNEXPECTED
    retryable = False
    hint = "This should not happen. Please report it with the command that you ran and its output."

    def __init__(self, message: str, *, hint: str | None = None, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, object] = facts
        if hint is not None:
            self.hint = hint

    def as_record(self) -> dict[str, object]:
        """Describe this failure as plain values, in the shape of the JSON envelope's `error`."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "hint": self.hint,
            **self.facts,
        }


class UsageFailure(Failure):
    """A command or call was given something that it cannot take."""

    code = "E_USAGE"
    exit_status = ExitStatus.USAGE
    hint = "See the command's --help for what it takes."
