"""What came of a request, as the protocol says it: plain values, or a failure with its code and hint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from mcp import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolResult,
    ReadResourceResult,
    TextContent,
    TextResourceContents,
)

from holdfast.errors import Failure, NotFound, UsageFailure
from holdfast.fs.names import in_utf_8, printable

JSON = "application/json"

_log = logging.getLogger(__name__)

Answer = dict[str, Any] | Failure


def attempt(work: Callable[[], Any]) -> Answer:
    """What comes of it. What was not expected to happen is a failure as well, and is logged."""
    try:
        return dict(work() or {})
    except Failure as failure:
        return failure
    except Exception as error:
        _log.exception("a request ended in a way that was not expected")
        return Failure(f"{type(error).__name__}: {error}")


def as_tool_result(answer: Answer) -> CallToolResult:
    """The result of a tool; its structured content is what `--json` has as `data` or as `error`."""
    if isinstance(answer, Failure):
        told = f"{answer.code}: {printable(answer.message)}\n{printable(answer.hint)}"
        return CallToolResult(
            content=[TextContent(text=told)],
            structured_content=in_utf_8(answer.as_record()),
            is_error=True,
        )
    plain = in_utf_8(answer)
    return CallToolResult(content=[TextContent(text=_text(plain))], structured_content=plain)


def as_contents(uri: str, answer: Answer) -> ReadResourceResult:
    """What was read; a failure is raised as an error of the protocol, with its record."""
    if isinstance(answer, Failure):
        expected = isinstance(answer, NotFound | UsageFailure)
        raise MCPError(
            code=INVALID_PARAMS if expected else INTERNAL_ERROR,
            message=f"{answer.code}: {printable(answer.message)}",
            data=in_utf_8(answer.as_record()),
        )
    text = _text(in_utf_8(answer))
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=JSON, text=text)])


def _text(plain: object) -> str:
    """JSON that can be shown as it is: what would move a cursor or forge a line is escaped."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
