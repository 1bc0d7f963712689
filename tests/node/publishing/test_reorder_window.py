"""How far out of order the workers of torch's loader read: within the window that the daemon counts with."""

import os
import time
from pathlib import Path

from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.unit.daemon.jobs.test_reorder_window import widest, window


class Logged(Dataset[int]):
    """Appends each index that is read to a file; the first worker is slow."""

    def __init__(self, log: Path, size: int) -> None:
        self.log = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            time.sleep(0.002)
        os.write(self.log, b"%d\n" % index)
        return index


def test_torch_stays_within_the_bound(tmp_path: Path) -> None:
    loader = DataLoader(Logged(tmp_path / "log", 480), batch_size=4, num_workers=2, prefetch_factor=3)
    assert len([batch.tolist() for batch in loader]) == 120
    order = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert 0 < widest(order) <= window(2, 4, 3)
