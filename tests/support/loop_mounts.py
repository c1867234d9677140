"""Common file systems, created in an image file and mounted through a loop device; and a small one in memory.

They need root, loop devices and the tools of the file system. Where something is missing the test is skipped with
the reason, and the end of the run lists it as NOT RUN HERE.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_SIZE = 400 << 20  # sparse; xfs needs at least 300 MiB
_PATIENCE = 20.0


class LoopMount:
    """One file system, mounted at `path`."""

    def __init__(self, image: Path, path: Path) -> None:
        self.image = image
        self.path = path

    def mount(self) -> None:
        """Mount it, which replays its journal."""
        run("mount", "-o", "loop", str(self.image), str(self.path))

    def unmount(self) -> None:
        """Unmount it and wait until the kernel releases it, so that the next mount reads from the disk.

        Another process may use it briefly, or hold a copy of all mounts in its own namespace.
        """
        end = time.monotonic() + _PATIENCE
        while not self._unmounted():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.path} could not be unmounted within {_PATIENCE:.0f} s")
            time.sleep(0.005)

    def _unmounted(self) -> bool:
        if self._is_mounted():
            subprocess.run(["umount", str(self.path)], check=False, capture_output=True)
        return not (self._is_mounted() or self._has_a_device())

    def _is_mounted(self) -> bool:
        """Ask the kernel and not the path: a file system that was shut down fails even a stat."""
        return f" {self.path} " in Path("/proc/self/mounts").read_text()

    def _has_a_device(self) -> bool:
        for each in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):  # detached just now
                if each.read_text().strip() == str(self.image):
                    return True
        return False


def run(*command: str) -> None:
    """Run a tool and add its stderr to any error."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr.strip())
        raise


@pytest.fixture
def loop_mount(scratch: Path) -> Iterator[Callable[..., LoopMount]]:
    """Create and mount a file system of a given kind, with options of its `mkfs`; all are unmounted at the end of the
    test."""
    mounted: list[LoopMount] = []

    def make(kind: str, *options: str) -> LoopMount:
        if sys.platform == "win32" or os.getuid() != 0:
            pytest.skip(f"needs root to mount {kind} through a loop device")
        made = LoopMount(scratch / f"{kind}.img", scratch / kind)
        made.path.mkdir()
        with made.image.open("wb") as file:
            file.truncate(_SIZE)
        try:
            run(f"mkfs.{kind}", "-q", *options, str(made.image))
            made.mount()
        except FileNotFoundError as error:
            pytest.skip(f"{error.filename} is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot mount {kind} here: {error}; {'; '.join(error.__notes__)}")
        mounted.append(made)
        return made

    yield make
    for each in mounted:
        subprocess.run(["umount", "--lazy", str(each.path)], check=False, capture_output=True)


@pytest.fixture
def small_disk(scratch: Path) -> Iterator[Path]:
    """A file system in memory that fills up quickly."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        pytest.skip("needs root to mount a small file system in memory")
    path = scratch / "small"
    path.mkdir()
    try:
        run("mount", "-t", "tmpfs", "-o", "size=16m", "holdfast", str(path))
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system in memory here: {error}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
