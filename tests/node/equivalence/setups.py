"""The set-ups: what a job may do with loaders. Each is run with and without `cachefs run`, and has to be the same."""

import copy
import gc
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.node.equivalence import datasets as d

BATCH = 6
SetUp = Callable[[str], None]


def say(*things: Any) -> None:
    print(*things, flush=True)


def read(loader: Any, epochs: int = 2) -> None:
    """Go through the loader, and tell every batch, and what may be seen of the loader meanwhile."""
    for _ in range(epochs):
        iterator = iter(loader)
        say([plain(batch) for batch in iterator])
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        if fetcher is not None:
            say(fetcher.dataset is loader.dataset, type(fetcher).__name__)
        del iterator, fetcher
    say([type(one).__qualname__ for one in (loader.dataset, loader.sampler, loader.batch_sampler)])
    say(sorted(vars(loader)), multiprocessing.get_start_method(allow_none=True))


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(one) for one in batch]


def loader(dataset: Callable[[str], Any], sampler: Callable[[], Any] = lambda: None, **options: Any) -> SetUp:
    """A set-up that goes through one loader."""

    def run(root: str) -> None:
        made = sampler()
        given = {"batch_sampler": made} if isinstance(made, (d.Buckets, list)) else {"sampler": made}
        read(
            DataLoader(
                dataset(root), **{**given, **({} if "batch_sampler" in given else {"batch_size": BATCH})}, **options
            )
        )

    return run


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributed(told: bool) -> SetUp:
    def run(root: str) -> None:
        dataset = d.Listed(root)
        sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
        made: Any = DataLoader(dataset, BATCH, sampler=sampler, num_workers=2)
        for epoch in range(3):
            if told:
                sampler.set_epoch(epoch)
            read(made, 1)

    return run


def own_generators(root: str) -> None:
    one, other = generator(), generator(12)
    read(DataLoader(d.Listed(root), BATCH, shuffle=True, generator=one, num_workers=2))
    read(DataLoader(d.Listed(root), BATCH, sampler=RandomSampler(range(d.FILES), generator=other), generator=one))
    say([hashlib.sha1(bytes(made.get_state())).hexdigest() for made in (one, other)])


def shared_memory(root: str) -> None:
    counter = multiprocessing.Value("q", 0)

    def add() -> int:
        with counter.get_lock():
            counter.value += 1
            return int(counter.value)

    read(DataLoader(d.Hidden(root), BATCH, sampler=d.FromStore(add), num_workers=2), 3)
    say(counter.value)


def store(root: str) -> None:
    made = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
    read(DataLoader(d.Hidden(root), BATCH, sampler=d.FromStore(lambda: made.add("next", 1)), num_workers=1), 3)
    say(made.add("next", 0))


def endless(root: str) -> None:
    for workers in (0, 1):
        iterator = iter(DataLoader(d.Hidden(root), BATCH, sampler=d.Endless(), num_workers=workers))
        say([plain(next(iterator)) for _ in range(30)])


def left(root: str) -> None:
    """Epochs that are left before their end, and begun again."""
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        made: Any = DataLoader(d.Listed(root), BATCH, shuffle=True, **options)  # type: ignore[arg-type]
        for _ in range(3):
            iterator = iter(made)
            say([plain(next(iterator)) for _ in range(3)])
        two = iter(made), iter(made)
        if not options:
            say([plain(next(one)) for one in two for _ in range(3)])
        del iterator, two


def again(root: str) -> None:
    """A loader made anew for every epoch; each has to leave nothing behind."""
    for _ in range(6):
        say([plain(batch) for batch in DataLoader(d.Listed(root), 16, sampler=d.OneByOne(), num_workers=1)])


def life(root: str) -> None:
    """When objects of the job end."""
    dataset = d.Hidden(root)
    weakref.finalize(dataset, say, "the dataset has gone")
    made: Any = DataLoader(dataset, BATCH, sampler=d.Closing())
    weakref.finalize(made, say, "the loader has gone")
    iterator = iter(made)
    next(iterator)
    say("deleting the iterator")
    del iterator
    for _ in made:
        pass
    say("deleting the loader")
    del made
    say("deleting the dataset")
    del dataset


def pickled(root: str) -> None:
    made: Any = DataLoader(d.Listed(root), BATCH, shuffle=True)
    next(iter(made))
    say(hashlib.sha1(pickle.dumps(made)).hexdigest())
    read(pickle.loads(pickle.dumps(made)))
    read(copy.deepcopy(made))


