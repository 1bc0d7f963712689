"""[kube] of the configuration: the extender, the webhooks and the API server of Kubernetes."""

from cachefs_scheduler.section import Section


class KubeSection(Section):
    """[kube]: Kubernetes. There is none where the file has no such table."""
