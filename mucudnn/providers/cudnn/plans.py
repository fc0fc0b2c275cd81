"""A cache of cuDNN's plans: which algorithms serve which problems, their workspaces, and the plans in use."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

from mucudnn.process import Recent, renewed
from mucudnn.providers.cudnn.launch import Prepared
from mucudnn.providers.cudnn.library import CudnnError

MOST_KNOWN = 65536  # The number of plans of which the workspace, or the refusal, is cached.

MOST_RECENT = 64
"""The number of unreferenced plans that are kept: a plan that was just asked for its workspace is often run next."""


class Plans:
    """Makes plans by their keys, each once as long as it is referenced.

    A finalized plan takes about 200 KiB, and planning one layer asks for thousands. So what is remembered of each is
    its workspace, or cuDNN's refusal; the plan itself lives as long as the schedule that runs it.
    """

    def __init__(self, make: Callable[..., Prepared]) -> None:
        """
        ``make``: the plan of a key's elements; raises CudnnError where there is none. Called by one thread at a time.
        """
        self.made = 0  # How many were made so far, those that cuDNN refused among them.
        self._make = make
        self._lock = renewed(threading.RLock())
        self._known: Recent[tuple[Hashable, ...], int | tuple[str, int, str]] = Recent(MOST_KNOWN)
        self._alive: weakref.WeakValueDictionary[tuple[Hashable, ...], Prepared] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[tuple[Hashable, ...], Prepared] = OrderedDict()

    def workspace(self, *key: Hashable) -> int:
        """Bytes that the plan of a key needs. Raises CudnnError where there is no such plan."""
        known = self._known.get(key)
        if known is None:
            return self.plan(*key).workspace
        if isinstance(known, tuple):
            raise CudnnError(*known)
        return known

    def plan(self, *key: Hashable) -> Prepared:
        """The plan of a key, which lives as long as the caller keeps it. Raises CudnnError where there is none."""
        with self._lock:
            known = self._known.get(key)
            if isinstance(known, tuple):
                raise CudnnError(*known)
            found = self._alive.get(key)
            if found is None:
                self.made += 1
                try:
                    found = self._make(*key)
                except CudnnError as error:
                    self._known[key] = error.what, error.status, error.said
                    raise
                self._known[key] = found.workspace
                self._alive[key] = self._recent[key] = found
                if len(self._recent) > MOST_RECENT:
                    self._recent.popitem(last=False)
            return found
