"""Advises schedulers where and when a job should run: what nodes hold of its data, how long it would wait on each,
which nodes its ranks go to, and how many jobs may share a cached copy. May import cachefs.planning.cluster and what is
below it.

The scheduler has the last word. Advice is computed from facts that may be old or incomplete: the less is known of a
node, the less it counts, and each answer tells what it is based on.
"""
