"""Slurm: its clients, options and directives, hosts, reasons, and whether a job can start."""
