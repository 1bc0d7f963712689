"""Where a job should run, and when: what nodes hold of its data, the seconds it would wait on each of them, which nodes
its ranks go to, and how many jobs may share a cached copy. May import cachefs.planning.cluster and what is below it.

All of it is advice to a scheduler that has the last word. So it is computed from facts that may be old or incomplete:
the less is known of a node, the less it counts, and what an answer was made of is told with it.
"""
