"""The store's part of the configuration, for a daemon and for programs that check its directories."""

from cachefs_daemon.config import Config
from cachefs_daemon.store.storage import StoreConfig
from cachefs_daemon.store.tier import TierConfig


def store_config(config: Config) -> StoreConfig:
    """Return the store's configuration. Percentages become bytes of the machine's memory, or of [ssd] dir's file
    system."""
    daemon = config.daemon
    memory = TierConfig(
        config.memory.dir,
        config.memory_budget,
        config.memory.segment_size,
        daemon.eviction_policy,
        config.memory_min_free,
    )
    ssd = None
    if config.ssd is not None and (budget := config.ssd_budget) > 0:
        ssd = TierConfig(
            config.ssd.dir,
            budget,
            config.ssd.segment_size,
            daemon.eviction_policy,
            config.ssd_min_free,
            config.ssd.require_mount,
        )
    return StoreConfig(daemon.state_dir, daemon.block_size, memory, ssd)
