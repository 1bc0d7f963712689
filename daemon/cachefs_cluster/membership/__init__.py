"""Cluster membership: this node's identity, records of all nodes, and the view that follows from them.

May import runtime and the section [cluster] of the configuration.
"""
