"""The lock of a repository as it is shown: as a record for programs, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.clock import format_duration, format_instant
from holdfast.locks.identity import Liveness
from holdfast.locks.repo_lock import RepoLockState


def as_record(repo_id: str, state: RepoLockState | None, stale_after: float) -> dict[str, object]:
    """Everything that is known, as plain values. `state` is `free`, `locked` or `stale`."""
    if state is None:
        return {"repo_id": repo_id, "state": "free"}
    return {
        "repo_id": repo_id,
        "state": "stale" if state.stale else "locked",
        "identity": state.identity,
        "path": str(state.path),
        "age": round(state.age, 3),
        "expires_at": _expiry(state, stale_after),
        "liveness": state.liveness.value,
        "holder": state.info.as_record() if state.info else None,
    }


def lines(repo_id: str, state: RepoLockState | None, stale_after: float) -> Iterator[str]:
    """The same for people: who, where, what for, since when, until when, and its identity."""
    if state is None:
        yield f"{repo_id}: free"
        return
    who = one_line(state.info.as_record()) if state.info else "somebody (its content cannot be read)"
    yield f"{repo_id}: {'stale, was locked' if state.stale else 'locked'} by {who}"
    if state.info and state.info.holder:
        yield f"  host      {state.info.holder.host}, user {state.info.holder.user}"
    yield f"  age       {format_duration(state.age)}"
    if state.stale:
        yield f"  stale     {_reason(state)}; the next one who wants it takes it over"
    else:
        yield f"  expires   {_expiry(state, stale_after)}, unless its holder refreshes it"
        yield f"  process   {state.liveness.value}"
    yield f"  identity  {state.identity}"


def one_line(info: Mapping[str, object]) -> str:
    """Who holds a lock, by what its file says."""
    text = f"pid {info.get('pid')}"
    if info.get("cmd"):
        text += f" ({info['cmd']})"
    return text + (f" since {info['created_at']}" if info.get("created_at") else "")


def _reason(state: RepoLockState) -> str:
    return "its process is gone" if state.liveness is Liveness.DEAD else "it is too old"


def _expiry(state: RepoLockState, stale_after: float) -> str | None:
    if state.info is None or state.info.created_at is None:
        return None
    return format_instant(state.info.created_at + stale_after)
