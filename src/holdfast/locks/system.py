"""The platform's own whole-file lock behind one interface: flock(2), or LockFileEx on Windows.

A lock belongs to an *open file description*: two that were opened apart exclude each other even in
one thread, copies of one (after a fork) share it, and the kernel drops it when the last copy closes.
"""

from __future__ import annotations

import sys

from holdfast.fs import calls

if sys.platform == "win32":
    import ctypes
    import errno
    import msvcrt
    from ctypes import wintypes

    _FAIL_IMMEDIATELY = 1
    _EXCLUSIVE = 2
    _LOCK_VIOLATION = 33
    _EVERYTHING = 0xFFFFFFFF
    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)

    class _Overlapped(ctypes.Structure):
        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        )

    def _lock(fd: int, flags: int) -> bool:
        handle = msvcrt.get_osfhandle(fd)
        where = ctypes.byref(_Overlapped())
        if _kernel.LockFileEx(wintypes.HANDLE(handle), flags, 0, _EVERYTHING, _EVERYTHING, where):
            return True
        code = ctypes.get_last_error()
        if code == _LOCK_VIOLATION:
            return False
        raise OSError(errno.EIO, ctypes.FormatError(code))

    def try_lock(fd: int, shared: bool) -> bool:
        """Take the lock if that is possible at once."""
        return _lock(fd, _FAIL_IMMEDIATELY | (0 if shared else _EXCLUSIVE))

    def lock(fd: int, shared: bool) -> None:
        """Take the lock, however long it takes."""
        _lock(fd, 0 if shared else _EXCLUSIVE)

    def unlock(fd: int) -> None:
        """Give the lock back."""
        handle = msvcrt.get_osfhandle(fd)
        where = ctypes.byref(_Overlapped())
        _kernel.UnlockFileEx(wintypes.HANDLE(handle), 0, _EVERYTHING, _EVERYTHING, where)

else:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN

    _TRY_SHARED = LOCK_SH | LOCK_NB
    _TRY_EXCLUSIVE = LOCK_EX | LOCK_NB

    def try_lock(fd: int, shared: bool) -> bool:
        """Take the lock if that is possible at once."""
        try:
            calls.flock(fd, _TRY_SHARED if shared else _TRY_EXCLUSIVE)
        except BlockingIOError:
            return False
        return True

    def lock(fd: int, shared: bool) -> None:
        """Take the lock, however long it takes; signal handlers run meanwhile and may raise."""
        calls.flock(fd, LOCK_SH if shared else LOCK_EX)

    def lock_until_signal(fd: int, shared: bool) -> int:
        """Wait for the lock until a signal arrives; return 0 when it was granted, else the error number."""
        return calls.flock_interruptible(fd, LOCK_SH if shared else LOCK_EX)

    def unlock(fd: int) -> None:
        """Give the lock back."""
        calls.flock(fd, LOCK_UN)
