"""From a request to a script, a run folder and a job; resuming and branching a run; a shell beside it."""
