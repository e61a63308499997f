"""Slurm: its options, and its command lines as sbatch reads them."""
