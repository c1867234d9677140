"""Harnesses that attack Holdfast through a hostile repository: planted bytes, swapped directories, damage, fuzzing.

Everything below the root of a repository is untrusted. A command that meets it may refuse with a failure, but it
changes nothing outside the root, reads nothing from there, runs and contacts nothing, never hangs, and never reports
a failure that it does not know.
"""
