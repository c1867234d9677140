"""The documents and the stream of the issue tracker, by name; `store/layout.py` says where they are."""

from __future__ import annotations

from holdfast.issues.claim_records import ClaimRecord
from holdfast.issues.records import (
    Dependents,
    EventCodec,
    GateRun,
    Graph,
    Index,
    IssueCodec,
    OpenCodec,
    Registry,
)
from holdfast.store.model import Family, Key, Stream, StructCodec

INDEX = Key("jit/index", OpenCodec(Index))
GRAPH = Key("jit/graph", OpenCodec(Graph))
GATES = Key("jit/gates", OpenCodec(Registry))
GATE_RUNS = Family("jit/gate-runs", StructCodec(GateRun))
ISSUES = Family("jit/issues", IssueCodec())
CLAIMS = Family("jit/claims", StructCodec(ClaimRecord))
DEPENDENTS = Family("jit/dependents", OpenCodec(Dependents))
EVENTS = Stream("jit/events", EventCodec())
