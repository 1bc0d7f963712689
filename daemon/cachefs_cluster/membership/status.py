"""The cluster's state in the form that cachectl shows."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from cachefs.cluster_messages import ClusterStatus, MemberStatus, NodeCounters, PeerTraffic, ScaleNode
from cachefs.formatting import format_names
from cachefs.messages import ClusterBrief
from cachefs_cluster.membership.view import ClusterView
from cachefs_cluster.section import ClusterSection

# Most nodes that a remark names.
_MAX_SHOWN: Final = 5

# Returns what this node and the node of an id have exchanged.
Traffic = Callable[[str], PeerTraffic]


def no_traffic(_: str) -> PeerTraffic:
    """Return the traffic of a node that exchanges nothing."""
    return PeerTraffic()


def cluster_status(
    view: ClusterView, section: ClusterSection, traffic: Traffic, counters: Mapping[str, NodeCounters]
) -> ClusterStatus:
    """Return the whole status. counters: by id, of the nodes that were asked."""
    shares = view.home_shares()
    return ClusterStatus(
        name=section.cluster if section.enabled else "",
        source=view.source,
        me=view.me,
        epoch=view.epoch,
        age=time.monotonic() - view.since,
        problem=view.problem,
        remarks=[*view.remarks(), *_differences(view, section, counters)],
        replicas=section.replicas,
        grace=section.grace,
        members=[
            MemberStatus(
                id=record.id,
                incarnation=record.incarnation,
                name=record.name,
                host=record.host,
                rails=list(record.hosts[1:]),
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


def _differences(view: ClusterView, section: ClusterSection, counters: Mapping[str, NodeCounters]) -> Iterator[str]:
    """Yield a line for each setting that differs on other nodes, though all should have the same."""
    for key in ("replicas", "grace"):
        mine = getattr(section, key)
        others = defaultdict(list)
        for record in view.others:
            value = getattr(counters.get(record.id), key, 0)
            if value and value != mine:
                others[value].append(record.name)
        for value, names in sorted(others.items()):
            shown = format_names(sorted(names), _MAX_SHOWN)
            yield f"cluster.{key} is {mine:g} here, and {value:g} on {shown}; make it the same on all nodes"


def cluster_brief(view: ClusterView, section: ClusterSection) -> ClusterBrief:
    """Return a summary of the status."""
    return ClusterBrief(
        name=section.cluster if section.enabled else "",
        source=view.source,
        epoch=view.epoch,
        states=dict(Counter(record.state for record in view.members)),
        problem=view.problem,
    )


def scaled_nodes(view: ClusterView, counters: Mapping[str, NodeCounters]) -> list[ScaleNode]:
    """Return the nodes that count for placement, ordered by name. counters: by id, of the nodes that responded."""
    found = []
    for record in sorted(view.placed_members, key=lambda record: (record.name, record.id)):
        counted = counters.get(record.id, NodeCounters(problem="it was not queried"))
        found.append(
            ScaleNode(
                record.name,
                sum(tier.limit for tier in counted.tiers) or record.memory + record.ssd,
                sum(tier.used for tier in counted.tiers),
                counted.problem,
            )
        )
    return found
