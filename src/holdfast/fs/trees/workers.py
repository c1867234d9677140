"""Doing several things at once, where the system does most of the work and waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_WORTH_A_THREAD = 2000


def together(jobs: Sequence[Callable[[], None]], *, size: int) -> None:
    """Do all jobs, at once if there is much to do (`size` things); raise the first failure when all ended."""
    if size < _WORTH_A_THREAD or len(jobs) < 2:
        for job in jobs:
            job()
        return
    failures: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    guarded(jobs[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
