"""Filesystem access: the calls, durable files, safe names and paths, strict JSON, probes."""
