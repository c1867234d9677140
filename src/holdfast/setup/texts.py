"""What is written into the files of other programs. Whoever changes a text here raises `VERSION`."""

from __future__ import annotations

VERSION = 2

AGENTS = """
## Working beside others: Holdfast

Several agents and people work in this repository at the same time. Holdfast keeps them apart.

- See who holds what before you start: `holdfast who`.
- Take the lease of a worktree before you write into it:
  `holdfast lock acquire --worktree NAME --ttl 15m --purpose "what for" --field lock_id` prints its id. Name
  that to later commands: `export HOLDFAST_LOCK_ID=ID`, or `--lock-id ID` with each of them, if your shell
  forgets variables. `holdfast lock renew` before the time is up; `holdfast lock release` when you are done.
  Or let one command do it all: `holdfast run --worktree NAME --snapshot -- COMMAND`.
- Want a directory of your own? `holdfast worktree create NAME --from head` (without `--from` it is empty),
  then `cd "$(holdfast worktree path NAME)"`.
- Keep what you have done: `holdfast snapshot -m "what changed"`. Nothing that was kept is ever lost.
- Take work from the queue rather than choosing it: `holdfast issue claim-next` prints the id of your claim.
  Name it (`--claim`, or `HOLDFAST_CLAIM_ID`) when you are done: `holdfast issue finish ID`; or give the work
  back: `holdfast issue release ID`.
- `E_LOCK_CONFLICT` names the holder: wait (`--wait 5m`) or take other work. Do not delete lock files.
- `E_FENCING_MISMATCH` or `E_LOCK_EXPIRED` means that your lease was taken over: stop writing, take it
  again, look at what changed, then go on.
- Every command takes `--json`; every failure has a code and a hint.
"""

CLAUDE_POINTER = """
@AGENTS.md
"""

CODEX_MCP = """
[mcp_servers.holdfast]
command = "holdfast"
args = ["mcp"]
"""

PRE_COMMIT = """
if command -v holdfast >/dev/null 2>&1; then holdfast hook pre-commit || exit $?; fi
"""

PRE_COMMIT_CHAIN = """
if command -v holdfast >/dev/null 2>&1; then holdfast hook pre-commit || exit $?; fi
if [ -x "$(dirname "$0")/pre-commit.before-holdfast" ]; then
    exec "$(dirname "$0")/pre-commit.before-holdfast" "$@"
fi
"""
