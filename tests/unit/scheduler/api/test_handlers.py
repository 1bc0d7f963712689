"""Long answers let others have the event loop between two nodes, datasets or copies."""

import asyncio

import msgspec
import pytest

from cachefs.scheduling_messages import NodesStatus, ScaleRequest
from cachefs_scheduler.api import handlers
from cachefs_scheduler.api.handlers import ApiHandlers
from tests import virtual_time
from tests.unit.scheduler.duties.viewed import Duties


@pytest.fixture
def duties(monkeypatch: pytest.MonkeyPatch) -> Duties:
    monkeypatch.setattr(handlers, "WORK_SECONDS", 0.0)
    found = Duties()
    for number in range(20):
        found.say(f"n{number}", {"a": 1.0 if number < 2 else 0.0, "b": 0.5})
    return found


def test_nodes_are_said_as_one_message(duties: Duties) -> None:
    async def said() -> tuple[bytes, bytes]:
        answers = ApiHandlers(duties.view, duties.advisor, duties.warmings)
        return await answers.nodes(""), await answers.nodes("a")

    everything, one = (msgspec.json.decode(found, type=NodesStatus) for found in virtual_time.run(said()))
    assert [node.name for node in everything.nodes] == sorted(duties.view.nodes)
    assert {part.dataset for node in everything.nodes for part in node.datasets} == {"a", "b"}
    assert [node.name for node in one.nodes if node.datasets] == ["n0", "n1"]


@pytest.mark.parametrize("what", ["nodes", "policies", "scale"])
def test_others_have_their_turn_meanwhile(duties: Duties, what: str) -> None:
    async def turns() -> int:
        answers = ApiHandlers(duties.view, duties.advisor, duties.warmings)
        count = 0

        async def another() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        other = asyncio.create_task(another())
        if what == "nodes":
            await answers.nodes("")
        elif what == "policies":
            await answers.policies("")
        else:
            await answers.scale(ScaleRequest(dataset="a", copies=6))
        other.cancel()
        await duties.warmings.close()
        return count

    assert asyncio.run(turns()) >= {"nodes": 19, "policies": 1, "scale": 3}[what]


def test_a_node_that_goes_meanwhile_is_left_out(duties: Duties) -> None:
    async def said() -> bytes:
        answers = ApiHandlers(duties.view, duties.advisor, duties.warmings)
        asked = asyncio.create_task(answers.nodes(""))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        del duties.view.nodes["n9"]
        return await asked

    assert "n9" not in {node.name for node in msgspec.json.decode(virtual_time.run(said()), type=NodesStatus).nodes}
