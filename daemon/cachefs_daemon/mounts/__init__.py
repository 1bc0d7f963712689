"""The mounts of this node: their liveness, their reads, and the commands that push pages into their page caches.

May import datasets and store, but not jobs.
"""
