"""The jobs that have published how they will read: their consumers, each consumer's position, and their stalls.

`registry` receives what jobs publish, `attribution` what mounts report. May import fetch, datasets and store, but not
mounts.
"""
