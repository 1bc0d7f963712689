"""`cachefs-slurm-hint`: tells Slurm which nodes hold what, and lets jobs wait for a copy (asyncio)."""
