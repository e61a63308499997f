"""Runs on this machine, through submitit's local executor: start, supervision, cancel."""
