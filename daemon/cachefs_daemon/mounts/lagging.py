"""Which mounts stay at a snapshot that is not the newest of their dataset."""

from collections.abc import Callable

import msgspec

from cachefs.messages import MountView
from cachefs.mount_spec import MountSpec


def with_lag(view: MountView, newest: Callable[[str], str]) -> MountView:
    """The *view*, with the answer whether the mount is behind.

    newest: gives the id of a dataset's current snapshot by the dataset's name; empty where there is none. A mount that
    follows refreshes is never behind, nor is one that was told which snapshot to show.
    """
    spec = MountSpec.parse(view.spec)
    if not spec.stays or spec.parts[0].digits is not None or not view.snapshot:
        return view
    current = newest(spec.parts[0].name)
    return msgspec.structs.replace(view, behind=bool(current) and current != view.snapshot)
