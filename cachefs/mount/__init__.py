"""The mount: processes that show snapshots as a read-only tree of files, and read them from the tiers of their node.

Doors: `cli` (the command `mount.cachefs`) and, for tests and tools, `kernel`. Only this package needs pyfuse3 and trio.
It may import the modules of `cachefs` itself; nothing outside of it may import it, but for command lines and tests.
"""

import os

# This must be set before numpy is imported, which would start a thread per processor. Each thread spins for 50 ms and
# has nothing to do here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
