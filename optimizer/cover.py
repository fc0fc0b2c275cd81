"""Cover: the least time of calls whose extents add up to n, for every n up to the mini-batch size."""

from __future__ import annotations

import numpy as np

from mucudnn.optimizer.option import Division, Option


class Cover:
    """T(n), the least seconds of calls whose extents add up to n, for every n up to `extent`.

    The programme T(b) = min over b1 of T1(b1) + T(b - b1), T(0) = 0 (mu-cuDNN, Oyama et al. 2018, equation 1), is an
    unbounded knapsack, so it can be solved call by call: with one more call of extent b and seconds t,
    T'(n) = min over k of k t + T(n - k b). Any k is a sum of different powers of two, so adding 1, 2, 4, ...
    calls in turn, each where it helps, reaches it.

    Of divisions that are equally fast the one with the fewest parts counts.
    """

    def __init__(self, extent: int, dim: str = "batch") -> None:
        self.extent = extent
        self._dim = dim
        self._seconds = np.full(extent + 1, np.inf)
        self._seconds[0] = 0.0
        self._parts = np.zeros(extent + 1, dtype=np.int64)
        # The call that was taken last in the best division of n, and how many times in a row.
        self._last = np.zeros(extent + 1, dtype=np.int64)
        self._times = np.zeros(extent + 1, dtype=np.int64)
        self._options: list[Option] = []

    @property
    def seconds(self) -> float:
        """T(extent); `math.inf` while no calls add up to it."""
        return float(self._seconds[self.extent])

    def add(self, option: Option) -> None:
        """Makes a call available, any number of times."""
        step, times = option.extent, 1
        if step > self.extent or (option.seconds, 1) >= (self._seconds[step], self._parts[step]):
            return  # calls that add up to this extent are known and as fast
        self._options.append(option)
        while step <= self.extent:
            seconds = times * option.seconds + self._seconds[:-step]
            parts = times + self._parts[:-step]
            now, before = self._seconds[step:], self._parts[step:]
            better = (seconds < now) | ((seconds == now) & (parts < before) & (seconds < np.inf))
            now[better] = seconds[better]
            before[better] = parts[better]
            self._last[step:][better] = len(self._options) - 1
            self._times[step:][better] = times
            step, times = 2 * step, 2 * times

    def division(self) -> Division:
        """The best division of the whole extent, its calls sorted by algorithm and descending extent.

        Raises:
            ValueError: while no calls add up to the extent.
        """
        if self.seconds == np.inf:
            raise ValueError(f"extent={self.extent}: the calls do not add up to it")
        chosen: list[Option] = []
        left = self.extent
        while left:
            option, times = self._options[self._last[left]], int(self._times[left])
            chosen += [option] * times
            left -= times * option.extent
        return Division(tuple(sorted(chosen, key=lambda option: (option.algorithm, -option.extent))), self._dim)
