"""`cachefs-slurm-hint`: tells Slurm which nodes hold which data, and lets jobs wait for a copy (asyncio)."""
