"""File locks, repository locks and ledger locks, and the identity and liveness of their holders."""
