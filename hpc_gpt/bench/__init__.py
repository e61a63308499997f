"""What a benchmark measures: cells trained on this machine in rounds, beside programs that the user has."""
