"""Planning decides and does nothing: no file is opened, no clock is read, no thread is started, no lock is taken.

The import contracts of setup.cfg say the same of whole modules; here every module is imported, and decisions are made,
in a process in which all of that fails.
"""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs import planning

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(planning.__path__, "cachefs.planning.")
    if not module.name.endswith("_shuffle")  # compiled
)

# What may be imported, and nothing else: arrays, the names of blocks, errors, and parts of Python without side effects.
ALLOWED = {
    "bisect", "cachefs.block", "cachefs.errors", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "heapq", "itertools", "math", "numpy", "numpy.ma", "numpy.typing", "typing",
}  # fmt: skip

# In the process that imports: numpy and Python's own modules are loaded before the doors close.
CLOSED = """
import builtins, collections.abc, dataclasses, enum, functools, heapq
import importlib, itertools, math, os, sys, threading, time, typing
import numpy, numpy.ma, numpy.typing
import cachefs.block, cachefs.errors

GONE = ("lmdb", "grpc", "trio", "pyfuse3", "aiobotocore", "msgspec", "psutil")
assert not any(name in sys.modules for name in GONE), [name for name in GONE if name in sys.modules]
sys.modules.update(dict.fromkeys(GONE))
really_import = builtins.__import__

def guarded_import(name, namespace=None, *more):
    if name.split(".")[0] in ("os", "time", "threading", "io", "pathlib", "socket", "asyncio", "logging", "subprocess"):
        if (namespace or {}).get("__name__", "").startswith("cachefs.planning"):
            raise ImportError(f"{namespace['__name__']} imports {name}")
    return really_import(name, namespace, *more)

builtins.__import__ = guarded_import
for name in sys.argv[1:]:
    importlib.import_module(name)

def forbidden(*_, **__):
    raise AssertionError("planning does I/O, reads a clock or starts a thread")

builtins.open = os.open = os.stat = os.read = os.write = forbidden
time.time = time.monotonic = time.perf_counter = time.sleep = time.time_ns = time.monotonic_ns = forbidden
threading.Thread.start = threading.Lock = threading.RLock = forbidden
"""

# Two jobs over a small tier: published, followed, looked ahead for, evicted for.
DECIDE = """
import numpy as np
from cachefs.planning.blocks.presence import ABSENT, Presence
from cachefs.planning.blocks.space import Samples
from cachefs.planning.blocks.space import BlockSpace
from cachefs.planning.eviction.policies import POLICIES, make_policy
from cachefs.planning.pagecache.states import Coverage, MemoryCoverage
from cachefs.planning.prefetch.lookahead import Lookahead
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order

contents = np.arange(200, dtype="<u8").view([("high", "<u8"), ("low", "<u8")])
space = BlockSpace("s", 1 << 20, np.full(100, 1000, np.int64), contents)
samples = Samples(space, *space.blocks_of(np.arange(100)))
plan, presence = Plan(), Presence()
plan.add_space(space)
presence.add_space(space)
for job, seed in (("a", 1), ("b", 2)):
    spec = SamplerSpec(kind="torch-distributed", size=100, seed=seed)
    plan.set_epoch(job, "s", 0, samples.reads_in_order(epoch_order(spec, 0)).blocks, is_last=True)
policies = [make_policy(name, plan, MemoryCoverage(Coverage(plan), lambda: 0.0)) for name in POLICIES]
for upcoming in Lookahead(plan, ABSENT).take_blocks(presence.states, 60.0, 50, 1 << 20):
    key = space.key(upcoming.number)
    for policy in policies:
        if policy.can_admit(key, upcoming.size, 5000):
            policy.note_added(key, upcoming.size)
for policy in policies:
    for victim in policy.choose_victims(2000, (), [space.key(0)]):
        policy.note_removed(victim)
print("decided")
"""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_nothing_that_could_do_anything(name: str) -> None:
    path = Path(planning.__path__[0], *name.split(".")[2:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text())):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        for module in imported:
            if not module.startswith("cachefs.planning") and not _is_for_types_only(source, node.lineno):
                assert module in ALLOWED, f"{name} imports {module}"


def test_every_module_imports_and_decides_where_nothing_can_be_done() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSED + DECIDE, *MODULES], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decided\n"


def _is_for_types_only(source: Path, line: int) -> bool:
    """Is that line below `if TYPE_CHECKING:`?"""
    blocks = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.If))
    return any(
        isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING" and block.lineno < line <=
        (block.end_lineno or 0) for block in blocks
    )  # fmt: skip
