"""Runs on this machine, supervised by submitit's local controller."""
