"""What each agent of the demo does with a piece of work: a little writing, with time for mishaps between."""

from __future__ import annotations

import random
import time
from pathlib import Path

from holdfast.demo.stage import Stage
from holdfast.fs import durable

STEPS = 4


def work(stage: Stage, directory: Path, *, issue: str, token: int, seed: int) -> None:
    """Write into `directory`, which is the worktree: what was begun, step by step, and the result.

    Every attempt has files of its own, and notes what it has written once that is on disk: so it can be
    told afterwards whether anything of anybody was lost.
    """
    chance = random.Random(f"{seed}/{issue}/{token}")
    for step in range(1, STEPS + 1):
        name = f"attempt-{token}-step-{step}.txt"
        durable.replace(directory / name, f"{issue} {token} {step}\n".encode())
        stage.note(f"{issue}-{token}-{step}.json", {"issue": issue, "token": token, "file": name})
        time.sleep(chance.uniform(0.05, 0.35))
    durable.replace(directory / "result.txt", f"{issue} by attempt {token}\n".encode())
