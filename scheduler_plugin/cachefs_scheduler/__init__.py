"""cachefs-scheduler: tells schedulers which nodes hold what a job reads (asyncio)."""
