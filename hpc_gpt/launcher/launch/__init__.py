"""From a request to a script, a run folder and a job; resuming, branching and verifying a run; a shell beside it."""
