"""Attributes of the job's objects, read as they lie there: no property, no `__getattr__` and no other code is run."""

from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


def fields(thing: Any) -> dict[str, Any]:
    """The object's own dictionary of attributes; empty where it has none, or a property in its place."""
    for kind in classes_of(thing):
        described = members_of(kind).get("__dict__")
        if described is not None and type(described) is not GetSetDescriptorType:
            return {}
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def own(thing: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes that lie in the object: in its dictionary, and in slots."""
    yield from ((name, value) for name, value in list(fields(thing).items()) if type(name) is str)
    for kind in classes_of(thing):
        for name, member in list(members_of(kind).items()):
            if type(member) is MemberDescriptorType and module_of(kind) != "builtins":
                try:
                    value = member.__get__(thing)
                except AttributeError:
                    continue
                yield name, value


def classes_of(thing: Any) -> tuple[type, ...]:
    """The class of an object, and those that it is derived from. The class of a class may have code of the job's, so
    nothing is asked of a class itself."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(type(thing))
    return found


def members_of(kind: type) -> Any:
    """What a class itself has, by name."""
    return type.__dict__["__dict__"].__get__(kind)


def module_of(kind: type) -> str:
    """The module of a class, and empty where it is no text."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if type(module) is str else ""