class Equal(DataLoader[int]):
    """Loaders that say they are all the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


def equal(root: str) -> None:
    read(Equal(d.Listed(root), BATCH, shuffle=True))
    read(Equal(d.Hidden(root), BATCH))


def signals(root: str) -> None:
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in DataLoader(d.Hidden(root), BATCH, sampler=d.OneByOne()):
        os.kill(os.getpid(), signal.SIGUSR1)
    say(len(caught), [signal.getsignal(one).__class__.__name__ for one in range(1, 32)])


def forks(root: str) -> None:
    """A child takes over in the middle of an epoch, and trains as its parent does."""
    made: Any = DataLoader(d.Listed(root), BATCH, shuffle=True)
    iterator = iter(made)
    say(plain(next(iterator)))
    child = os.fork()
    if child:
        say("the child has ended with", os.waitpid(child, 0)[1])
    say([plain(batch) for batch in iterator])
    read(made)
    if not child:
        os._exit(3)


def no_children(root: str) -> None:
    read(DataLoader(d.Listed(root), BATCH, shuffle=True))
    try:
        say(os.waitpid(-1, os.WNOHANG))
    except ChildProcessError as error:
        say(error)


def threads(root: str) -> None:
    """One thread draws while another goes through loaders."""
    over = threading.Event()

    def background() -> None:
        for _ in range(12):
            next(iter(DataLoader(d.Unread(root), BATCH, shuffle=True)))
        over.set()

    thread = threading.Thread(target=background)
    thread.start()
    drawn = []
    while not over.is_set():
        drawn.append(tuple(torch.rand(4).tolist()))
    thread.join()
    torch.manual_seed(0)  # what is left in the generator depends on how fast they were
    say("drawn twice:", len(drawn) - len(set(drawn)))


def compiled(root: str) -> None:
    made: Any = DataLoader(d.Listed(root), BATCH, shuffle=True, generator=generator())

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]
    def epoch(factor: Any) -> Any:
        total = torch.zeros(())
        for number, batch in enumerate(made):
            total = total + (batch * factor).sum() * (number + 1)
        return total

    say([float(epoch(torch.ones(()))) for _ in range(2)])
    from torch._dynamo.utils import counters

    say({kind: dict(counted) for kind, counted in sorted(counters.items()) if kind in ("graph_break", "frames")})


def stateful(workers: int, sampler: str = "sequential", persistent: bool = False) -> SetUp:
    """A loader whose state is kept in the middle of an epoch, and that goes on there, also in another process."""

    def run(root: str) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader import sampler as samplers

        def made() -> Any:
            dataset, own = d.Counting(root), generator()
            given: dict[str, dict[str, Any]] = {
                "sequential": {"shuffle": False},
                "shuffled": {"shuffle": True, "generator": own, "drop_last": True},
                "shuffled by all": {"shuffle": True},
                "of torch": {"sampler": RandomSampler(range(d.FILES), generator=own)},
                "of a rank": {"sampler": samplers.StatefulDistributedSampler(dataset, 2, 1)},
                "own": {"sampler": d.InPlace()},
            }
            return StatefulDataLoader(
                dataset, BATCH, num_workers=workers, persistent_workers=persistent, **given[sampler]
            )

        first, second = made(), made()
        iterator = iter(first)
        say([plain(next(iterator)) for _ in range(3)])
        state = first.state_dict()
        torch.save(state, "checkpoint")
        say(state)
        second.load_state_dict(state)
        say([plain(batch) for batch in second], second.state_dict())
        say([plain(batch) for batch in second], [plain(batch) for batch in iterator], first.state_dict())

    return run


def repeated(workers: int) -> SetUp:
    """A loader without an end, an epoch of which is as long as its sampler."""

    def run(root: str) -> None:
        batches = d.Repeated(BatchSampler(RandomSampler(range(d.FILES)), BATCH, False))
        iterator = iter(DataLoader(d.Hidden(root), batch_sampler=batches, num_workers=workers))
        for _ in range(3):
            say([plain(next(iterator)) for _ in range(len(batches))])

    return run


def shards(**options: Any) -> SetUp:
    """Files as shards of a pipeline of WebDataset, whose stages keep count of its epochs."""

    def run(root: str) -> None:
        import webdataset as wds

        listed = wds.SimpleShardList(d.paths(root))
        shuffled = wds.detshuffle(100, seed=5)
        dataset = wds.DataPipeline(listed, wds.split_by_worker, shuffled, wds.cache.StreamingOpen(), d.contents)
        read(DataLoader(dataset, BATCH, **options), 3)
        say(shuffled.epoch, listed.urls == d.paths(root))

    return run


def warned(root: str) -> None:
    """The places that warnings name."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        read(DataLoader(d.Listed(root), BATCH, shuffle=True, pin_memory=True, num_workers=1))
        read(DataLoader(Subset(d.Listed(root), range(9)), BATCH, pin_memory=True))


def concatenated(root: str) -> None:
    both: Any = ConcatDataset([Subset(d.Listed(root), range(0, 40, 2)), d.Listed(root)])
    read(DataLoader(both, BATCH, shuffle=True, num_workers=2))
    one, other = random_split(d.Hidden(root), [30, 18])  # type: ignore[var-annotated]
    read(DataLoader(one, BATCH, shuffle=True))
    read(DataLoader(other, BATCH, num_workers=1))


