"""The mount process (pyfuse3, trio): serves snapshots as a read-only tree, from the tiers of its node."""

import os

# Importing numpy would start a thread per processor, which spin for 50 ms each and have nothing to do here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
