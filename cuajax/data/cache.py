"""What one process remembers of a store: recent groups and images, and a wake-up for those who wait."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any, ClassVar, Generic, TypeVar

from cuajax.types import Group

V = TypeVar("V")

KNOWN = 200_000  # image hashes remembered as stored


class Bounded(Generic[V]):
    """A least-recently-used map bounded by bytes; safe to share between threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._items: OrderedDict[Any, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> V | None:
        """The value, or None."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: Any, value: V, size: int) -> None:
        """Remembers a value of `size` bytes; drops the oldest beyond the limit."""
        if size > self._limit:
            return
        with self._lock:
            old = self._items.pop(key, None)
            self._size += size - (old[1] if old else 0)
            self._items[key] = (value, size)
            while self._size > self._limit:
                self._size -= self._items.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._items.clear()
            self._size = 0


class Hub:
    """Shared by all handles on one store in this process."""

    _hubs: ClassVar[weakref.WeakValueDictionary[str, Hub]] = weakref.WeakValueDictionary()
    _guard = threading.Lock()

    def __init__(self, cache_bytes: int) -> None:
        self.writing = threading.RLock()  # one transaction at a time; other processes are met by retries
        self.changed = threading.Condition()
        self.seq = 0  # groups known to be committed
        self.groups: Bounded[Group] = Bounded(cache_bytes // 2)
        self.images: Bounded[Any] = Bounded(cache_bytes // 2)
        self.known: dict[str, int] = {}  # stored images of `generation`: hash -> links to a whole image
        self.generation = ""

    @classmethod
    def of(cls, prefix: str, cache_bytes: int) -> Hub:
        """The hub of a store; a handle without cache gets its own, so that it reads what is on disk."""
        if not cache_bytes:
            return cls(0)
        with cls._guard:
            hub = cls._hubs.get(prefix)
            if hub is None:
                hub = cls._hubs[prefix] = cls(cache_bytes)
            return hub

    def announce(self, seq: int) -> None:
        """Wakes the waiters: groups below `seq` are committed."""
        with self.changed:
            self.seq = max(self.seq, seq)
            self.changed.notify_all()

    def at(self, generation: str) -> dict[str, int]:
        """The images known to be stored in this generation (bounded: the oldest half is forgotten)."""
        if generation != self.generation:
            self.known, self.generation = {}, generation
        elif len(self.known) > KNOWN:
            self.known = dict(list(self.known.items())[KNOWN // 2 :])
        return self.known
