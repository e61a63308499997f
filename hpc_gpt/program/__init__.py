"""A job script of the user's own, which runs as it is."""
