import numpy
from numpy.typing import NDArray

def shuffle(order: NDArray[numpy.uint32], draws: NDArray[numpy.uint32], /) -> None: ...
