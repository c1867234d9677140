"""A demonstration: agents work through a queue, are killed and paused, and nothing is lost or done twice."""
