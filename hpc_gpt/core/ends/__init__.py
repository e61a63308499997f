"""How an attempt of a run ended, and whether the run is retried: the facts, one table of failures, one judge."""
