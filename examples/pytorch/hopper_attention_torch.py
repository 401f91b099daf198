"""Attention over torch tensors, through Hopper Attention's shared library.

    o = attention(q, k, v, causal=True)            # [batch, seqlen, heads, head_dim], on q's device and torch's current stream

f16 and bf16 on a Hopper GPU; f32 too on the CPU. Autograd records it: o and the log-sum-exp have gradients, of the first order.
"""

import collections
import threading

import torch

import hopper_attention as hattn

DTYPES = {torch.float16: hattn.F16, torch.bfloat16: hattn.BF16, torch.float32: hattn.F32}
# Plans are small, and making one costs a few microseconds once its kernel is loaded: enough for the shapes in use at a time.
PLANS_KEPT = 256


class PlanCache:
    """The plans that were used last, by all that a plan is a function of. Threads share them."""

    def __init__(self, library, capacity=PLANS_KEPT):
        self._library, self._capacity = library, capacity
        self._plans = collections.OrderedDict()
        self._lock = threading.Lock()
        #: How many plans were made.
        self.made = 0

    def __len__(self):
        return len(self._plans)

    def get(self, device, problem):
        """The plan for a ForwardProblem or a BackwardProblem."""
        key = (device, type(problem), bytes(problem))
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                # Under the lock, so that threads which come at once with one shape make one plan.
                plan = self._library.plan(problem, device)
                self.made += 1
                self._plans[key] = plan
                # Whoever runs the oldest plan right now holds it.
                while len(self._plans) > self._capacity:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(key)
            return plan


_loaded = None
_loading = threading.Lock()


def load(path=None):
    """Loads the library (see hopper_attention.Library) and gives its plan cache. `attention` does so by itself, without a path."""
    global _loaded
    with _loading:
        if _loaded is None or path is not None:
            _loaded = PlanCache(hattn.Library(path))
        return _loaded