def collated(root: str) -> None:
    def collate(batch: list[Any]) -> Any:
        return [one[0] for one in batch], [round(value, 6) for one in batch for value in one[1:]], numpy.random.rand()

    for workers in (0, 2):
        made: Any = DataLoader(
            d.Augmented(root), BATCH, shuffle=True, num_workers=workers, collate_fn=collate, worker_init_fn=say_worker
        )
        for _ in range(2):
            say(list(made))


def say_worker(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    say_once = f"worker {number} of {info.num_workers}, seed {info.seed}\n"
    os.write(os.open(f"worker{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), say_once.encode())


def exits(root: str) -> None:
    next(iter(DataLoader(d.Listed(root), BATCH, shuffle=True, num_workers=1)))
    sys.exit(7)


def killed(root: str) -> None:
    next(iter(DataLoader(d.Listed(root), BATCH, shuffle=True)))
    os.kill(os.getpid(), signal.SIGKILL)


def trained(root: str) -> None:
    """A training on the GPU, where there is one: weights, and random numbers that are drawn there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pinned = device.type == "cuda"
    made: Any = DataLoader(d.Listed(root), BATCH, shuffle=True, num_workers=1, pin_memory=pinned)
    for _ in range(2):
        for batch in made:
            sent = batch.to(device, non_blocking=True).float().reshape(-1, 1)
            loss = (model(sent / d.FILES) + torch.rand(1, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(float(loss))
    say([plain(weights) for weights in model.state_dict().values()], torch.rand(2, device=device).tolist())


def collected(root: str) -> None:
    """A job that looks at its garbage itself."""
    gc.disable()
    gc.collect()
    read(DataLoader(d.Hidden(root), BATCH, shuffle=True))
    say(gc.collect() >= 0, len(gc.garbage), gc.isenabled())
    gc.enable()


def batches_kept(root: str) -> None:
    """Nobody keeps a batch of sample numbers for longer than torch does, and torch's fetcher is what it was."""
    given: list[weakref.ref[Any]] = []

    class Batch(list[int]):
        pass

    def batches() -> Any:
        for first in range(0, d.FILES, BATCH):
            batch = Batch(range(first, first + BATCH))
            given.append(weakref.ref(batch))
            yield batch
            del batch

    class Batches(BatchSampler):
        def __iter__(self) -> Any:
            return batches()

    made = Batches(range(d.FILES), BATCH, False)
    iterator = iter(DataLoader(d.OpenedInC(root), batch_sampler=made))
    for _ in range(4):
        next(iterator)
        say([one() is not None for one in given])
    fetcher = iterator._dataset_fetcher  # type: ignore[attr-defined]
    say(type(fetcher.fetch).__name__, fetcher.fetch.__func__.__qualname__, fetcher.fetch == fetcher.fetch)
    say(sorted(vars(fetcher)), type(type(fetcher).fetch).__name__)


# A worker costs 0.2 s of a processor; two are where their order matters.
WORKERS = {"num_workers": 1}


def touched(workers: int) -> SetUp:
    """Nothing of a dataset is touched that could tell."""

    def run(root: str) -> None:
        dataset = d.Watched(root)
        read(DataLoader(dataset, BATCH, shuffle=True, num_workers=workers))
        say(sorted(set(dataset.told)), len(dataset.told), len(d.Table.told))

    return run


def in_pandas(root: str) -> None:
    """A table of pandas says afterwards what it said before, and keeps no more."""
    import pandas

    dataset = d.Hidden(root)
    frame = pandas.DataFrame({"path": [dataset.table[row] for row in range(d.FILES)], "label": range(d.FILES)})
    dataset.frame = frame[frame["label"] >= 0]  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(DataLoader(dataset, BATCH, shuffle=True))
        dataset.frame["label"] += 1  # type: ignore[attr-defined]
    say(len(caught), sorted(vars(dataset.frame)), dataset.frame.to_csv())  # type: ignore[attr-defined]


SETUPS: dict[str, SetUp] = {
    "sequential": loader(d.Listed),
    "shuffle": loader(d.Listed, shuffle=True),
    "shuffle-workers": loader(d.Listed, shuffle=True, num_workers=2),
    "shuffle-persistent": loader(d.Listed, shuffle=True, persistent_workers=True, **WORKERS),
    "own-generators": own_generators,
    "replacement": loader(d.Listed, lambda: RandomSampler(range(d.FILES), replacement=True, num_samples=50)),
    "weighted": loader(d.Listed, lambda: WeightedRandomSampler([1.0, 2.0] * 24, 40), **WORKERS),
    "subset-random": loader(d.Listed, lambda: SubsetRandomSampler(range(5, 40)), drop_last=True),
    "distributed": distributed(told=True),
    "distributed-never-told": distributed(told=False),
    "unbatched": lambda root: read(DataLoader(d.Listed(root), None, sampler=RandomSampler(range(d.FILES)))),
    "batches-of-batches": lambda root: read(
        DataLoader(d.InBatches(root), sampler=BatchSampler(SubsetRandomSampler(range(40)), 7, True), batch_size=None)
    ),
    "own-batches": loader(d.Listed, d.Buckets),
    "own-batches-workers": loader(d.Hidden, d.Buckets, **WORKERS),
    "list-of-batches": loader(d.Listed, lambda: [[1, 2, 3], [4, 5], [6]], **WORKERS),
    "own": loader(d.Listed, d.InPlace),
    "own-workers": loader(d.Listed, d.InPlace, num_workers=2),
    "own-persistent": loader(d.Hidden, d.InPlace, persistent_workers=True, **WORKERS),
    "one-by-one": loader(d.Listed, d.OneByOne),
    "one-by-one-workers": loader(d.Hidden, d.OneByOne, **WORKERS),
    "numpy-numbers": loader(d.Hidden, d.OfNumpy, **WORKERS),
    "by-place": loader(d.Listed, d.ByPlace),
    "taking": loader(d.Hidden, d.Taking, **WORKERS),
    "looking": loader(d.Listed, d.Looking, **WORKERS),
    "rows": loader(d.Listed, d.Rows),
    "mixed": loader(d.Listed, d.Mixed),
    "mixed-persistent": loader(d.Listed, d.Mixed, persistent_workers=True, **WORKERS),
    "repeated": repeated(0),
    "repeated-workers": repeated(1),
    "skipping": loader(
        d.Listed, lambda: d.Skipping(BatchSampler(RandomSampler(range(d.FILES), generator=generator()), 4, True), 3)
    ),
    "from-file": loader(d.Listed, d.FromFile, **WORKERS),
    "from-queue": loader(d.Listed, d.FromQueue, **WORKERS),
    "shared-memory": shared_memory,
    "store": store,
    "endless": endless,
    "left-early": left,
    "made-anew": again,
    "hidden": loader(d.Hidden, shuffle=True),
    "hidden-workers": loader(d.Hidden, shuffle=True, num_workers=2),
    "opened-in-c": loader(d.OpenedInC, shuffle=True),
    "opened-in-c-workers": loader(d.OpenedInC, shuffle=True, num_workers=2),
    "batches-kept": batches_kept,
    "touched": touched(0),
    "touched-workers": touched(2),
    "reshuffled": loader(d.Reshuffled),
    "reshuffled-workers": loader(d.Reshuffled, persistent_workers=True, **WORKERS),
    "in-batches": loader(d.InBatches, shuffle=True, **WORKERS),
    "loader-in-dataset": loader(d.Inner, shuffle=True, **WORKERS),
    "in-memory": lambda root: read(DataLoader(TensorDataset(torch.arange(50)), BATCH, shuffle=True)),
    "stream": lambda root: read(DataLoader(d.Stream(root), BATCH)),
    "stream-workers": lambda root: read(DataLoader(d.Stream(root), BATCH, num_workers=2)),
    "spawned": loader(d.Hidden, d.InPlace, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"),
    "forkserver": loader(
        d.Listed, shuffle=True, num_workers=1, persistent_workers=True, multiprocessing_context="forkserver"
    ),
    "failing": loader(d.Failing, shuffle=True),
    "failing-workers": loader(d.Failing, num_workers=1),
    "broken-sampler": loader(d.Hidden, d.Broken),
    "broken-sampler-workers": loader(d.Hidden, d.Broken, **WORKERS),
    "broken-collate": loader(d.Hidden, collate_fn=lambda batch: batch[99]),
    "collated": collated,
    "concatenated": concatenated,
    "pickled": pickled,
    "equal-loaders": equal,
    "life": life,
    "garbage": collected,
    "signals": signals,
    "forks": forks,
    "threads": threads,
    "warnings": warned,
    "exits": exits,
    "killed": killed,
    "compiled": compiled,
    "trained": trained,
    "stateful": stateful(0),
    "stateful-workers": stateful(2),
    "stateful-shuffled": stateful(0, "shuffled"),
    "stateful-shuffled-persistent": stateful(1, "shuffled by all", persistent=True),
    "stateful-of-torch": stateful(0, "of torch"),
    "stateful-of-a-rank": stateful(0, "of a rank"),
    "stateful-own": stateful(0, "own"),
    "shards": shards(),
    "shards-workers": shards(**WORKERS),
    "shards-persistent": shards(persistent_workers=True, **WORKERS),
    "in-pandas": in_pandas,
    "no-children": no_children,
}
