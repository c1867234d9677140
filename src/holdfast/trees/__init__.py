"""Snapshot trees as a library on directories: capture, restore, compare, verify and remove them."""
