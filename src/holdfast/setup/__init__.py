"""Setup: what other programs need in their own files to call Holdfast, put in and taken out again."""
