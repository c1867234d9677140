"""Trees of files as snapshots: captured, restored, compared, verified, removed; a library on directories.

| | |
|---|---|
| `engines` | `Engine`, `choose_engine`: the ways to capture, and which of them work at a place |
| `capturing` | `capture`, `Captured`: a directory becomes a snapshot's tree |
| `syncing` | `synced`, `sync_tree`: all that was written is on the disk |
| `best_engine` | `capture_best`: the same, by the best engine that can do it |
| `restore` | `materialise`, `Materialised`: a snapshot's tree becomes a directory |
| `homes` | `read_homes`, `Stored`: the directories of a tree, which may be in other trees |
| `sharing` | `share_tree`: a second tree with the same content |
| `comparing` | `changes`, `compare`, `Change`: what is different |
| `verification` | `verify`, `verify_manifest`, `Problem`: whether a tree is still what it was |
| `manifest` | `read_manifest`, `ManifestEntry`: what is in a tree |
| `remnants` | `needed`, `trim`: what is left of a tree whose snapshot is gone, because others need it |
| `freeing` | `freed_in_turn`: what becomes free when some of the trees go |
| `removal` | `remove_tree`, `tree_bytes`: getting rid of a tree, and what that frees |
| `swap` | `exchange`: two directories swap their places in one step |
| `layout` | the names in a tree's directory: `PAYLOAD`, `MANIFEST`, `READY` |

A tree is a directory with `payload/`, `manifest`, perhaps `homes` and, when it is complete, `.READY`. It
knows nothing of stores, leases and repositories. The protocol is in docs/protocols/snapshot-trees.md. The
public names can be imported from here; each is loaded when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what checkers take for true

if TYPE_CHECKING:
    from holdfast.fs.trees.best_engine import capture_best as capture_best
    from holdfast.fs.trees.capturing import Captured as Captured
    from holdfast.fs.trees.capturing import capture as capture
    from holdfast.fs.trees.comparing import Change as Change
    from holdfast.fs.trees.comparing import changes as changes
    from holdfast.fs.trees.comparing import compare as compare
    from holdfast.fs.trees.engines import Engine as Engine
    from holdfast.fs.trees.engines import choose_engine as choose_engine
    from holdfast.fs.trees.homes import Home as Home
    from holdfast.fs.trees.homes import Stored as Stored
    from holdfast.fs.trees.homes import read_homes as read_homes
    from holdfast.fs.trees.layout import MANIFEST as MANIFEST
    from holdfast.fs.trees.layout import PAYLOAD as PAYLOAD
    from holdfast.fs.trees.layout import READY as READY
    from holdfast.fs.trees.manifest import ManifestEntry as ManifestEntry
    from holdfast.fs.trees.manifest import read_manifest as read_manifest
    from holdfast.fs.trees.removal import remove_tree as remove_tree
    from holdfast.fs.trees.removal import tree_bytes as tree_bytes
    from holdfast.fs.trees.restore import Materialised as Materialised
    from holdfast.fs.trees.restore import materialise as materialise
    from holdfast.fs.trees.sharing import share_tree as share_tree
    from holdfast.fs.trees.swap import exchange as exchange
    from holdfast.fs.trees.syncing import sync_tree as sync_tree
    from holdfast.fs.trees.syncing import synced as synced
    from holdfast.fs.trees.verification import Problem as Problem
    from holdfast.fs.trees.verification import verify as verify
    from holdfast.fs.trees.verification import verify_manifest as verify_manifest

_HOMES = {
    "capture_best": "best_engine",
    "Captured": "capturing",
    "capture": "capturing",
    "sync_tree": "syncing",
    "synced": "syncing",
    "Change": "comparing",
    "changes": "comparing",
    "compare": "comparing",
    "Engine": "engines",
    "choose_engine": "engines",
    "exchange": "swap",
    "Home": "homes",
    "Stored": "homes",
    "read_homes": "homes",
    "MANIFEST": "layout",
    "PAYLOAD": "layout",
    "READY": "layout",
    "share_tree": "sharing",
    "ManifestEntry": "manifest",
    "read_manifest": "manifest",
    "remove_tree": "removal",
    "tree_bytes": "removal",
    "Materialised": "restore",
    "materialise": "restore",
    "Problem": "verification",
    "verify": "verification",
    "verify_manifest": "verification",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
