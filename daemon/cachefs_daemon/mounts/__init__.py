"""The mounts of this node: who is there, what they read, and the orders for what is pushed into their page caches.

May import datasets and store; knows no jobs.
"""
