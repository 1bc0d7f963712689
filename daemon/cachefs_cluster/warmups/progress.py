"""The progress of a warm-up of the cluster: the sum over the nodes that keep its blocks, and the node that is behind.

Decides nothing but what follows from published facts and parts, so all nodes show the same.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from cachefs.formatting import format_duration, format_names
from cachefs.messages import WarmupNode, WarmupProgress
from cachefs_cluster.sharing.sections import MAX_WARMUP_TEXT, WarmupFacts, WarmupPart, WarmupTotals
from cachefs_daemon.content.warmup import WarmupState

# Nodes that a message lists or names.
MAX_NODES: Final = 1024
MAX_NAMED: Final = 5
# A node is behind if its share of its part is by so much below that of the median node.
BEHIND: Final = 0.1


@dataclass(frozen=True, slots=True)
class PartOwner:
    """A node that keeps blocks of a warm-up."""

    id: str
    name: str
    # Why it cannot be asked now; "" where it can.
    away_reason: str = ""


@dataclass(frozen=True, slots=True)
class WarmupScene:
    """The state of a warm-up at one moment, as far as a node knows it."""

    owners: Sequence[PartOwner]
    # By id of the node: what it has published, or this node's own part.
    parts: Mapping[str, WarmupPart]
    # Digest of the owners, and the snapshot: parts that name others are out of date.
    key: tuple[str, str]
    # Bytes and blocks of all parts together; 0 while unknown.
    expected: tuple[int, int] = (0, 0)

    def current_part(self, node: str) -> WarmupPart | None:
        """Return the node's part; None where nothing is known of it, or it is of other owners or another snapshot."""
        part = self.parts.get(node)
        if part is None or part.ring != self.key[0]:
            return None
        return part if part.snapshot in (self.key[1], "") else None  # "": the node waits for the dataset, or gave up

    def totals(self) -> WarmupTotals:
        """Return the sum over all current parts."""
        columns = zip(
            *(msgspec.structs.astuple(part.totals) for one in self.owners if (part := self.current_part(one.id))),
            strict=True,
        )
        total = WarmupTotals(*map(sum, columns))
        size, blocks = self.expected
        return msgspec.structs.replace(
            total, bytes_total=max(total.bytes_total, size), blocks_total=max(total.blocks_total, blocks)
        )

    def unfinished(self) -> list[PartOwner]:
        """Return the nodes whose parts are not done, or not known. A node that is away may have lost its part."""
        return [one for one in self.owners if one.away_reason or not self._is_done(one)]

    def silent(self) -> list[PartOwner]:
        """Return the nodes that can be asked, and of whose parts nothing is known."""
        return [one for one in self.owners if not one.away_reason and self.current_part(one.id) is None]

    def _is_done(self, owner: PartOwner) -> bool:
        part = self.current_part(owner.id)
        return part is not None and part.state == "done"


def merge(one: WarmupFacts, other: WarmupFacts) -> WarmupFacts:
    """Return what both versions of a warm-up's facts say together, in either order: the first end counts, and the first
    start."""
    ends = [facts for facts in (one, other) if facts.ended]
    if ends:
        return min(ends, key=lambda facts: (facts.ended, facts.state, facts.message, msgspec.msgpack.encode(facts)))
    return min(one, other, key=lambda facts: facts.started or float("inf"))


def summarise(number: int, facts: WarmupFacts, scene: WarmupScene, now: float) -> WarmupProgress:
    """Return the progress of a warm-up. now: Unix time in seconds."""
    totals = facts.totals if facts.ended else scene.totals()
    state = facts.state or (WarmupState.RUNNING if facts.started else WarmupState.WAITING)
    is_running = bool(facts.started) and not facts.ended
    return WarmupProgress(
        id=number,
        state=state,
        blocks=totals.blocks,
        blocks_total=totals.blocks_total,
        bytes=totals.bytes,
        bytes_total=totals.bytes_total,
        skipped=totals.skipped,
        failed=totals.failed,
        message=facts.message,
        dataset=facts.dataset,
        cluster=True,
        at=facts.at,
        before=facts.before,
        holds=facts.holds,
        reason=_reason_behind(scene) if is_running else _reason_waiting(facts, now),
        nodes=[_node(one, scene) for one in scene.owners[:MAX_NODES]] if is_running else [],
    )


def _node(owner: PartOwner, scene: WarmupScene) -> WarmupNode:
    part = scene.current_part(owner.id)
    if part is None:
        reason = owner.away_reason or "it has not told yet what it lacks"
        return WarmupNode(name=owner.name, state="missing", reason=reason)
    totals = msgspec.structs.asdict(part.totals)
    return WarmupNode(name=owner.name, state=part.state, reason=owner.away_reason or part.reason, **totals)


def _reason_waiting(facts: WarmupFacts, now: float) -> str:
    if facts.ended or facts.started:
        return ""
    if facts.before:
        return f"it waits until job {facts.before} publishes what it reads; no node has seen it for {_ago(facts, now)}"
    return f"it begins in {format_duration(max(0.0, facts.at - now))}"


def _ago(facts: WarmupFacts, now: float) -> str:
    return format_duration(max(0.0, now - facts.begun))


def _reason_behind(scene: WarmupScene) -> str:
    """Return which node is behind and why; "" where all go on alike."""
    unfinished = [(one, scene.current_part(one.id)) for one in scene.unfinished()]
    for owner, part in unfinished:
        if owner.away_reason:
            return f"{owner.name} {owner.away_reason}"
        if part is not None and part.state == "waiting":
            return f"{owner.name} waits: {part.reason}"
    shares = {one.id: _share(part) for one in scene.owners if (part := scene.current_part(one.id)) is not None}
    median = statistics.median(shares.values()) if shares else 0.0
    last = min((one for one, part in unfinished if part is not None), key=lambda one: shares[one.id], default=None)
    if last is not None and shares[last.id] < median - BEHIND:
        part = scene.current_part(last.id)
        why = f": {part.reason}" if part is not None and part.reason else ""
        return f"{last.name} is behind, with {100 * shares[last.id]:.0f} % of its part{why}"
    silent = [one.name for one, part in unfinished if part is None]
    if silent and len(silent) < len(scene.owners):
        return f"not known yet of {format_names(sorted(silent), MAX_NAMED)}: what is missing there"
    reasons = [(one.name, part.reason) for one, part in unfinished if part is not None and part.reason]
    return f"{reasons[0][0]}: {reasons[0][1]}" if reasons else ""


def _share(part: WarmupPart) -> float:
    return 1.0 if part.state == "done" else part.totals.bytes / max(1, part.totals.bytes_total)


def end_message(scene: WarmupScene) -> str:
    """Return what an ended warm-up could not do, and on which nodes; "" where all is there or had no room."""
    lines = []
    if silent := sorted(one.name for one in scene.silent()):
        lines.append(f"nothing is known of the part of {format_names(silent, MAX_NAMED)}")
    for one in scene.owners:
        part = scene.current_part(one.id)
        if part is not None and part.totals.failed:
            lines.append(f"{one.name}: {part.reason or 'blocks could not be fetched'}")
    return one_line("; ".join(lines))


def one_line(text: str) -> str:
    """Return the text as it may be published."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:MAX_WARMUP_TEXT]
