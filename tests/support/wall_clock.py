"""A settable wall clock for real processes: a small preloaded library overrides the system's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Shift the wall clock of this process by the number of seconds in the file WALL_CLOCK_STEP. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, now);
    const char *path = getenv("WALL_CLOCK_STEP");
    if (clock == CLOCK_REALTIME && result == 0 && path) {
        long step = 0;
        FILE *file = fopen(path, "r");
        if (file) {
            if (fscanf(file, "%ld", &step) != 1) step = 0;
            fclose(file);
        }
        now->tv_sec += step;
    }
    return result;
}
"""


class WallClock:
    """The wall clock of all processes started with its environment."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_STEP": str(file)}
        self.set(0)

    def set(self, step: float) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{step:.0f}\n")
        draft.rename(self._file)


def settable_wall_clock(directory: Path) -> WallClock:
    """Create a clock with its files in this directory; skip the test where that is impossible."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("needs Linux and a C compiler to set the clock of a process")
    source, library = directory / "shim.c", directory / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return WallClock(library, directory / "step")
