"""Setup: the entries that other programs need in their own files to call Holdfast."""
