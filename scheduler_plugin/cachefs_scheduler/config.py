"""The configuration of cachefs-scheduler: a TOML file."""

from cachefs_scheduler.kube_section import KubeSection
from cachefs_scheduler.section import Section
from cachefs_scheduler.slurm_section import SlurmSection


class Config(Section):
    """The whole file."""

    kube: KubeSection | None = None
    slurm: SlurmSection | None = None
