"""Rehearse the whole life of a submitted run on this machine: stand-ins for Slurm's commands really run it."""