def attention(q, k, v, causal=False, window=None, top_left=False, scale=None, return_lse=False):
    """softmax(mask(scale * q k^T)) v.

    q is [batch, seqlen_q, heads_q, head_dim], k and v [batch, seqlen_kv, heads_kv, head_dim]; heads_q is a multiple of heads_kv,
    and v's head_dim may differ. Strides may be any with a 1 at the end (on a GPU, multiples of 16 bytes elsewhere): a transposed
    [batch, heads, seqlen, head_dim] is read where it lies. Nothing is copied; what the library does not take, it refuses.

    causal: a query sees the keys up to its own. The last query's is the last key, or the first's the first with top_left.
    window: (left, right), keys seen before and after a query's own; None for all. With causal, both apply.
    scale: 1 / sqrt(head_dim) when None.

    Gives o, [batch, seqlen_q, heads_q, v's head_dim] and dense; with return_lse also the log-sum-exp of the scores, f32
    [batch, heads_q, seqlen_q], -inf for a query that sees no key (its o is 0).

    Where autograd records it, o and the log-sum-exp are kept for the gradients of q, k and v, which come dense and in their
    type. Under torch.use_deterministic_algorithms they are the same bits every time.

    To be captured in a CUDA graph, a shape must have been computed once before: that loads its kernel.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, t in tensors.items():
        if t.ndim != 4:
            raise ValueError(f"{name}: {t.ndim} dimensions; allowed: 4, [batch, seqlen, heads, head_dim]")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name}: {t.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    batch, seqlen_q, heads_q, head_dim_qk = q.shape
    problem = hattn.ForwardProblem(
        dtype=DTYPES[q.dtype],
        lse=int(return_lse or recorded),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=k.shape[1],
        heads_q=heads_q,
        heads_kv=k.shape[2],
        head_dim_qk=head_dim_qk,
        head_dim_vo=v.shape[3],
        softmax_scale=_scale(scale),
        **_mask(causal, window, top_left),
    )
    o, lse = _Attention.apply(q, k, v, problem) if recorded else _forward(q, k, v, problem)
    return (o, lse) if return_lse else o


def _forward(q, k, v, problem):
    # Made here, as any operator of torch does: the allocator hands memory of a stream to that stream again, so that what is
    # dropped after this call is not used by another before the kernel is done. In a capture it comes from the graph's pool.
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device) if problem.lse else None
    _run(problem, q.device, q=q, k=k, v=v, o=o, lse=lse)
    return o, lse


def _run(problem, device, **tensors):
    """Runs the problem's plan with a workspace on the device's current stream."""
    plan = load().get(_ordinal(device), problem)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device) if plan.workspace_bytes else None
    plan.run(
        **{name: None if t is None else _describe(t) for name, t in tensors.items()},
        workspace=None if workspace is None else workspace.data_ptr(),
        workspace_bytes=plan.workspace_bytes,
        stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None,
    )


class _Attention(torch.autograd.Function):
    """o and the log-sum-exp, for autograd."""

    @staticmethod
    def forward(ctx, q, k, v, problem):
        o, lse = _forward(q, k, v, problem)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.problem = problem
        # An output that nobody used has the gradient None then, instead of zeros.
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_lse):
        q, k, v, o, lse = ctx.saved_tensors
        if d_o is None:
            d_o = torch.zeros_like(o)
        deterministic = int(torch.are_deterministic_algorithms_enabled())
        problem = hattn.BackwardProblem.of(ctx.problem, d_lse=int(d_lse is not None), deterministic=deterministic)
        d_q, d_k, d_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        d_lse = None if d_lse is None else _readable(d_lse)
        _run(problem, q.device, q=q, k=k, v=v, o=o, lse=lse, d_o=_readable(d_o), d_lse=d_lse, d_q=d_q, d_k=d_k, d_v=d_v)
        # What was not asked for is dropped: the library computes the three together.
        return *(d if wanted else None for d, wanted in zip((d_q, d_k, d_v), ctx.needs_input_grad)), None


def _readable(gradient):
    """A gradient as the library reads it. Nobody chose its strides, which may be 0 throughout (as of o.sum()), nor where it
    lies: unlike an argument of the user's, it is copied where that does not do."""
    gradient = gradient.contiguous()
    return gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()


def _ordinal(device):
    """A torch device as the library counts: both go by the driver's order."""
    if device.type == "cpu":
        return hattn.CPU
    if device.type == "cuda":
        return device.index
    raise ValueError(f"a tensor on {device}; allowed: cpu, cuda")


def _describe(t):
    # A dimension of one element may have any stride in torch; the library wants the innermost to be 1 all the same.
    stride = t.stride() if t.shape[-1] != 1 else (*t.stride()[:-1], 1)
    return hattn.tensor(t.data_ptr(), DTYPES[t.dtype], t.shape, stride, _ordinal(t.device))


def _scale(scale):
    """The scale as the ABI has it: 0 there means the default, and is nothing that a caller may ask for."""
    if scale is None:
        return 0.0
    if scale == 0:
        raise ValueError("scale: 0; allowed: finite and above 0, or None for 1 / sqrt(head_dim)")
    return float(scale)


def _mask(causal, window, top_left):
    corner = hattn.TOP_LEFT if top_left else hattn.BOTTOM_RIGHT
    if window is None:
        # The corner says nothing without a mask; the same plan then serves both.
        return {"mask": hattn.MASK_CAUSAL, "corner": corner} if causal else {"mask": hattn.MASK_FULL}
    left, right = window
    for name, keys in (("left", left), ("right", right)):
        # The ABI's word for "all" is -1; here it is None alone, so that a difference gone negative is noticed.
        if keys is not None and keys < 0:
            raise ValueError(f"window: {name} {keys}; allowed: 0 and above, or None for all keys")
    if causal:
        right = 0
    bound = {"window_left": left, "window_right": right}
    return {"mask": hattn.MASK_WINDOW, "corner": corner, **{n: hattn.UNBOUNDED if b is None else b for n, b in bound.items()}}
