"""The daemon of one node (asyncio). It knows other nodes only through `ports` and `node_cluster`."""

import os

# Importing numpy would start a thread per processor, which spin for 50 ms each and have nothing to do here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
