"""Issues: units of work, what they wait for, the gates that they must pass, and who works on them."""
