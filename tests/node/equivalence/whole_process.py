"""`whole_process.py ROOT`: what only a process of its own shows: how Python starts, and how it ends."""

import sys
import warnings
from pathlib import Path

try:
    import sitecustomize

    print("sitecustomize", sitecustomize.__file__, sorted(sitecustomize.__dict__)[-3:])
except ImportError as error:
    print(error)
try:
    import beside  # type: ignore[import-not-found]  # in the working directory, which PYTHONPATH may mean

    print(beside.__file__)
except ImportError as error:
    print(error)
print([path for path in sys.path if not path.endswith("/hooks/startup")], sys.flags, sys.argv)

sys.path[0] = str(Path(__file__).parents[3])

from torch.utils.data import DataLoader  # noqa: E402

from tests.node.equivalence import datasets  # noqa: E402

warnings.simplefilter("error")
for dataset in (datasets.Listed(sys.argv[1]), datasets.Hidden(sys.argv[1])):
    for _ in range(2):
        print([batch.tolist() for batch in DataLoader(dataset, 6, sampler=datasets.OneByOne())].__len__())
raise ValueError("the script ends badly")
