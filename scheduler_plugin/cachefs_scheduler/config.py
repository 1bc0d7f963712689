"""The configuration of cachefs-scheduler: a TOML file."""

from cachefs_scheduler.kube_section import KubeSection
from cachefs_scheduler.section import Section


class Config(Section):
    """The whole file."""

    kube: KubeSection | None = None
