"""Where the command `holdfast` begins. Asking for the version loads nothing else, and `guard` hardly more."""

from __future__ import annotations

import gc
import sys

_MANY = 50_000


def main() -> int:
    """Run the command line with the arguments of this process; return its exit status."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        return _show_version()
    if arguments[:1] == ["guard"] and (status := _guard_at_a_glance(arguments[1:])) is not None:
        return status
    gc.set_threshold(_MANY)  # loading makes many objects and no garbage: do not look for any
    from holdfast.cli.entry import run

    try:
        return run(arguments)
    finally:
        gc.freeze()  # nor at the end


def _show_version() -> int:
    from holdfast import __version__

    try:
        print(f"holdfast {__version__}", flush=True)  # noqa: T201 (a face)
    except OSError:
        from holdfast.cli.output import discard_output

        discard_output(sys.stdout)
        return 1
    return 0


def _guard_at_a_glance(paths: list[str]) -> int | None:
    """The exit status of `guard` if a glance is enough to tell it; options are for the parser."""
    if not paths or any(path.startswith("-") for path in paths):
        return None
    import os

    from holdfast.workspace.glance import glance, place_of

    lock_id = os.environ.get("HOLDFAST_LOCK_ID")
    places = {place_of(path) for path in paths}
    answers = [glance(place, lock_id) for place in places if place is not None]
    if None in answers:
        return None
    conflicts = [answer for answer in answers if not isinstance(answer, bool | None)]
    if not conflicts:
        return 0
    from holdfast.cli.output import Output

    Output(as_json=False).failure(conflicts[0])
    return int(conflicts[0].exit_status)


if __name__ == "__main__":
    sys.exit(main())
