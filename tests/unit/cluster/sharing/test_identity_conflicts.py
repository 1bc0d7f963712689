"""Two daemons with the name of one node."""

import asyncio
import logging

import pytest

from cachefs_cluster.sharing.identity_conflicts import REMARK_SECONDS, IdentityConflicts
from cachefs_cluster.sharing.sections import MOUNTED, MountedDataset
from cachefs_daemon.runtime.threads import Threads
from tests import virtual_time
from tests.sharing import SharingNode, node_record
from tests.waiting import until_async

FIRST, SECOND = (f"{number:016x}" for number in (1, 2))
NODE = node_record(5)


def test_a_start_after_another_is_no_claim_and_two_that_take_turns_are(caplog: pytest.LogCaptureFixture) -> None:
    claims = IdentityConflicts()
    for number in range(20):  # it starts again and again
        for _ in range(3):
            claims.note_request(NODE, f"{number + 10:016x}", "10.0.0.1", float(number))
    claims.note_request(NODE, "", "10.0.0.1", 20.0)
    assert not list(claims.remarks(20.0))
    for now in (30.0, 31.0, 32.0):
        claims.note_request(NODE, FIRST, "10.0.0.1", now)
        claims.note_request(NODE, SECOND, "10.0.0.9", now)
    [remark] = claims.remarks(33.0)
    assert remark.startswith("two daemons claim to be node node-5, at 10.0.0.1 and at 10.0.0.9;")
    assert caplog.text.count("two daemons") == 1
    assert not list(claims.remarks(33.0 + REMARK_SECONDS)), "one of them is gone"


def test_both_hear_what_is_new_and_others_say_that_there_are_two(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        threads = Threads()
        told = SharingNode(node_record(1), threads)
        twins = [SharingNode(node_record(2, incarnation=number), threads) for number in (7, 8)]
        try:
            for node in (told, *twins):
                await node.start()
            for twin in twins:
                twin.meet(told)
            told.meet(twins[0])
            for number in range(4):
                told.shared.publish(MOUNTED, "data", MountedDataset(f"/mnt/{number}"))
                for twin in twins:
                    await until_async(
                        lambda twin=twin, number=number: (
                            (value := twin.shared.remote_value(MOUNTED, told.record.id, "data")) is not None
                            and value.mountpoint == f"/mnt/{number}"
                        )
                    )
            assert list(told.shared.identity_conflicts.remarks(asyncio.get_running_loop().time()))
            assert "give each machine its own" in caplog.text
            # Without news neither of them ends the other's poll.
            answers = [twin.shared._followers[told.record.id].response_count for twin in twins]
            await asyncio.sleep(0.5)
            assert [twin.shared._followers[told.record.id].response_count for twin in twins] == answers
        finally:
            for node in (told, *twins):
                await node.shared.stop()
            threads.close()

    virtual_time.run(scenario())
