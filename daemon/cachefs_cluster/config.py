"""The configuration of a daemon whose node may be in a cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachefs_cluster.section import ClusterSection
from cachefs_daemon import config as configuration
from cachefs_daemon.config import Config


class ClusterConfig(Config):
    """The whole file, of any node. `cachefs_daemon.sections` and `cachefs_cluster.section` describe each key."""

    cluster: ClusterSection = ClusterSection()


def full_model() -> type[Config]:
    """Return the model of a configuration with the tables of all packages."""
    return ClusterConfig


def load(path: Path | None) -> ClusterConfig:
    """Load a configuration as `cachefs_daemon.config.load` does, with a whole [cluster]. Raises InvalidConfig."""
    return _with_cluster(configuration.load(path, full_model))


def parse(values: Mapping[str, Any]) -> ClusterConfig:
    """Validate *values* as `cachefs_daemon.config.parse` does, with a whole [cluster]. Raises InvalidConfig."""
    return _with_cluster(configuration.parse(values, full_model))


def _with_cluster(config: Config) -> ClusterConfig:
    """Return the configuration of a node in no cluster with the defaults of [cluster], and any other as it is."""
    if isinstance(config, ClusterConfig):
        return config
    settings = {name: getattr(config, name) for name in config.model_fields_set if name != "cluster"}
    return ClusterConfig.model_validate(settings)


def cluster_section(config: Config) -> ClusterSection:
    """Return [cluster] of a configuration; its defaults where the file has none."""
    return config.cluster if isinstance(config.cluster, ClusterSection) else ClusterSection()
