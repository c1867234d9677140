"""The chunks of a manifest."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt
from holdfast.trees.chunks import CHUNK, files_in, hash_of, is_large, pieces_of, segments
from holdfast.trees.manifest import END, MAGIC, RECORD, Manifest, Meta, encode_body, encode_entry


def manifest(directories: int, changed: int = -1) -> Manifest:
    parts = [MAGIC]
    for number in range(directories):
        path = b"%04d" % number if number else b""
        digest = bytes([number % 256, number == changed] * 16)
        entry = encode_entry(Meta(b"f", 0o644, 0, 0, 0), b"file", number, digest)
        body = encode_body(Meta(b"d", 0o755, 0, 0, 0), b"", [entry])
        parts += [RECORD.pack(len(path), len(body)), path, body]
    return Manifest(b"".join([*parts, RECORD.pack(END, directories)]), where="a test")


def test_the_segments_of_a_manifest_are_the_manifest() -> None:
    found = manifest(1000)
    cut = list(segments(found))
    assert len(cut) > 5
    assert hash_of(b"".join(cut)) == found.payload_hash
    files = [each for segment in cut for each in files_in(segment)]
    assert [size for _, size in files] == list(range(1000))


def test_a_change_of_one_directory_changes_one_segment() -> None:
    before, after = (set(segments(manifest(1000, changed))) for changed in (-1, 500))
    assert len(before - after) == 1


def test_a_broken_segment_is_refused() -> None:
    (segment, *_) = segments(manifest(200))
    for broken in (segment[:-3], segment[:40], segment + b"x"):
        with pytest.raises(Corrupt):
            list(files_in(broken))


def test_pieces_have_at_most_the_size_of_a_chunk() -> None:
    assert [len(each) for each in pieces_of(bytes(2 * CHUNK + 1))] == [CHUNK, CHUNK, 1]
    assert not is_large(CHUNK)
    assert is_large(CHUNK + 1)
