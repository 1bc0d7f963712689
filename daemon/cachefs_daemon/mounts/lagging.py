"""Marks mounts that stay at a snapshot older than the newest of their dataset."""

from collections.abc import Callable

import msgspec

from cachefs.messages import MountView
from cachefs.mount_spec import MountSpec


def with_lag(view: MountView, newest: Callable[[str], str]) -> MountView:
    """Return the *view* with `behind` set.

    newest: returns the id of a dataset's current snapshot by the dataset's name; "" where there is none. A mount that
    follows refreshes is never behind, nor is one with a snapshot in its spec.
    """
    spec = MountSpec.parse(view.spec)
    if not spec.is_fixed or spec.datasets[0].digits is not None or not view.snapshot:
        return view
    current = newest(spec.datasets[0].name)
    return msgspec.structs.replace(view, behind=bool(current) and current != view.snapshot)
