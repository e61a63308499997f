"""The experiments that are shipped: the sources' tables, row by row."""
