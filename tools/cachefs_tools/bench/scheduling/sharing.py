"""How links and disks are shared among those who read through them."""

from typing import Final

import numpy as np
import numpy.typing as npt

# Shape (n,), float64.
Numbers = npt.NDArray[np.float64]


# A part of a capacity, or of a rate.
ALIKE: Final = 0.02


def fair_rates(usage: npt.NDArray[np.float64], capacities: Numbers, most: Numbers) -> Numbers:
    """The rate of each reader: shape (readers,). All are raised together until something that they use is full, or they
    have what they want; the others go on (max-min fairness by progressive filling: Bertsekas and Gallager, "Data
    Networks", section 6.5.2).

    What is full or reached within ALIKE counts as full or reached, which takes a third of the rounds.

    usage: what a reader takes of each resource per unit of its rate: shape (readers, resources); most: what each
    reader wants, at most.
    """
    rates = np.zeros(len(most))
    going_on = (most > 0).astype(np.float64)
    left = capacities.astype(np.float64)
    uses = (usage > 0).astype(np.float64)
    while going_on.any():
        per_unit = going_on @ usage
        room = np.where(per_unit > 0, left / np.maximum(per_unit, 1e-30), np.inf)
        wanted = np.where(going_on > 0, most - rates, np.inf)
        step = min(float(room.min()), float(wanted.min()))
        rates += step * going_on
        left = np.maximum(left - step * per_unit, 0.0)
        full = (left <= ALIKE * capacities) & (per_unit > 0)
        going_on[(rates >= (1 - ALIKE) * most) | (uses @ full > 0)] = 0.0
    return rates
