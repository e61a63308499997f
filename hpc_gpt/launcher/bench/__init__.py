"""Benchmarks: cells trained on this machine in rounds, and compared with the user's own programs."""
