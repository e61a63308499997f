"""What a failure looks like, and which of a run's failures is the first: live and at the end by the same code."""
