"""Another program on `.jit`, as the specification describes it: it takes the locks, writes temporary files and renames
them, and appends events. It uses nothing of Holdfast and knows nothing of intents."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class ForeignProgram:
    def __init__(self, root: Path) -> None:
        self._jit = root / ".jit"

    def append_event(self, name: str, issue_id: str = "") -> None:
        with self._locked(".events.lock"), (self._jit / "events.jsonl").open("a") as file:
            event = {"type": "foreign_event", "id": str(uuid.uuid4()), "issue_id": issue_id, "name": name}
            file.write(json.dumps({**event, "timestamp": "2025-01-01T00:00:00Z"}) + "\n")

    def add_label(self, issue_id: str, label: str) -> None:
        def change(issue: dict[str, Any]) -> None:
            issue["labels"] = [*(issue.get("labels") or []), label]
            issue["updated_at"] = "2025-01-01T00:00:00Z"

        with self._locked(f"issues/{issue_id}.lock"):
            self._change(f"issues/{issue_id}.json", change)
            self.append_event(label, issue_id)

    def has_issue(self, issue_id: str) -> bool:
        return (self._jit / f"issues/{issue_id}.json").exists()

    def create_issue(self, issue_id: str) -> None:
        with self._locked(".index.lock", f"issues/{issue_id}.lock"):
            self._write(f"issues/{issue_id}.json", {"id": issue_id, "title": issue_id, "state": "ready"})
            self._change("index.json", lambda index: index["all_ids"].append(issue_id))
            self.append_event(issue_id, issue_id)

    def delete_issue(self, issue_id: str) -> None:
        with self._locked(".index.lock", f"issues/{issue_id}.lock"):
            self._change("index.json", lambda index: index["all_ids"].remove(issue_id))
            (self._jit / f"issues/{issue_id}.json").unlink()
            self.append_event("deleted", issue_id)

    def define_gate(self, key: str) -> None:
        with self._locked(".gates.lock"):
            self._change("gates.json", lambda registry: registry["gates"].update({key: {"key": key, "title": key}}))
            self.append_event(key)

    @contextlib.contextmanager
    def _locked(self, *names: str) -> Iterator[None]:
        if sys.platform == "win32":
            raise NotImplementedError
        import fcntl

        with contextlib.ExitStack() as held:
            for name in names:
                file = held.enter_context((self._jit / name).open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _change(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        record = json.loads((self._jit / name).read_text())
        change(record)
        self._write(name, record)

    def _write(self, name: str, record: dict[str, Any]) -> None:
        draft = self._jit / f"{name}.tmp"
        draft.write_text(json.dumps(record))
        os.replace(draft, self._jit / name)
