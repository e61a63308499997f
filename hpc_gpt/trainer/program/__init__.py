"""A supervised program of the user's own, and a job script of the user's own, which runs as it is."""
