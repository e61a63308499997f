"""From a request to a job, and what becomes of it: plan, launch, watch."""
