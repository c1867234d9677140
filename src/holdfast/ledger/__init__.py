"""Ledgers: append-only event logs, and the claims on nodes, which are a projection of the events."""
