"""The job chain of a run: whether it is retried, when, why and on which nodes; and the forecast of the whole chain."""
