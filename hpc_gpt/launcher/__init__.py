"""From a request to a script, a run folder and a job, and what becomes of it."""
