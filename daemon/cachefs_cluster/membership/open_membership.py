"""Opens the kind of membership that the configuration names."""

from pathlib import Path

from cachefs_cluster.membership.identity import load_identity, make_own_record
from cachefs_cluster.membership.membership import Membership
from cachefs_cluster.membership.shared import SharedMembership
from cachefs_cluster.membership.static import StaticMembership
from cachefs_cluster.membership.store import RecordStore
from cachefs_cluster.membership.view import NodeRecord
from cachefs_cluster.section import ClusterSection


def open_membership(section: ClusterSection, state_dir: Path, memory: int, ssd: int) -> Membership:
    """Return the membership of a node in a cluster, before its `start`.

    memory, ssd: bytes that the node's tiers may take.

    Raises ConfigError.
    """
    record = make_own_record(section, load_identity(state_dir), memory, ssd)
    if section.membership == "static":
        return StaticMembership(section, record)
    store = _etcd_store(section, record) if section.membership == "etcd" else _kubernetes_store(section, record)
    return SharedMembership(store, record, section.grace, state_dir)


# Each function imports only what its kind needs.


def _kubernetes_store(section: ClusterSection, record: NodeRecord) -> RecordStore:
    from cachefs_cluster.membership.kubernetes import KubernetesStore
    from cachefs_cluster.membership.kubernetes_api import pod_settings

    return KubernetesStore(pod_settings(section.namespace), section.cluster, record.id)


def _etcd_store(section: ClusterSection, record: NodeRecord) -> RecordStore:
    from cachefs_cluster.membership.etcd import EtcdStore
    from cachefs_cluster.membership.etcd_client import EtcdSettings

    settings = EtcdSettings(
        section.etcd,
        section.etcd_user,
        section.etcd_password_file,
        section.etcd_ca,
        section.etcd_cert,
        section.etcd_key,
    )
    return EtcdStore(settings, section.key_prefix, record.id)
