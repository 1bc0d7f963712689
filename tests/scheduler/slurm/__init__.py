"""A real Slurm with four nodes on this machine."""
