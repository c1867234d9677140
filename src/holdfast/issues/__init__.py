"""The issue tracker: issues, their dependencies, gates and claims."""
