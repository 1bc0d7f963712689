"""cachefsd: the per-node cache daemon (asyncio)."""
