"""Reads attributes of the job's objects without running a property, `__getattr__` or any other code of the job."""

from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

# Stands for an attribute that an object does not have, or that only code of the job can compute.
MISSING: Final = object()


def attributes_of(thing: Any) -> dict[str, Any]:
    """Return the object's `__dict__`; empty where the object has none, or a property in its place."""
    for kind in classes_of(thing):
        described = members_of(kind).get("__dict__")
        if described is not None and type(described) is not GetSetDescriptorType:
            return {}
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def stored_attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of attributes stored in the object: in its `__dict__` and in slots."""
    yield from ((name, value) for name, value in list(attributes_of(thing).items()) if type(name) is str)
    for kind in classes_of(thing):
        for name, member in list(members_of(kind).items()):
            if type(member) is MemberDescriptorType and module_of(kind) != "builtins":
                try:
                    value = member.__get__(thing)
                except AttributeError:
                    continue
                yield name, value


def stored_or_missing(thing: Any, name: str) -> Any:
    """Return one attribute stored in an object or in its class; MISSING where code would compute it."""
    if class_member(type(thing), "__getattribute__") is not object.__getattribute__:
        return MISSING
    found = class_member(type(thing), name)
    if type(found) is MemberDescriptorType:
        try:
            return found.__get__(thing)
        except AttributeError:
            return MISSING
    if class_member(type(found), "__set__") is not MISSING:
        return MISSING  # a property
    own = attributes_of(thing)
    if name in own:
        return own[name]
    return MISSING if class_member(type(found), "__get__") is not MISSING else found  # a method, or a default value


def stored_or_none(thing: Any, name: str) -> Any:
    """Return one attribute like `stored_or_missing`, with None in place of MISSING."""
    value = stored_or_missing(thing, name)
    return None if value is MISSING else value


def class_member(kind: type, name: str) -> Any:
    """Return the member *name* of a class or of its bases, in method resolution order; MISSING where none has it."""
    for owner in type.__dict__["__mro__"].__get__(kind):
        members = members_of(owner)
        if name in members:
            return members[name]
    return MISSING


def classes_of(thing: Any) -> tuple[type, ...]:
    """Return the class of an object and its bases. Runs no code of a metaclass of the job's."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(type(thing))
    return found


def members_of(kind: type) -> Any:
    """Return the namespace of a class itself, without its bases."""
    return type.__dict__["__dict__"].__get__(kind)


def module_of(kind: type) -> str:
    """Return the module name of a class; "" where `__module__` is not a string."""
    module = type.__dict__["__module__"].__get__(kind)
    return module if type(module) is str else ""
