"""The experiments that are shipped: the seeds' tables, row by row."""
