"""How masks.py, quantize.py and scores.py time calls on the GPU. (growth.py has a loop of its own.)

- L2 is emptied before each call: FLUSH bytes are written. Events are around the call alone.
- Calls that are compared take turns. A call's time can depend on the call before it, so every second round runs in reverse order.
- The GPU spins while the host enqueues a round. So the host's time does not count, up to the longest spin.
"""

import statistics
import time

import torch

# The bytes that are written before a call. L2 has fewer.
FLUSH = 256 << 20
# How long the GPU spins before a round, in clocks: at least a millisecond, and at most some 50.
SPIN, LONGEST_SPIN = 2_000_000, 100_000_000
# A GPU's clock is at most so high. The spin is twice what the host needs for a round.
CLOCKS_PER_SECOND = 2e9


def flush_memory():
    """The memory that `timed` writes."""
    return torch.empty(FLUSH, dtype=torch.uint8, device="cuda")


def leaves(d_o, *tensors):
    """Tensors of their own, which gradients are asked of if there is a d_o."""
    return [x.detach().requires_grad_(d_o is not None) for x in tensors]


def recorded(function, inputs, d_o):
    """What is timed of a function that gives O, and that O: the function, or with a d_o the gradients of its inputs alone."""
    o = function()
    if d_o is None:
        return function, o
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True), o


def timed(call, flush):
    """Enqueues one call with L2 emptied before it, and returns the events around it."""
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    return start, end


def warm_up(calls, flush):
    """Runs each call three times, and returns the clocks to spin for while the host enqueues a round of them."""
    for call in calls:
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for call in calls:
        timed(call, flush)
    host = time.monotonic() - begin
    torch.cuda.synchronize()
    return min(max(SPIN, int(2 * host * CLOCKS_PER_SECOND)), LONGEST_SPIN)


def times(calls, rounds, flush):
    """Medians in us of calls that are timed in turn, with L2 emptied before each."""
    spin = warm_up(calls, flush)
    taken = [[] for _ in calls]
    for turn in range(rounds):
        torch.cuda._sleep(spin)
        order = list(enumerate(calls))[:: -1 if turn % 2 else 1]
        ends = [(at, *timed(call, flush)) for at, call in order]
        torch.cuda.synchronize()
        for at, start, end in ends:
            taken[at].append(start.elapsed_time(end) * 1e3)
    return [statistics.median(own) for own in taken]
