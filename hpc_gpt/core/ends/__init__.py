"""The end of an attempt, and whether its run is retried: the facts, one table of failures, one judge."""
