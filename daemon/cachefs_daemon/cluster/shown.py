"""What the daemon tells of its cluster to cachectl."""

import time
from collections import Counter
from collections.abc import Callable, Mapping

from cachefs.cluster_messages import ClusterStatus, MemberStatus, NodeCounters, PeerTraffic
from cachefs.messages import ClusterBrief
from cachefs_daemon.cluster.view import ClusterView
from cachefs_daemon.cluster_section import ClusterSection

# What this node and the node of an id have given each other.
Traffic = Callable[[str], PeerTraffic]


def no_traffic(_: str) -> PeerTraffic:
    """Of a node that exchanges nothing."""
    return PeerTraffic()


def cluster_status(
    view: ClusterView, section: ClusterSection, traffic: Traffic, counters: Mapping[str, NodeCounters]
) -> ClusterStatus:
    """All of it. counters: of those nodes that were asked, by id."""
    shares = view.shares()
    return ClusterStatus(
        name=section.cluster if section.enabled else "",
        source=view.source,
        me=view.me,
        epoch=view.epoch,
        age=time.monotonic() - view.since,
        problem=view.problem,
        remarks=list(view.remarks()),
        replicas=section.replicas,
        grace=section.grace,
        members=[
            MemberStatus(
                id=record.id,
                incarnation=record.incarnation,
                name=record.name,
                host=record.host,
                data_port=record.data_port,
                control_port=record.control_port,
                zone=record.zone,
                state=record.state,
                placing=record.id in shares,
                weight=record.weight,
                share=shares.get(record.id, 0.0),
                memory=record.memory,
                ssd=record.ssd,
                protocol=record.protocol,
                traffic=traffic(record.id),
                counters=counters.get(record.id),
            )
            for record in sorted(view.members, key=lambda record: (record.name, record.id))
        ],
    )


def cluster_brief(view: ClusterView, section: ClusterSection) -> ClusterBrief:
    """A line of it."""
    return ClusterBrief(
        name=section.cluster if section.enabled else "",
        source=view.source,
        epoch=view.epoch,
        states=dict(Counter(record.state for record in view.members)),
        problem=view.problem,
    )
