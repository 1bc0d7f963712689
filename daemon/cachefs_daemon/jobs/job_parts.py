"""Creates the parts that follow jobs and their consumers."""

from cachefs_daemon.config import Config
from cachefs_daemon.datasets.catalog import Catalog
from cachefs_daemon.fetch.fetcher import Fetcher
from cachefs_daemon.jobs.attribution import Attribution
from cachefs_daemon.jobs.epoch_loader import EpochLoader, LoaderParts
from cachefs_daemon.jobs.persistence import JobPersistence
from cachefs_daemon.jobs.plan_memory import PlanMemory
from cachefs_daemon.jobs.registry import JobRegistry
from cachefs_daemon.ports import Placement
from cachefs_daemon.runtime.threads import Threads
from cachefs_daemon.store.storage import Storage


class JobParts:
    """The registry of jobs, the loader of their epochs, and what attributes reads to them. Used on the event loop."""

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        storage: Storage,
        fetcher: Fetcher,
        threads: Threads,
        placement: Placement,
    ) -> None:
        plan, presence = storage.planning.plan, storage.planning.presence
        memory = PlanMemory(config.plan_memory)
        self.loader = EpochLoader(
            LoaderParts(plan, storage.presence_watch, storage.blocks, fetcher, threads, memory, placement)
        )
        self.registry = JobRegistry(catalog, plan, presence, self.loader, lambda: storage.capacity, placement)
        self.registry.weights = fetcher.weights
        self.attribution = Attribution(plan, self.registry)
        self.persistence = JobPersistence(self.registry, config.daemon.state_dir, threads)
