"""Consumers of one job, on whichever nodes, that read one dataset together."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cachefs.job_messages import MAX_JOB_NAME
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_daemon.consumer_checks import MOST_OWNER
from cachefs_daemon.sharing.sections import ConsumerFacts

# What the name of a consumer begins with that is called by its rank, or by its process where it has none.
_OWN: Final = re.compile(r"(\d+|pid-\d+)")
# Job, snapshot, loader, sample map (empty where each consumer has one of its own) and sampler.
Key = tuple[str, str, str, str, SamplerSpec | None]


@dataclass(frozen=True, slots=True)
class Member:
    """One consumer of a group."""

    # Id of its node.
    node: str
    facts: ConsumerFacts


@dataclass(frozen=True, slots=True)
class Group:
    """Consumers that go through their epochs together: their samplers differ in nothing but the rank, or each publishes
    the orders of its epochs."""

    # The job's full name.
    job: str
    # Id of the snapshot.
    snapshot: str
    # Which loader of the job it is, as the names of consumers say after the rank; empty: the first one.
    loader: str
    # The sampler, as that of rank 0; None where orders are published one by one. Of the epochs that the members say,
    # the fewest: a rank that has begun later may count more.
    spec: SamplerSpec | None
    # In order of ranks, nodes and names.
    members: tuple[Member, ...]

    @property
    def key(self) -> Key:
        """What it is known by while consumers come and go."""
        sampler = replace(self.spec, epochs=1) if self.spec is not None else None
        return self.job, self.snapshot, self.loader, "" if sampler is None else self.members[0].facts.map, sampler

    @property
    def loads(self) -> tuple[str, str, str]:
        """Which loader it is of which job, and what it reads, whatever its sampler."""
        return self.job, self.snapshot, self.loader

    @property
    def name(self) -> str:
        """The job's, and which loader of it, as it is told and kept: of 160 characters at most."""
        return f"{self.job}{self.loader}"[: MAX_JOB_NAME + MOST_OWNER]

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes of its consumers."""
        return {member.node for member in self.members}

    @property
    def maps(self) -> tuple[str, ...]:
        """Digests of the members' sample maps, each once; empty for all files."""
        return tuple(sorted({member.facts.map for member in self.members}))

    @property
    def readers(self) -> tuple[tuple[str, str, int], ...]:
        """Who reads: node, consumer and rank of each member. Orders come and go meanwhile."""
        return tuple((member.node, member.facts.consumer, _rank(member.facts)) for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Is each share of the samples read by exactly one consumer that is known?"""
        ranks = [_rank(member.facts) for member in self.members]
        if self.spec is not None:
            shares = self.spec.replicas
        else:
            sizes = {member.facts.world_size for member in self.members}
            shares = sizes.pop() if len(sizes) == 1 else 0
        # Whoever publishes a job says how many replicas it has: up to billions.
        return len(ranks) == shares and sorted(ranks) == list(range(len(ranks)))


def groups_of(facts: Mapping[str, Iterable[ConsumerFacts]]) -> list[Group]:
    """facts: by node id, what is known of its consumers. In the same order on all nodes that know the same."""
    found: dict[Key, list[Member]] = {}
    for node, consumers in facts.items():
        for one in consumers:
            found.setdefault(_key(one), []).append(Member(node, one))
    groups = []
    for (job, snapshot, loader, _, sampler), members in found.items():
        epochs = min((one.facts.spec.epochs for one in members if one.facts.spec is not None), default=0)
        spec = replace(sampler, epochs=epochs) if sampler is not None else None
        groups.append(Group(job, snapshot, loader, spec, tuple(sorted(members, key=_order))))
    return sorted(groups, key=lambda group: (*group.key[:4], repr(group.spec)))


def _key(facts: ConsumerFacts) -> Key:
    named = _OWN.match(facts.consumer)
    loader = facts.consumer[named.end() :] if named else ""
    if facts.spec is None or facts.spec.kind == "explicit":
        return facts.job, facts.snapshot, loader, "", None
    return facts.job, facts.snapshot, loader, facts.map, replace(facts.spec, rank=0, epochs=1)


def _rank(facts: ConsumerFacts) -> int:
    return facts.spec.rank if facts.spec is not None and facts.spec.kind != "explicit" else facts.rank


def _order(member: Member) -> tuple[int, str, str]:
    return _rank(member.facts), member.node, member.facts.consumer
