"""Commands of administrators on cached data: warm, pin, limit, evict, list and verify.

May import fetch, datasets and store; does not depend on jobs or mounts.
"""
