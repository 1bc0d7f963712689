"""Derives this node's part from the sequences of the cluster's jobs: the blocks it keeps, the reads it will serve, and
routes to blocks elsewhere. Imports `fetch` and what is below it, and `jobs`."""
