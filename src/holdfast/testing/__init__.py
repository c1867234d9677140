"""Tools for testing what is built on Holdfast: crashes, power cuts, stores."""
