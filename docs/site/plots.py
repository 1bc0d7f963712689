"""plots.py DIRECTORY: draw the plots of the pages as SVG files. `make docs` runs it; it needs matplotlib."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import epochs
import sizing
from matplotlib import pyplot


def hits(file: Path) -> None:
    """Hits by the share of the dataset that has room: what stays, and what LRU would have."""
    shares = [step / 200 for step in range(201)]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.plot(shares, shares, label="cachefs (clairvoyant, minio): what is possible", linewidth=2)
    axes.plot(shares, [sizing.lru_hits(share) for share in shares], label="LRU", linestyle="--", linewidth=2)
    axes.set(xlabel="room of the tiers / dataset", ylabel="share of reads that are hits, from epoch 2 on")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    # Without a date and with ids that stay, the file changes with the plot only.
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    pyplot.rcParams["svg.hashsalt"] = "cachefs"
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    hits(directory / "sizing-hits.svg")
    (directory / "epochs.svg").write_text(epochs.picture(epochs.BENCHMARKS.read_text()))
