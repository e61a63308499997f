"""Reads a log file into its parts, fast and in bounded memory, whatever its bytes are."""
