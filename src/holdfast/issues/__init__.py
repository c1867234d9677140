"""Issues: work to be done, what it waits for, and the gates it has to pass."""
