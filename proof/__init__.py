"""Harnesses that prove the promises of Holdfast: crashes, power cuts, races, histories, a model. Not in the wheel."""
