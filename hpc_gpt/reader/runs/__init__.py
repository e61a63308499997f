"""Reads run folders and logs as runs, each with its record."""
