"""The formulas of docs/sizing.md, its table, and a calculator:

python3 docs/site/sizing.py --dataset 150e9 --room 75e9 --epochs 90 --rate 1500 --sample 110e3 --latency 0.05
python3 docs/site/sizing.py --table

Bytes are bytes, times are seconds. It needs the standard library only.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Training:
    """One job, beside tiers that have room for some of its dataset."""

    dataset: float  # bytes
    room: float  # bytes of all tiers together
    epochs: int
    rate: float  # samples per second while it computes
    sample: float  # bytes
    latency: float  # seconds to the first byte of the origin's answer


def kept(training: Training) -> float:
    """The share of the dataset that stays from one epoch to the next, and so of the reads that are hits."""
    return min(1.0, training.room / training.dataset)


def lru_hits(share: float) -> float:
    """Hits of LRU where so large a *share* of the dataset has room, in shuffled epochs that read each sample once."""
    return 1.0 if share >= 1 else share + (1 - share) * math.log(1 - share)


def least_origin_bytes(training: Training) -> float:
    """What any cache must fetch in all epochs: F + (E - 1) max(0, F - C)."""
    return training.dataset + (training.epochs - 1) * max(0.0, training.dataset - training.room)


def origin_rate(training: Training, share: float) -> float:
    """Bytes in a second that the origin has to deliver, so that the job waits for none, with that *share* of hits."""
    return (1 - share) * training.rate * training.sample


def requests_in_flight(training: Training, share: float) -> float:
    """By Little's law, for samples of one request each; the time that the bytes take is not in it."""
    return (1 - share) * training.rate * training.latency


GIGA: Final = 1e9
# What the table has: name, and the training.
EXAMPLES: Final = {
    "ImageNet-like, all fits": Training(150 * GIGA, 160 * GIGA, 90, 1500, 110e3, 0.05),
    "the same, room for half": Training(150 * GIGA, 75 * GIGA, 90, 1500, 110e3, 0.05),
    "the same, room for a fifth": Training(150 * GIGA, 30 * GIGA, 90, 1500, 110e3, 0.05),
    "large pictures, room for a tenth": Training(10_000 * GIGA, 1000 * GIGA, 10, 800, 1e6, 0.05),
    "tokens in large files, one epoch": Training(2_000 * GIGA, 500 * GIGA, 1, 50, 4e6, 0.05),
}
COLUMNS: Final = (
    "example", "dataset", "room", "epochs", "fetched at least", "hits from epoch 2", "LRU would have",
    "origin in epoch 1", "origin from epoch 2", "requests at once, epoch 1",
)  # fmt: skip


def table() -> str:
    """The examples, as the page has them."""
    header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join([*header, *(row(name, training) for name, training in EXAMPLES.items())])


def row(name: str, training: Training) -> str:
    share = kept(training)
    later = training.epochs > 1
    cells = [
        name,
        amount(training.dataset),
        amount(training.room),
        str(training.epochs),
        amount(least_origin_bytes(training)),
        f"{share:.0%}" if later else "-",
        f"{lru_hits(share):.0%}" if later else "-",
        f"{amount(origin_rate(training, 0))}/s",
        f"{amount(origin_rate(training, share))}/s" if later else "-",
        f"{requests_in_flight(training, 0):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def amount(count: float) -> str:
    """Bytes for people, decimal."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB" if count else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description="What a dataset, the tiers' room and the origin make of a training.")
    parser.add_argument("--table", action="store_true", help="print the table of docs/sizing.md")
    parser.add_argument("--dataset", type=float, default=150e9, help="bytes [%(default)g]")
    parser.add_argument("--room", type=float, default=75e9, help="bytes of all tiers together [%(default)g]")
    parser.add_argument("--epochs", type=int, default=90, help="[%(default)s]")
    parser.add_argument("--rate", type=float, default=1500, help="samples per second while it computes [%(default)g]")
    parser.add_argument("--sample", type=float, default=110e3, help="bytes [%(default)g]")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds to the first byte [%(default)g]")
    given = vars(parser.parse_args())
    if given.pop("table"):
        print(table())
        return
    if min(given.values()) <= 0:
        parser.error("every number must be more than 0")
    training = Training(**given)
    share = kept(training)
    print(f"fetched in all epochs, at least   {amount(least_origin_bytes(training))}")
    print(f"hits from epoch 2 on              {share:.0%} (LRU: {lru_hits(share):.0%})")
    print(f"origin, so that nobody waits      {amount(origin_rate(training, 0))}/s in epoch 1, "
          f"{amount(origin_rate(training, share))}/s later")  # fmt: skip
    print(f"requests at once                  {requests_in_flight(training, 0):,.0f} in epoch 1, "
          f"{requests_in_flight(training, share):,.0f} later")  # fmt: skip


if __name__ == "__main__":
    main()
