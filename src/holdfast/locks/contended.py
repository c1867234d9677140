"""What a lock needs only when somebody else has it: loaded with the first wait, not before.

`FileLocker` loads it while no fork can happen. A thread that is in the middle of an import when
another one forks leaves the child with a module that never becomes ready, and the child waiting for
it for ever: so nothing that a wait needs is imported at any later moment.
"""

from __future__ import annotations

import functools
import signal as _signal  # noqa: F401 - what `waiting` needs, loaded here and now

from holdfast.clock import format_duration
from holdfast.errors import LockTimeout
from holdfast.fs import native as _native  # noqa: F401 - likewise
from holdfast.fs.probe import filesystem_kind, is_network
from holdfast.locks.descriptors import Description
from holdfast.locks.kernel_locks import find_holders


def must_poll(description: Description) -> bool:
    """Whether a blocking wait is not to be trusted here: a network file system may not wake us."""
    return _is_on_network(description.device, description.key)


@functools.lru_cache(maxsize=64)
def _is_on_network(device: int, key: str) -> bool:
    return is_network(filesystem_kind(key))


def timeout(key: str, seconds: float) -> LockTimeout:
    """The failure of a wait that took too long, naming those who hold the lock as far as one can tell."""
    holders = [each.as_record() for each in find_holders(key) or () if not each.waiting]
    return LockTimeout(key, seconds, format_duration(seconds), holders=holders)
