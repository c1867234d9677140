"""What the exit statuses mean, in the words that the help and the reference page use."""

from __future__ import annotations

from holdfast.errors import ExitStatus

MEANINGS = {
    ExitStatus.OK: "done",
    ExitStatus.UNEXPECTED: "something failed that no other status stands for: the system, or a defect",
    ExitStatus.USAGE: "the command was given something that it cannot take",
    ExitStatus.NOT_FOUND: "what was named does not exist",
    ExitStatus.CONFLICT: "somebody else holds it, or it is there already",
    ExitStatus.FENCED: "you no longer hold what this needs; stop writing",
    ExitStatus.CORRUPT: "stored content is not what it must be",
    ExitStatus.REFUSED: "it would put work at risk",
    ExitStatus.TIMED_OUT: "it could not be had in time; try again",
    ExitStatus.INTERRUPTED: "ended by the user",
}


def table(indent: str = "  ") -> str:
    """One line for each status."""
    return "\n".join(f"{indent}{int(status):>3}  {meaning}" for status, meaning in MEANINGS.items())
