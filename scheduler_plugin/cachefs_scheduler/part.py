"""A part of the service that talks to a scheduler, as the service starts and ends it."""

from typing import Protocol


class Part(Protocol):
    """Made by `open_part(section, advice)` of `cachefs_scheduler.kube.part`."""

    async def start(self) -> None:
        """Begin, with tasks of its own. Raises CachefsError where it cannot, such as for an address in use."""

    async def stop(self) -> None:
        """End all tasks. May be called without `start`."""

    def follows(self) -> str:
        """Return why this replica gives no orders: another one leads, or none does yet. "" where this one leads."""
