"""What is held for a time, however it is held: its heartbeat, the wait for it, and circles of waits."""
