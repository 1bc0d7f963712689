"""[slurm] of the configuration: hints for Slurm, and jobs that wait there."""

from cachefs_scheduler.section import Section


class SlurmSection(Section):
    """[slurm]: Slurm. There is none where the file has no such table."""
