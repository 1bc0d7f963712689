"""`library_shards.py hugging-face|mds DIRECTORY`: reads streams of a library, and prints a JSON line for each of them:

name, how many workers, the number of each of its files, and for each epoch the files in the order that was foreseen
(this epoch's and the next one's), and the numbers of shards in the order in which samples of them came.
(See test_library_shards.py; it runs with the libraries of the programs.)
"""

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[3])

import numpy  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from cachefs.hooks import hugging_face, mds  # noqa: E402

SHARDS = 11
EPOCHS = 3
WAYS = ((0, False), (1, False), (3, False), (3, True))


def read_hugging_face(top: Path) -> None:
    from datasets import IterableDataset, interleave_datasets, load_dataset
    from datasets.distributed import split_dataset_by_node

    files = {kind: [str(top / f"{shard:02}.{kind}") for shard in range(SHARDS)] for kind in ("txt", "json")}
    for shard in range(SHARDS):
        Path(files["txt"][shard]).write_text(f"{shard}\n" * 12)
        Path(files["json"][shard]).write_text(f'{{"text": "{shard}"}}\n' * 12)

    def load(kind: str = "text") -> Any:
        given = {"text": files["txt"], "json": files["json"]}[kind]
        return load_dataset(kind, data_files=given, split="train", streaming=True)

    made: dict[str, Callable[[], Any]] = {
        "plain": load,
        "json": lambda: load("json").shuffle(seed=4, buffer_size=1),
        "shuffled": lambda: load().shuffle(seed=5, buffer_size=1),
        "mapped": lambda: load().shuffle(seed=5, buffer_size=1).map(same).filter(always),
        "shuffled twice": lambda: load().map(same).shuffle(seed=5, buffer_size=1).shuffle(seed=7, buffer_size=1),
        "selected": lambda: load().select_columns(["text"]).shuffle(seed=1, buffer_size=1),
        "of a rank": lambda: split_dataset_by_node(load().shuffle(seed=3, buffer_size=1), rank=1, world_size=SHARDS),
        "examples of a rank": lambda: split_dataset_by_node(load().shuffle(seed=3, buffer_size=1), 1, 4),
    }
    for name, make in made.items():
        for workers, keeps in WAYS:
            dataset = make()
            loader = DataLoader(dataset, None, num_workers=workers, persistent_workers=keeps)

            def epochs(dataset: Any = dataset, loader: Any = loader) -> Iterator[list[int]]:
                for epoch in range(EPOCHS):
                    dataset.set_epoch(epoch)
                    yield [int(row["text"]) for row in loader]

            tell(name, workers, keeps, dataset, hugging_face.shards_of, epochs())
    gone_on, later = load(), load()
    for one in (gone_on, later):
        one.load_state_dict(one.state_dict())
    later.set_epoch(1)
    texts = IterableDataset.from_generator(given_texts, gen_kwargs={"names": ["part-0", "part-1"]})
    unknown = [load().skip(3), load().take(3), interleave_datasets([load(), load("json")]), gone_on, texts]
    say(
        name="unknown",
        found=[hugging_face.shards_of(dataset) is not None for dataset in unknown],
        known=hugging_face.shards_of(later) is not None,
    )


def same(row: Any) -> Any:
    return row


def given_texts(names: list[str]) -> Iterator[dict[str, str]]:
    yield from ({"text": name} for name in names)


def always(row: Any) -> bool:
    return True


def read_mds(top: Path) -> None:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    written = str(top / "written")
    with MDSWriter(out=written, columns={"number": "int", "rest": "bytes"}, size_limit=1 << 12) as writer:
        for number in range(30 * SHARDS):
            writer.write({"number": number, "rest": bytes(100)})
    made: dict[str, dict[str, Any]] = {
        "plain": {"local": written},
        "py1e": {"local": written, "shuffle": True, "shuffle_seed": 3},
        "py1s": {"local": written, "shuffle": True, "shuffle_algo": "py1s"},
        "py2s": {"local": written, "shuffle": True, "shuffle_algo": "py2s", "num_canonical_nodes": 2},
        "py1br": {"local": written, "shuffle": True, "shuffle_algo": "py1br", "shuffle_block_size": 100},
        "naive": {"local": written, "shuffle": True, "shuffle_algo": "naive"},
        "in place": {"remote": written, "local": written, "shuffle": True},
        "copied": {"remote": written, "local": str(top / "copied"), "shuffle": True},
        "short epochs": {"local": written, "shuffle": True, "epoch_size": 150},
    }
    for name, options in made.items():
        for workers, keeps in WAYS:
            clean_stale_shared_memory()
            shutil.rmtree(top / "copied", ignore_errors=True)
            dataset = StreamingDataset(batch_size=8, **options)
            starts = dataset.sample_offset_per_shard
            loader = DataLoader(dataset, 8, num_workers=workers, persistent_workers=keeps)

            def epochs(loader: Any = loader, starts: Any = starts) -> Iterator[list[int]]:
                for _ in range(EPOCHS):
                    samples = numpy.concatenate([batch["number"].numpy() for batch in loader])
                    yield (numpy.searchsorted(starts, samples, side="right") - 1).tolist()

            tell(name, workers, keeps, dataset, mds.shards_of, epochs())

    class Own(StreamingDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(())

    clean_stale_shared_memory()
    own = mds.shards_of(Own(batch_size=8, local=written))
    clean_stale_shared_memory()
    coarse = StreamingDataset(batch_size=8, local=written, shuffle=True, shuffle_block_size=8)
    warns = mds.shards_of(coarse)
    resumed = StreamingDataset(batch_size=8, remote=written, local=str(top / "resumed"))
    resumed.load_state_dict({**resumed.state_dict(8, True), "epoch": 0})
    unknown = (own, warns, mds.shards_of(resumed))
    resumed.next_epoch = 1
    say(
        name="unknown",
        found=[found is not None for found in unknown],
        known=mds.shards_of(resumed) is not None,
    )


def tell(
    name: str, workers: int, keeps: bool, dataset: Any, shards_of: Callable[[Any], Any], epochs: Iterator[list[int]]
) -> None:
    foreseen, read, files = [], [], ()
    before = visible(dataset)
    for epoch in range(EPOCHS):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        shards = shards_of(dataset)
        foreseen.append(shards.orders(epoch, workers, keeps_workers=keeps) if shards is not None else [])
        files = files or shards.files
        assert epoch or visible(dataset) == before
        read.append(list(dict.fromkeys(next(epochs))))
    numbers = [int("".join(filter(str.isdigit, Path(path).stem))) for path in files]
    say(name=name, workers=workers, numbers=numbers, foreseen=foreseen, read=read)


def visible(dataset: Any) -> dict[str, bytes]:
    """The attributes that can be pickled, as bytes."""
    found = {}
    for name, value in vars(dataset).items():
        try:
            found[name] = pickle.dumps(value)
        except Exception:
            continue
    return found


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    {"hugging-face": read_hugging_face, "mds": read_mds}[sys.argv[1]](Path(sys.argv[2]))
