"""Attributes of the job's objects, read without running code of the job."""

import inspect
from typing import Any


def fields(thing: Any) -> dict[str, Any]:
    """The attributes of an object, as they lie in it; no property and no `__getattr__` is run."""
    found = inspect.getattr_static(thing, "__dict__", None)
    if type(found).__name__ == "getset_descriptor":
        found = object.__getattribute__(thing, "__dict__")
    return found if type(found) is dict else {}
