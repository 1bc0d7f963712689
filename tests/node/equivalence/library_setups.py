"""Set-ups with streams of large libraries, which have an environment of their own: `make programs`."""

from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from tests.node.equivalence import datasets as d
from tests.node.equivalence.setups import BATCH, SetUp, read, say

# Directories with shards of MDS.
MDS: Final = ("mds-0", "mds-1", "mds-2")
WRITE_MDS: Final = f"""
import sys
from streaming import MDSWriter
for name in {MDS}:
    with MDSWriter(out=sys.argv[1] + "/" + name, columns={{"number": "int"}}, size_limit=200) as writer:
        for number in range({d.FILES}):
            writer.write({{"number": number}})
"""


def hugging_face(**options: Any) -> SetUp:
    """Files of text that are streamed, in another order in each epoch."""

    def run(root: str) -> None:
        from datasets import load_dataset

        loaded = load_dataset("text", data_files=d.paths(root), split="train", streaming=True)
        stream = loaded.shuffle(seed=5, buffer_size=7).map(numbered).with_format("torch")
        loader = DataLoader(stream, BATCH, **options)
        for epoch in range(3):
            stream.set_epoch(epoch)
            say([batch["number"].tolist() for batch in loader])
        say(stream.state_dict(), stream.epoch)

    return run


def numbered(row: dict[str, Any]) -> dict[str, Any]:
    return {"number": int(row["text"])}


def mds(directory: str, **options: Any) -> SetUp:
    """Shards of MDS, of which the library computes who reads what. Two processes may not have the same directory."""

    def run(root: str) -> None:
        from streaming import StreamingDataset

        dataset = StreamingDataset(local=f"{root}/{directory}", shuffle=True, shuffle_seed=5, batch_size=BATCH)
        read(DataLoader(dataset, BATCH, collate_fn=numbers, **options), 3)
        say(dataset.next_epoch, dataset.num_canonical_nodes, dataset.shuffle_block_size)

    return run


def numbers(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sample["number"] for sample in samples])


LIBRARY_SETUPS: dict[str, SetUp] = {
    "hugging-face": hugging_face(),
    "hugging-face-workers": hugging_face(num_workers=2),
    "hugging-face-persistent": hugging_face(num_workers=2, persistent_workers=True),
    "mds": mds(MDS[0]),
    "mds-workers": mds(MDS[1], num_workers=2),
    "mds-persistent": mds(MDS[2], num_workers=2, persistent_workers=True),
}
