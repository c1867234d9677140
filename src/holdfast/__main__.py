"""The entry point of `holdfast`. `--version` loads nothing else, and `guard` hardly more."""

from __future__ import annotations

import gc
import sys

_GC_THRESHOLD = 50_000


def main() -> int:
    """Run the command line of this process and return its exit status."""
    arguments = sys.argv[1:]
    if arguments == ["--version"] and _show_version():
        return 0
    if arguments[:1] in (["guard"], ["hook"]):
        from holdfast.cli.quick import answer

        if (status := answer(arguments)) is not None:
            return status
    gc.set_threshold(_GC_THRESHOLD)  # loading modules creates many objects and no garbage
    from holdfast.cli.entry import run

    try:
        return run(arguments)
    finally:
        gc.freeze()  # no collection at exit either


def _show_version() -> bool:
    """Print the version; False if it cannot be written, which the command parser reports."""
    from holdfast import __version__

    try:
        print(f"holdfast {__version__}", flush=True)  # noqa: T201 (a front end)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
