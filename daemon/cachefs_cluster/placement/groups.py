"""Groups the consumers of one job, on any nodes, that read one dataset together."""

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from cachefs.job_messages import MAX_JOB_NAME
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_cluster.sharing.sections import ConsumerFacts
from cachefs_daemon.consumer_checks import MAX_OWNER

# Rank, or process id where there is none, at the start of a consumer's name.
_RANK_PREFIX: Final = re.compile(r"(\d+|pid-\d+)")
# Job, snapshot, loader, sample map (empty if each consumer has its own) and sampler.
GroupKey = tuple[str, str, str, str, SamplerSpec | None]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One consumer of a group."""

    # Id of its node.
    node: str
    facts: ConsumerFacts


@dataclass(frozen=True)
class ConsumerGroup:
    """Consumers that go through their epochs together: their samplers differ only in the rank, or each publishes its
    orders epoch by epoch."""

    # Full name of the job.
    job: str
    # Id of the snapshot.
    snapshot: str
    # The loader within the job, as named after the rank in the names of consumers; empty: the first one.
    loader: str
    # The sampler of rank 0; None if orders are published one by one. Its number of epochs is the smallest among the
    # members: a rank that began later may count more.
    spec: SamplerSpec | None
    # Ordered by rank, node and name.
    members: tuple[GroupMember, ...]

    @property
    def key(self) -> GroupKey:
        """Identity of the group while consumers come and go."""
        sampler = replace(self.spec, epochs=1) if self.spec is not None else None
        return self.job, self.snapshot, self.loader, "" if sampler is None else self.members[0].facts.map, sampler

    @cached_property
    def digest(self) -> str:
        """Digest of the identity, as published: 16 hex digits."""
        return _digest(self.key)

    @cached_property
    def readers_digest(self) -> str:
        """Digest of `reader_ids`: 16 hex digits."""
        return _digest(self.reader_ids)

    @property
    def loader_key(self) -> tuple[str, str, str]:
        """Identity of the loader and of the snapshot it reads, whatever its sampler."""
        return self.job, self.snapshot, self.loader

    @property
    def name(self) -> str:
        """Name of the job and loader, as published and stored: at most 160 characters."""
        return f"{self.job}{self.loader}"[: MAX_JOB_NAME + MAX_OWNER]

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes of its consumers."""
        return {member.node for member in self.members}

    @property
    def maps(self) -> tuple[str, ...]:
        """Distinct digests of the members' sample maps; empty for all files."""
        return tuple(sorted({member.facts.map for member in self.members}))

    @property
    def reader_ids(self) -> tuple[tuple[str, str, int], ...]:
        """Node, consumer and rank of each member, without the orders, which come and go."""
        return tuple((member.node, member.facts.consumer, _rank(member.facts)) for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether each share of the samples is read by exactly one known consumer."""
        ranks = [_rank(member.facts) for member in self.members]
        if self.spec is not None:
            shares = self.spec.replicas
        else:
            sizes = {member.facts.world_size for member in self.members}
            shares = sizes.pop() if len(sizes) == 1 else 0
        # The number of replicas is untrusted input, up to billions: do not build a list of that length.
        return len(ranks) == shares and sorted(ranks) == list(range(len(ranks)))


def _digest(identity: Hashable) -> str:
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()


def groups_of(facts: Mapping[str, Iterable[ConsumerFacts]]) -> list[ConsumerGroup]:
    """Return the groups of consumers, in the same order on all nodes with the same facts. facts: by node id."""
    found: dict[GroupKey, list[GroupMember]] = {}
    for node, consumers in facts.items():
        for one in consumers:
            found.setdefault(_key_of(one), []).append(GroupMember(node, one))
    groups = []
    for (job, snapshot, loader, _, sampler), members in found.items():
        epochs = min((one.facts.spec.epochs for one in members if one.facts.spec is not None), default=0)
        spec = replace(sampler, epochs=epochs) if sampler is not None else None
        groups.append(ConsumerGroup(job, snapshot, loader, spec, tuple(sorted(members, key=_member_order))))
    return sorted(groups, key=lambda group: (*group.key[:4], repr(group.spec)))


def _key_of(facts: ConsumerFacts) -> GroupKey:
    named = _RANK_PREFIX.match(facts.consumer)
    loader = facts.consumer[named.end() :] if named else ""
    if facts.spec is None or facts.spec.kind == "explicit":
        return facts.job, facts.snapshot, loader, "", None
    return facts.job, facts.snapshot, loader, facts.map, replace(facts.spec, rank=0, epochs=1)


def _rank(facts: ConsumerFacts) -> int:
    return facts.spec.rank if facts.spec is not None and facts.spec.kind != "explicit" else facts.rank


def _member_order(member: GroupMember) -> tuple[int, str, str]:
    return _rank(member.facts), member.node, member.facts.consumer
