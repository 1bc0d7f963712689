"""The jobs that have published how they will read: who they are, where each of their consumers is, and who waited.

May import fetch, datasets and store; knows no mounts.
"""
