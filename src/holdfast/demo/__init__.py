"""The demo: agents work through a queue while some are killed and one is paused, and the result is checked."""
