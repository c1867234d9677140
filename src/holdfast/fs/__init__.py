"""Durable files, safe names and paths, strict JSON, and what this filesystem can do."""
