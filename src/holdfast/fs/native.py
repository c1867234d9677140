"""System calls that Python lacks, made through the C library; loaded when `calls` first needs one."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

TYPE_CHECKING = False  # true for type checkers; importing `typing` costs time

if TYPE_CHECKING:
    from typing import NoReturn

NOREPLACE = 1
EXCHANGE = 2

_CURRENT_DIRECTORY = -100 if sys.platform == "linux" else -2  # AT_FDCWD


def _unsupported(*_: object) -> NoReturn:
    """A stand-in for calls that this system does not have."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


if sys.platform == "win32":

    def rename(source: str, target: str, how: int, source_directory: int | None, directory: int | None) -> None:
        """Rename without replacing, which is all that Windows can do."""
        if how != NOREPLACE:
            _unsupported()
        os.rename(source, target)

    flock = sync_filesystem = _unsupported

    def start_writing(descriptor: int, offset: int, length: int) -> None:
        """Do nothing: Windows has no such call."""

else:
    _libc = ctypes.CDLL(None, use_errno=True)

    _FLAGS = {NOREPLACE: 4 if sys.platform == "darwin" else 1, EXCHANGE: 2}  # RENAME_EXCL and RENAME_SWAP on macOS
    _rename = getattr(_libc, "renameatx_np" if sys.platform == "darwin" else "renameat2", None)
    if _rename is not None:
        _rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]

    def rename(source: str, target: str, how: int, source_directory: int | None, directory: int | None) -> None:
        """Rename from and to open directories (None for paths); `how` is NOREPLACE or EXCHANGE."""
        if _rename is None:
            _unsupported()
        before = _CURRENT_DIRECTORY if source_directory is None else source_directory
        after = _CURRENT_DIRECTORY if directory is None else directory
        if _rename(before, os.fsencode(source), after, os.fsencode(target), _FLAGS[how]) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), source, None, target)

    def flock(descriptor: int, operation: int) -> int:
        """Call flock(2) once, not again after a signal; return 0 or the error number."""
        if _libc.flock(descriptor, operation) == 0:
            return 0
        return ctypes.get_errno() or errno.EINTR  # a signal handler that ran since may have reset it

    def sync_filesystem(descriptor: int) -> None:
        """Call syncfs(2), which Linux has; elsewhere sync everything."""
        if sys.platform != "linux":
            os.sync()
        elif _libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    _WAIT_BEFORE, _WRITE = 1, 2  # SYNC_FILE_RANGE_WAIT_BEFORE and SYNC_FILE_RANGE_WRITE
    _UNWRITTEN = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
    _sync_file_range = getattr(_libc, "sync_file_range", None)
    if _sync_file_range is not None:
        _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def start_writing(descriptor: int, offset: int, length: int) -> None:
        """Call sync_file_range(2), where it exists; raises `OSError` only if the disk cannot be written."""
        if _sync_file_range is not None and _sync_file_range(descriptor, offset, length, _WAIT_BEFORE | _WRITE) != 0:
            code = ctypes.get_errno()
            if code in _UNWRITTEN:
                raise OSError(code, os.strerror(code))

    _set_handler = _libc.signal
    _set_handler.restype = ctypes.c_void_p
    _set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    _harmless = ctypes.cast(_libc.getpid, ctypes.c_void_p)

    def set_interrupting_handler(signal_number: int) -> bool:
        """Let an unused signal interrupt system calls, without running Python code; False if it is in use."""
        previous = _set_handler(signal_number, _harmless)
        if previous not in (None, _harmless.value):  # None is SIG_DFL
            _set_handler(signal_number, previous)
            return False
        import signal  # slower to load than this module

        signal.siginterrupt(signal_number, True)  # each time: a new handler makes calls restart
        return True

    if sys.platform == "linux":

        def inotify_open() -> int:
            return int(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

        _add_watch = _libc.inotify_add_watch
        _add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]

        def inotify_watch(descriptor: int, path: bytes, mask: int) -> int:
            """Watch a directory; return the number in its events, or -1."""
            return int(_add_watch(descriptor, path, mask))

        _ANY_CHANGE = 0xFC6  # content or status; moved, created, deleted; itself deleted or moved

        def inotify_watch_directory(descriptor: int, directory: int) -> int:
            return inotify_watch(descriptor, b"/proc/self/fd/%d" % directory, _ANY_CHANGE)

        def inotify_watch_here(descriptor: int) -> int:
            """Watch the current directory for any change, in half the time of `inotify_watch_directory`."""
            return inotify_watch(descriptor, b".", _ANY_CHANGE)

        _PR_SET_PDEATHSIG, _SIGKILL = 1, 9

        def die_with_parent() -> None:
            """Ask the kernel to kill this process when its parent ends."""
            _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
