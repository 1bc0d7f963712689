"""A cluster on one machine: hosts in network namespaces, the network between them, and nodes on them.

Tests, benchmarks and the demo use it. Nothing of a lab has a name outside of it: its bridge, links, rules and mounts
are in namespaces that live as long as its processes. So any number of labs run at once, and the kernel cleans up after
a killed one. Namespaces need root; nodes on loopback (`lab.host.LOOPBACK`) do not.
"""
