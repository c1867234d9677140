"""A demonstration: processes that share files under locks, are killed and stopped, and lose nothing."""
