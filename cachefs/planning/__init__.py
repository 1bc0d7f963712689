"""Decisions about blocks: what will be read when, what to fetch, what to keep, what to push. May import numpy,
cachefs.block and cachefs.errors, and nothing else.

Nothing here does I/O, reads a clock, starts a thread or takes a lock: times and sizes are arguments. So the
daemon, a scheduler and a simulator can run the very same objects. Doors: `eviction` -> `pagecache` -> `sequences` ->
`blocks`, `eviction` -> `cluster` -> `sequences`, `blocks`, `scheduling` -> `cluster`, and `prefetch` -> `cluster`,
`requests`, `sequences`, `blocks`; each package may import those to its right.
"""
