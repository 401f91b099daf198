"""Prepared calls: a plan with its structs filled in, so that a repeated call sets addresses and nothing else."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, Hashable, Optional, Sequence, Tuple

from . import abi
from ._plans import PLANS_KEPT, plans

# name of the argument -> dtype, device, shape, strides
Description = Tuple[int, int, Sequence[int], Sequence[int]]


class Call:
    """A plan and its arguments. The structs are overwritten by each run, so one thread may use it at a time."""

    __slots__ = ("plan", "workspace_bytes", "_args", "_tensors", "_pointer", "_run", "_handle", "_check")

    def __init__(self, args: Any, problem: Any, device: int, tensors: dict) -> None:
        self.plan = plans().get(device, problem)
        self.workspace_bytes: int = self.plan.workspace_bytes
        self._tensors = [
            abi.tensor(0, dtype, shape, stride, place) for dtype, place, shape, stride in tensors.values()
        ]
        pointers = dict(zip(tensors, map(ctypes.pointer, self._tensors)))
        self._args = args(workspace_bytes=self.workspace_bytes, **pointers)
        self._pointer = ctypes.byref(self._args)
        self._run, self._handle, self._check = self.plan._entries.run, self.plan._handle, self.plan._library.check

    def run(self, addresses: Sequence[int], workspace: Optional[int], stream: Optional[int]) -> None:
        """Runs with the addresses of the tensors, in the order in which they were described."""
        for struct, address in zip(self._tensors, addresses):
            struct.data = address
        self._args.workspace = workspace
        status = self._run(self._handle, self._pointer, stream)
        if status:
            self._check(status)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.calls: dict = {}


_per_thread = _PerThread()


def prepared(key: Hashable, make: Callable[[], Call]) -> Call:
    """This thread's call for a key. `make` makes it the first time."""
    calls = _per_thread.calls
    call = calls.get(key)
    if call is None:
        call = make()
        if len(calls) >= PLANS_KEPT:
            # The one that was made first. Dictionaries keep their order.
            del calls[next(iter(calls))]
        calls[key] = call
    return call
