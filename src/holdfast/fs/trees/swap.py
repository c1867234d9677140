"""Swapping two directories in one step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from holdfast.errors import ExchangeUnavailable
from holdfast.fs import calls
from holdfast.fs.directory import although_read_only, io_failure

_UNAVAILABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system swap what they lead to. Commit point: the exchange; not synced.

    Where the system or the file system cannot: `ExchangeUnavailable`, and nothing has changed.
    """
    try:
        although_read_only(
            lambda: calls.rename_exchange(os.fspath(one), os.fspath(other)), {one: other, other: one}
        )
    except OSError as error:
        if error.errno in _UNAVAILABLE:
            raise ExchangeUnavailable(
                f"{one} and {other} cannot be swapped in one step here: {error.strerror}", path=str(one)
            ) from error
        raise io_failure("exchange", f"{one} and {other}", error) from error
