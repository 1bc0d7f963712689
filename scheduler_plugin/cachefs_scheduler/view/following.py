"""Follows all daemons: finds them through any one, and has a long poll waiting at each."""

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Final

from cachefs.observe_messages import Member
from cachefs_scheduler.view.asking import Asking, NodeFailed
from cachefs_scheduler.view.cluster_view import ClusterView
from cachefs_scheduler.view.node_state import NodeState

log = logging.getLogger(__name__)

# Seconds between two looks at who is a member, and that a poll waits for news.
MEMBERS_SECONDS: Final = 10.0
WAIT_SECONDS: Final = 25.0
# Answers that this service takes in a second from all nodes together: each takes it a millisecond.
ANSWERS: Final = 200
# Seconds between two tries at a node that does not answer.
FIRST_RETRY: Final = 1.0
LAST_RETRY: Final = 30.0
# Daemons that are asked for members at once: those of the configuration, and where none answers, some that are known.
_ASKED: Final = 16


class Following:
    """Used on the event loop."""

    def __init__(self, view: ClusterView, asking: Asking, seeds: Sequence[tuple[str, int]]) -> None:
        """seeds: hosts and control ports of daemons to begin with."""
        self._view = view
        self._asking = asking
        self._seeds = list(seeds)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by name of the node
        self._silent = False

    async def run(self) -> None:
        """Runs as long as the service."""
        try:
            while True:
                await self._find()
                await asyncio.sleep(MEMBERS_SECONDS if self._view.nodes else FIRST_RETRY)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _find(self) -> None:
        """Ask who is a member. Nodes may be of several clusters: each seed tells of its own."""
        heard = [node for node in self._view if not node.problem and node.report is not None]
        asked = [*self._seeds, *((node.host, node.control_port) for node in random.sample(heard, min(3, len(heard))))]
        answers = await asyncio.gather(
            *(self._asking.members(host, port) for host, port in dict.fromkeys(asked[: _ASKED + len(self._seeds)])),
            return_exceptions=True,
        )
        members: dict[str, Member] = {}
        problems = []
        for answer in answers:
            if isinstance(answer, NodeFailed):
                problems.append(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for member in answer.members:
                    known = members.get(member.id)
                    if known is None or known.state == "away":
                        members[member.id] = member
        if members:
            self._silent = False
            self._view.meet(members)
        elif not self._silent:
            self._silent = True
            log.warning("no daemon says who is a member: %s", "; ".join(dict.fromkeys(problems))[:500])
        self._follow_all()

    def _follow_all(self) -> None:
        known = {node.name: node for node in self._view}
        for name in self._tasks.keys() - known.keys():
            self._tasks.pop(name).cancel()
        for name, node in known.items():
            task = self._tasks.get(name)
            if task is None or task.done():
                self._tasks[name] = asyncio.create_task(self._follow(node), name=f"follow {name}")

    async def _follow(self, node: NodeState) -> None:
        pause = max(1.0, len(self._view.nodes) / ANSWERS)
        await asyncio.sleep(random.uniform(0, pause - 1))
        retry = FIRST_RETRY
        while True:
            pause = max(1.0, len(self._view.nodes) / ANSWERS)
            try:
                known = node.report if node.heard is not None and not node.problem else None
                report = await self._asking.report(node.host, node.control_port, known, WAIT_SECONDS, pause)
                if report.id and node.id and report.id != node.id:
                    raise NodeFailed(f"node {report.id[:32]} answers at its address, not {node.id}")
                self._view.take(node, report)
                retry = FIRST_RETRY
            except (NodeFailed, ValueError) as error:
                self._view.failed(node, str(error))
                await asyncio.sleep(retry * random.uniform(0.7, 1.0))
                retry = min(2 * retry, LAST_RETRY)
