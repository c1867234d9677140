"""Stores: versioned documents and append-only streams, changed by all-or-nothing transactions."""
