"""The preflight: a job's nodes are probed before its ranks start, and bad ones are replaced by spare ones."""
