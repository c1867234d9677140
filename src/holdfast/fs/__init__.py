"""Durable files, safe names and paths, strict JSON, and what this file system can do."""
