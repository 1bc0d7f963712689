"""Divides links and disks among their readers."""

from typing import Final

import numpy as np
import numpy.typing as npt

# Shape (n,), float64.
FloatVector = npt.NDArray[np.float64]


# Tolerance, as a part of a capacity or a rate.
TOLERANCE: Final = 0.02


def fair_rates(usage: npt.NDArray[np.float64], capacities: FloatVector, most: FloatVector) -> FloatVector:
    """Return the rate of each reader: shape (readers,). All rates rise together until a resource is full or a reader
    has its maximum; the others go on (max-min fairness by progressive filling: Bertsekas and Gallager, "Data Networks",
    section 6.5.2). Values within TOLERANCE count as full or reached, which takes a third of the rounds.

    usage: a reader's use of each resource per unit of its rate: shape (readers, resources); most: each reader's
    maximum.
    """
    rates = np.zeros(len(most))
    going_on = np.flatnonzero(most > 0)
    # No matrix products: a BLAS would divide each of these small ones among threads, which costs more than it saves.
    used = np.flatnonzero(usage.any(axis=0))
    usage, capacities = usage[:, used], capacities[used].astype(np.float64)
    left = capacities.copy()
    while len(going_on):
        of_these = usage[going_on]
        per_unit = of_these.sum(axis=0)
        room = left / np.maximum(per_unit, 1e-30)
        step = min(float(room[per_unit > 0].min(initial=np.inf)), float((most - rates)[going_on].min()))
        rates[going_on] += step
        left = np.maximum(left - step * per_unit, 0.0)
        full = (left <= TOLERANCE * capacities) & (per_unit > 0)
        done = (rates >= (1 - TOLERANCE) * most)[going_on] | (of_these[:, full] > 0).any(axis=1)
        going_on = going_on[~done]
    return rates
