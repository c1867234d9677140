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
    from holdfast.trees.capture import Captured as Captured
    from holdfast.trees.capture import capture as capture
    from holdfast.trees.capture import capture_best as capture_best
    from holdfast.trees.engines import Engine as Engine
    from holdfast.trees.engines import choose_engine as choose_engine
    from holdfast.trees.manifest import MANIFEST as MANIFEST
    from holdfast.trees.manifest import PAYLOAD as PAYLOAD
    from holdfast.trees.manifest import READY as READY
    from holdfast.trees.manifest import ManifestEntry as ManifestEntry
    from holdfast.trees.manifest import read_manifest as read_manifest
    from holdfast.trees.payload import sync_tree as sync_tree
    from holdfast.trees.payload import synced as synced
    from holdfast.trees.remove import remove_tree as remove_tree
    from holdfast.trees.remove import tree_bytes as tree_bytes
    from holdfast.trees.restore import Materialised as Materialised
    from holdfast.trees.restore import exchange as exchange
    from holdfast.trees.restore import materialise as materialise
    from holdfast.trees.shared_dirs import SharedDirectory as SharedDirectory
    from holdfast.trees.shared_dirs import Stored as Stored
    from holdfast.trees.shared_dirs import read_shared_directories as read_shared_directories
    from holdfast.trees.shared_dirs import share_tree as share_tree
    from holdfast.trees.verify import Change as Change
    from holdfast.trees.verify import Problem as Problem
    from holdfast.trees.verify import changes as changes
    from holdfast.trees.verify import compare as compare
    from holdfast.trees.verify import verify as verify
    from holdfast.trees.verify import verify_manifest as verify_manifest

_HOMES = {
    "capture_best": "capture",
    "Captured": "capture",
    "capture": "capture",
    "sync_tree": "payload",
    "synced": "payload",
    "Change": "verify",
    "changes": "verify",
    "compare": "verify",
    "Engine": "engines",
    "choose_engine": "engines",
    "exchange": "restore",
    "SharedDirectory": "shared_dirs",
    "Stored": "shared_dirs",
    "read_shared_directories": "shared_dirs",
    "MANIFEST": "manifest",
    "PAYLOAD": "manifest",
    "READY": "manifest",
    "share_tree": "shared_dirs",
    "ManifestEntry": "manifest",
    "read_manifest": "manifest",
    "remove_tree": "remove",
    "tree_bytes": "remove",
    "Materialised": "restore",
    "materialise": "restore",
    "Problem": "verify",
    "verify": "verify",
    "verify_manifest": "verify",
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
