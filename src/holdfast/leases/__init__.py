"""Leases: timed rights to write, with a token that fences out whoever has lost one."""
