"""The test suite; it mirrors `src/holdfast`."""
