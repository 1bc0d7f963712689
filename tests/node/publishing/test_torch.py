"""An unmodified PyTorch job with loader processes, reading an image folder under a mount."""

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.daemon import Daemon
from tests.mounting import counters, mounted

CLASSES, PER_CLASS = 5, 40


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's: a directory per class, samples listed when it is made, files opened by the workers."""

    def __init__(self, root: Path) -> None:
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).glob("*.npy"))
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        return torch.from_numpy(numpy.load(path))[0, 0, 0], label


@pytest.fixture
def images(tmp_path: Path) -> Path:
    top = tmp_path / "images"
    for label in range(CLASSES):
        (top / f"class{label}").mkdir(parents=True)
        for number in range(PER_CLASS):
            numpy.save(top / f"class{label}" / f"{number:03}.npy", numpy.full((64, 64, 3), number, dtype=numpy.uint8))
    return top


@pytest.fixture
def mount(tmp_path: Path, images: Path) -> Iterator[tuple[Daemon, Path]]:
    with Daemon(tmp_path / "node") as daemon:
        daemon.add_dataset("images", f"file://{images}")
        with mounted(daemon.socket, "images", tmp_path / "mnt") as directory:
            yield daemon, directory


def test_a_loader_with_workers_reads_two_epochs(mount: tuple[Daemon, Path]) -> None:
    daemon, directory = mount
    dataset = ImageFolder(directory)
    assert len(dataset) == CLASSES * PER_CLASS
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=7)
    loader = DataLoader(dataset, 16, sampler=sampler, num_workers=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = [
            (int(value), int(label)) for values, labels in loader for value, label in zip(values, labels, strict=True)
        ]
        assert sorted(seen) == sorted((number, label) for label in range(CLASSES) for number in range(PER_CLASS))
    assert counters(daemon.client, directory)["misses"] <= len(dataset)
