"""The ledger: an event log that many append to, and claims on work."""
