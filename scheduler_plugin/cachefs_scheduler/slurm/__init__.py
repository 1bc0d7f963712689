"""Slurm: hints and held jobs."""
