"""cachefs-scheduler: tells schedulers which nodes hold a job's data (asyncio)."""
