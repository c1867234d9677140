"""Records as plain values: what `--json` prints and what a server answers, by the same functions."""
