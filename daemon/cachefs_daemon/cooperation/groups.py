"""Consumers of one job, on whichever nodes, that read one dataset together."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_daemon.sharing.sections import ConsumerFacts


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group."""

    # Id of its node.
    node: str
    facts: ConsumerFacts


@dataclass(frozen=True, slots=True)
class Group:
    """Consumers whose samplers differ in nothing but the rank, and who mean the same by a sample."""

    # The job's full name.
    job: str
    # Id of the snapshot.
    snapshot: str
    # Digest of the sample map; empty: all files.
    map: str
    # The sampler, as that of rank 0; None where orders are published one by one.
    spec: SamplerSpec | None
    # In order of ranks, nodes and names.
    members: tuple[Member, ...]

    @property
    def key(self) -> tuple[str, str, str, SamplerSpec | None]:
        """What it is known by while consumers come and go."""
        return self.job, self.snapshot, self.map, self.spec

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes of its consumers."""
        return {member.node for member in self.members}

    @property
    def is_whole(self) -> bool:
        """Is each share of the samples read by exactly one consumer that is known?"""
        if self.spec is None:
            return False
        ranks = [member.facts.spec.rank for member in self.members if member.facts.spec is not None]
        # Whoever publishes a job says how many replicas it has: up to billions.
        return len(ranks) == self.spec.replicas and sorted(ranks) == list(range(len(ranks)))


def groups_of(facts: Mapping[str, Iterable[ConsumerFacts]]) -> list[Group]:
    """facts: by node id, what is known of its consumers. In the same order on all nodes that know the same."""
    found: dict[tuple[str, str, str, SamplerSpec | None], list[Member]] = {}
    for node, consumers in facts.items():
        for one in consumers:
            spec = one.spec
            common = replace(spec, rank=0) if spec is not None and spec.kind != "explicit" else None
            found.setdefault((one.job, one.snapshot, one.map, common), []).append(Member(node, one))
    groups = [Group(*key, tuple(sorted(members, key=_order))) for key, members in found.items()]
    return sorted(groups, key=lambda group: (group.job, group.snapshot, group.map, repr(group.spec)))


def _order(member: Member) -> tuple[int, str, str]:
    facts = member.facts
    return facts.spec.rank if facts.spec is not None else facts.rank, member.node, facts.consumer
