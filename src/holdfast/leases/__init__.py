"""Leases: timed rights to write, with a token that fences out former holders."""
