"""The life of a forked process that stands in for a new interpreter."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def exit_with(work: Callable[[], object]) -> NoReturn:
    """Do the work and end this process with its result, as an interpreter does: reported, flushed, with a status."""
    status: object = 1
    try:
        status = work()
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))
