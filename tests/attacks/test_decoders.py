"""Only a `Failure` leaves a decoder, whatever bytes it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from holdfast.repository.conflict_cache import ObjectName
from holdfast.store.content import ChunkHash, ChunkName
from holdfast.store.model import SafeName
from proof import effort
from proof.crash import scratch
from proof.hostile.decoders import all_decoders, names_of_all
from proof.hostile.fuzz import fuzz, summary
from proof.hostile.record_decoders import Decoder

INPUTS = 5_000_000
"""To all decoders together in a proof."""
FEW = 120
"""To each of them in an ordinary run."""


@pytest.fixture(scope="module")
def decoders() -> Iterator[dict[str, Decoder]]:
    with scratch() as directory:  # in memory: some decoders read a file, which is written for each input
        yield {each.name: each for each in all_decoders(directory)}


def test_there_are_at_least_48_decoders_and_each_reads_its_own_samples(decoders: dict[str, Decoder]) -> None:
    assert len(decoders) >= 48
    assert list(decoders) == names_of_all()
    for each in decoders.values():
        for sample in each.samples:
            each.decode(sample)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", names_of_all())
def test_only_a_failure_leaves_the_decoder_of(name: str, decoders: dict[str, Decoder]) -> None:
    count = -(-INPUTS // len(decoders)) if effort.SHARE >= 1 else FEW
    raised = fuzz([decoders[name]], count, seed=effort.SEED)
    effort.tried["hostile inputs to decoders"] += count

    assert not raised, summary(raised)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(SafeName, "x"), (ObjectName, "0" * 40), (ChunkHash, "0" * 64), (ChunkName, f"{'0' * 64}-00")],
)
def test_a_name_with_a_newline_at_its_end_is_refused(kind: Any, text: str) -> None:
    assert msgspec.convert(text, kind) == text
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(f"{text}\n", kind)
