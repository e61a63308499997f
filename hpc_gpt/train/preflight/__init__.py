"""One rank of a preflight: what its device can do, and how fast it is reached from the others."""
