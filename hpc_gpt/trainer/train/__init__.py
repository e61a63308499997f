"""The trainer: what every rank of a run does."""
