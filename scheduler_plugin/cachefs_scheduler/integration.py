"""The interface between the service and a scheduler integration."""

from typing import Protocol


class SchedulerIntegration(Protocol):
    """A scheduler integration, made by `open_integration(section, advice)` of `cachefs_scheduler.kube.integration`."""

    async def start(self) -> None:
        """Start, with tasks of its own. Raises CachefsError, for instance if an address is in use."""

    async def stop(self) -> None:
        """Stop all tasks. May be called without `start`."""

    def reason_not_leading(self) -> str:
        """Return why this replica sends no commands (another one leads, or none does yet); "" if this one leads."""
