"""Scripts that maintain the repository; not part of the package."""
