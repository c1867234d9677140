"""Harnesses that prove what Holdfast promises: crashes, power cuts, races, histories. Not in the wheel."""
