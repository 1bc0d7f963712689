import contextlib
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs_cluster.sharing.blobs import pack, unpack
from cachefs_cluster.sharing.peer_http import PeerFailed
from cachefs_cluster.sharing.sections import CONSUMERS, ConsumerFacts, OrderRef
from tests import virtual_time
from tests.sharing import sharing_nodes
from tests.waiting import until_async


@given(st.binary(max_size=400), st.sampled_from([1, 4]))
def test_what_is_packed_comes_back(raw: bytes, width: int) -> None:
    raw = raw[: len(raw) // width * width]
    assert unpack(pack(raw, width), len(raw)) == raw
    for size in (len(raw) + width, len(raw) - width):
        with pytest.raises(ValueError, match="it "):
            unpack(pack(raw, width), size)


@given(st.binary(max_size=100), st.integers(0, 100))
def test_what_was_not_packed_is_refused(raw: bytes, size: int) -> None:
    with contextlib.suppress(ValueError):
        assert len(unpack(raw, size)) == size


def test_a_bomb_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="does not have"):
        unpack(b"\x01" + zlib.compress(bytes(100 << 20), 9), 1000)


def test_an_order_is_had_when_it_is_needed_and_checked() -> None:
    async def scenario() -> None:
        async with sharing_nodes(2) as (first, second):
            order = np.random.default_rng(0).permutation(5000).astype(np.uint32)
            digest, size = await first.blobs.add_blob(lambda: order.data, 4)
            assert size == 20_000
            refs = [OrderRef(3, digest, 5000), OrderRef(4, "0" * 32, 5000)]
            facts = ConsumerFacts(job="j", consumer="0", dataset="d", snapshot="0" * 32, orders=refs)
            first.shared.publish(CONSUMERS, "j/0", facts)
            await until_async(second.consumers.remote_consumers)
            (remote,) = second.consumers.remote_consumers()
            (own,) = first.consumers.own_consumers()
            for consumer in (remote, own):
                found = await consumer.fetch_order(3)
                assert found is not None
                assert found.dtype == np.uint32
                assert np.array_equal(found, order)
                assert await consumer.fetch_order(9) is None
                assert (await consumer.fetch_sample_map()).kind == "tree"
            with pytest.raises(PeerFailed, match="404"):
                await remote.fetch_order(4)
            with pytest.raises(PeerFailed):  # of another size than it says
                await second.blobs.fetch_blob(first.record.id, digest, 16_000)
            order[0] += 1  # it is not what was promised any more
            first.blobs.keep_only([digest])
            first.blobs._packed.clear()
            with pytest.raises(PeerFailed, match="other bytes"):
                await second.blobs.fetch_blob(first.record.id, digest, 20_000)
            first.blobs.keep_only([])
            with pytest.raises(PeerFailed, match="404"):
                await second.blobs.fetch_blob(first.record.id, digest, 20_000)

    virtual_time.run(scenario())
