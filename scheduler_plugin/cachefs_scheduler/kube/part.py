"""What the service starts for Kubernetes."""

from cachefs_scheduler.advice import Advice
from cachefs_scheduler.kube_section import KubeSection
from cachefs_scheduler.part import Part


def open_part(section: KubeSection, advice: Advice) -> Part:
    """The part for *section* of the configuration. Raises ConfigError."""
    return _Nothing()


class _Nothing:
    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass
