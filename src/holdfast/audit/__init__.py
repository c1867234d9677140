"""What was done, by whom, in an order that nobody can change afterwards without being found out."""
