"""What jobs say on the wire: a sampler spec is a map of its fields, and unknown fields are ignored."""

import msgspec

import cachefs
from cachefs.job_messages import JobPublication
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.publishing.published_consumer import decode_spec

SPEC = SamplerSpec(kind="numpy", size=9, seed=2)
FIELDS = {
    "kind": "numpy",
    "size": 9,
    "seed": 2,
    "epochs": 1,
    "shuffle": True,
    "drop_last": False,
    "replicas": 1,
    "rank": 0,
}


def test_a_sampler_spec_travels_as_a_map_of_its_fields() -> None:
    request = JobPublication(job="j", dataset="d", spec=SPEC)
    raw = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(raw)["spec"] == FIELDS
    assert msgspec.msgpack.decode(raw, type=JobPublication) == request
    assert hash(SPEC) == hash(decode_spec(FIELDS))


def test_fields_of_a_newer_side_are_ignored() -> None:
    raw = msgspec.msgpack.encode({"job": "j", "dataset": "d", "spec": {**FIELDS, "colour": "blue"}, "mood": 3})
    assert msgspec.msgpack.decode(raw, type=JobPublication) == JobPublication(job="j", dataset="d", spec=SPEC)
    assert msgspec.json.decode(b'{"kind": "numpy", "size": 9, "seed": 2, "colour": "blue"}', type=SamplerSpec) == SPEC


def test_the_spec_is_a_public_name() -> None:
    assert cachefs.SamplerSpec is SamplerSpec
