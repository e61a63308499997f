"""The names by which job scripts start what is before and after an attempt: `ends` has the work."""
