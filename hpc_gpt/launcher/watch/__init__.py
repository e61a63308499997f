"""A run that was submitted: its state, its logs, and the requests of its user."""
