"""The base of all engines: their interface, and what our own, and DeepSpeed's, have in common."""
