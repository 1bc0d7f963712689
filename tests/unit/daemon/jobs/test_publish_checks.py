"""What no plan can be made of is refused as it is published, through the control file or the socket, in one line."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from cachefs.job_messages import JobPublication, SampleMap
from cachefs.mount.control.calls import PublishLine, decode_line, translate_line
from cachefs.planning.sequences.sampler import epoch_order
from cachefs.planning.sequences.sampler_spec import KINDS, MAX_EPOCHS, MAX_SAMPLES, TORCH_LIMIT, SamplerSpec
from cachefs_cluster.sharing.sections import CONSUMERS, ConsumerFacts
from cachefs_daemon.consumer_checks import consumer_name
from cachefs_daemon.jobs.publish_checks import check_publication


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"records": "fixed:0"', "record format 'fixed:0': expected a number of bytes from 1 to"),
        ('"records": "fixed:-1"', "record format 'fixed:-1': expected"),
        (f'"records": "fixed:{"9" * 5000}"', "record format 'fixed:999"),
        ('"records": "zip"', "unknown record format 'zip'; known: npy, tar, tfrecord, fixed:<bytes>"),
        ('"records": "tar"', "names no file for its indexer 'tar'"),
        ('"sampler": {"kind": "numpy", "size": 5, "seed": -1}', "sampler seed -1: expected 0 to 4294967295"),
        ('"sampler": {"kind": "numpy", "size": 5, "seed": 4294967295, "epochs": 2}', "sampler seed 4294967295: expe"),
        ('"sampler": {"kind": "torch-random", "size": 5, "replicas": 2}', "sampler replicas 2: torch-random cannot"),
        ('"sampler": {"kind": "fixed", "size": 5}', "sampler kind 'fixed': expected one of sequential, torch-random"),
    ],
)
def test_a_line_of_the_control_file_that_has_no_plan_is_refused(fields: str, said: str) -> None:
    line = f'{{"op": "publish", "job": "j", {fields}}}'.encode()
    publish = decode_line(line)
    assert isinstance(publish, PublishLine)
    request = translate_line(publish, {"tree": "snapshot"}).request
    assert isinstance(request, JobPublication)
    with pytest.raises(ConfigError) as refused:
        check_publication(request)
    assert str(refused.value).startswith("job j: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("sample_map", "said"),
    [
        (SampleMap(kind="files", entries=b"abc"), "entries of the sample map have 3 bytes: expected 4 per sample"),
        (SampleMap(kind="records", offsets=b"abc"), "offsets of the sample map have 3 bytes: expected 8"),
        (SampleMap(kind="records", entries=b"1234"), "1 entries, 0 offsets and 0 lengths"),
        (SampleMap(kind="zip"), "sample map 'zip': expected one of tree, files, records"),
    ],
)
def test_a_map_that_has_no_plan_is_refused(sample_map: SampleMap, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_publication(JobPublication(job="j", dataset="d", map=sample_map))


_EDGES = [-(2**63), -1, 0, 1, 2, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64]


@given(
    kind=st.sampled_from([*KINDS, "other"]),
    size=st.one_of(st.integers(-1, 20), st.sampled_from([TORCH_LIMIT, MAX_SAMPLES + 1])),
    seed=st.one_of(st.integers(), st.sampled_from(_EDGES)),
    epochs=st.sampled_from([-1, 0, 1, 3, MAX_EPOCHS, MAX_EPOCHS + 1]),
    shuffle=st.booleans(),
    replicas=st.integers(-1, 4),
    rank=st.integers(-1, 4),
)
@example(kind="numpy", size=5, seed=2**32 - 3, epochs=3, shuffle=True, replicas=1, rank=0)
@example(kind="numpy", size=5, seed=2**32 - 2, epochs=3, shuffle=True, replicas=1, rank=0)
@example(kind="torch-distributed", size=5, seed=2**64 - 3, epochs=3, shuffle=True, replicas=2, rank=1)
@example(kind="torch-random", size=5, seed=10**5000, epochs=3, shuffle=True, replicas=1, rank=0)
def test_each_epoch_of_a_sampler_that_is_not_refused_has_an_order(
    kind: str, size: int, seed: int, epochs: int, shuffle: bool, replicas: int, rank: int
) -> None:
    spec = SamplerSpec(
        kind=kind, size=size, seed=seed, epochs=epochs, shuffle=shuffle, replicas=replicas, rank=rank
    )  # fmt: skip
    refused = None
    try:
        spec.check()
    except ConfigError as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith("sampler ")
        assert "\n" not in refused
    elif kind != "explicit" and size <= 20:
        for epoch in {0, epochs - 1}:
            order = epoch_order(spec, epoch)
            assert not len(order) or int(order.max()) < size


@given(
    rank=st.sampled_from(_EDGES),
    world=st.sampled_from(_EDGES),
    workers=st.sampled_from(_EDGES),
    batch=st.sampled_from(_EDGES),
    prefetch=st.sampled_from(_EDGES),
    consumer=st.one_of(st.text(max_size=5), st.just("c" * 257)),
    job=st.sampled_from(["j", "j~1000", "j~control", "a/b", "", "j" * 129, "j~"]),
)
@example(rank=0, world=2**33, workers=0, batch=1, prefetch=0, consumer="0", job="j")
def test_what_a_daemon_takes_from_a_job_other_daemons_take_from_it(
    rank: int, world: int, workers: int, batch: int, prefetch: int, consumer: str, job: str
) -> None:
    request = JobPublication(
        job=job, dataset="d", consumer=consumer, rank=rank, world_size=world, workers=workers, batch_size=batch,
        prefetch=prefetch,
    )  # fmt: skip
    try:
        check_publication(request)
    except ConfigError:
        return
    facts = ConsumerFacts(
        job=job, consumer=consumer, dataset="d", snapshot="0" * 32, rank=rank, world_size=world, workers=workers,
        batch_size=batch, prefetch=prefetch,
    )  # fmt: skip
    name = consumer_name(job, consumer)
    assert CONSUMERS.decode(name, CONSUMERS.encode(facts)) == facts
