"""Ledgers: an event log that many agents append to, and the claims on work that are a fold over it."""
