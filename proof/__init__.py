"""Harnesses that prove what Holdfast promises: crashes, power cuts, races, histories, a model. Not in the wheel."""
