"""Runs broken on purpose, on a real cluster of virtual nodes: `make torture FAULTS=20 SEED=1`."""
