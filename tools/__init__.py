"""What keeps the repository; not part of the package."""
