"""What the service starts for Slurm."""

from cachefs_scheduler.advice import Advice
from cachefs_scheduler.part import Part
from cachefs_scheduler.slurm_section import SlurmSection


def open_part(section: SlurmSection, advice: Advice) -> Part:
    """The part for *section* of the configuration. Raises ConfigError."""
    return _Nothing()


class _Nothing:
    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass
