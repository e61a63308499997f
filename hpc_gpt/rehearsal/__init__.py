"""A submitted run's whole life on this machine, under stand-ins for Slurm's commands that really run it."""
