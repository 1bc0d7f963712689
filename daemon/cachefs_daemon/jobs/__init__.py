"""The jobs that have published how they will read: who they are, where each of their consumers is, and who waited.

`registry` is the door for what jobs say, `attribution` for what mounts report. May import fetch, datasets and store;
knows no mounts.
"""
