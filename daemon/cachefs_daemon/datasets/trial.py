"""Lists an origin to show what a dataset would be, without adding one."""

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from cachefs.messages import DatasetAddRequest, DatasetView, ListingPhase, ListingProgress
from cachefs.snapshot import Snapshot
from cachefs_daemon.datasets.listing import ListingRequest, build_snapshot
from cachefs_daemon.origin.base import OriginSettings


async def try_listing(
    request: DatasetAddRequest, settings: OriginSettings, directory: Path
) -> AsyncGenerator[ListingProgress, None]:
    """List the origin in *request*. Yields progress, and last a message with the dataset as it would be.

    directory: a place for the snapshot, which is removed. Raises the errors of the origin.
    """
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=directory) as scratch:
        listing = ListingRequest(
            url=request.url,
            block_size=settings.block_size,
            directory=scratch,
            options=request.options,
            settings=dataclasses.replace(settings, scratch=scratch),
        )
        async with contextlib.aclosing(build_snapshot(listing)) as steps:
            async for step in steps:
                yield step if isinstance(step, ListingProgress) else _found(request, step)


def _found(request: DatasetAddRequest, path: Path) -> ListingProgress:
    with contextlib.closing(Snapshot(path)) as snapshot:
        view = DatasetView(
            name=request.name,
            url=snapshot.url,
            snapshot=snapshot.id,
            path="",
            files=snapshot.files,
            directories=snapshot.directories,
            bytes=snapshot.bytes,
            created_ns=snapshot.created_ns,
            problems=snapshot.problem_count,
            archived=snapshot.archived,
        )
    return ListingProgress(phase=ListingPhase.BUILDING, objects=view.files, bytes=view.bytes, dataset=view)
