"""torch's own scaled_dot_product_attention on this library: the operators of its flash backend, for CUDA tensors.

torch's selector decides before us which calls reach the flash backend. Calls with attn_mask, and causal calls with
seqlen_q != seqlen_kv, go to another backend.

The operators below SDPA's own also take packed sequences, as nested tensors and torch.nn.attention.varlen have them; used
lengths of the keys; and ALiBi's slopes. torch hands the offsets to the backward pass, but neither the used lengths nor the
slopes. So these have no gradients.

Where there is dropout, the state of torch's random numbers is our own: a seed and an offset that are drawn from the default
generator of the device. torch hands it to the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

from . import abi
from ._dropout import state_of, words_of
from ._modified import slopes_of
from ._plans import FULL, Mask, lists_of, output_shapes, scale_of
from ._torch import backward_into, check_gradients, forward_into, is_recorded, readable
from ._varlen import _Run, lengths_on, readable_rows

NAME = "hopper_attention"


def _refuse(what: str, allowed: str) -> None:
    raise NotImplementedError(f"scaled_dot_product_attention on hopper_attention: {what}; allowed: {allowed}")


def _numbers(scale: Optional[float], causal: bool, left: Any = None, right: Any = None) -> tuple:
    # torch says "no bound" with None and with -1.
    left, right = (abi.UNBOUNDED if bound is None or bound < 0 else bound for bound in (left, right))
    if causal:
        right = 0
    if left == abi.UNBOUNDED and (causal or right == abi.UNBOUNDED):
        return (scale_of(scale), *(Mask(abi.MASK_CAUSAL, abi.BOTTOM_RIGHT, 0, 0) if causal else FULL))
    return (scale_of(scale), *Mask(abi.MASK_WINDOW, abi.BOTTOM_RIGHT, left, right))


def _check(debug_mask: bool = False, **others: Any) -> None:
    if debug_mask:
        _refuse("return_debug_mask", "False")
    for name, given in others.items():
        if given is not None:
            _refuse(f"{name} was given", "None")


class _Options(NamedTuple):
    """What a call has beside its operands."""

    numbers: tuple
    dropout: float = 0.0
    #: Offsets and used lengths in the order of `abi.LENGTHS`, and the lengths of the longest sequences.
    lists: tuple = (None, None, None, None)
    longest: tuple = (0, 0)
    slopes: Optional[torch.Tensor] = None

    def is_plain(self) -> bool:
        """Whether it is a call of dense operands with a mask alone."""
        return not self.dropout and self.slopes is None and all(given is None for given in self.lists)

    def run(self, deterministic: bool = False) -> _Run:
        """A pass of all but plain calls. Rows that belong to no sequence are filled."""
        fill_gaps = any(given is not None for given in self.lists)
        return _Run((*self.lists, *self.longest, fill_gaps, deterministic, *self.numbers, 0, 0.0, self.dropout))

    def tensors(self, state: torch.Tensor) -> dict:
        """What such a pass reads beside its operands, by the library's names."""
        given = {} if self.slopes is None else {"alibi_slopes": self.slopes}
        return {**given, "dropout_state": words_of(state)} if self.dropout else given


def _options(
    q: Any, k: Any, v: Any, numbers: tuple, dropout: float, cu_q: Any, cu_k: Any, longest: tuple, used: Any, slopes: Any
) -> _Options:
    """The options of a call with what torch's operators hand over. None stands for what is not given."""
    lists: tuple = (cu_q, cu_k, None, used)
    if any(given is not None for given in lists):
        lists = lengths_on(lists_of(q, k, v, lists), q.device)
    return _Options(numbers, dropout, lists, tuple(max(int(n), 0) for n in longest), slopes_of(slopes, q.device))


def _run_forward(q: Any, k: Any, v: Any, o: torch.Tensor, options: _Options, state: torch.Tensor) -> torch.Tensor:
    """Writes o. Tensors are [batch, seqlen, heads, head_dim], or packed. Gives the log-sum-exp."""
    q, k, v = map(readable_rows, (q, k, v))
    lse = q.new_empty(output_shapes(q.shape, v.shape)[1], dtype=torch.float32)
    into = o if readable_rows(o) is o else torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if options.is_plain():
        forward_into(q, k, v, into, lse, options.numbers)
    else:
        tensors = {"q": q, "k": k, "v": v, "o": into, "lse": lse, **options.tensors(state)}
        options.run()(abi.ForwardArgs, tensors)
    if into is not o:
        o.copy_(into)
    return lse


def _run_backward(
    d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, gradients: list, options: _Options, state: Any
) -> None:
    d_o, q, k, v, o = map(readable_rows, (d_o, q, k, v, o))
    into = [d if readable_rows(d) is d else torch.empty(d.shape, dtype=d.dtype, device=d.device) for d in gradients]
    deterministic = torch.are_deterministic_algorithms_enabled()
    if options.is_plain():
        backward_into(d_o, None, q, k, v, o, readable(lse), into, options.numbers, deterministic)
    else:
        tensors = {"q": q, "k": k, "v": v, "o": o, "lse": readable(lse), "d_o": d_o, **options.tensors(state)}
        tensors.update(zip(("d_q", "d_k", "d_v"), into))
        wanted = {"d_lse": 0, "deterministic": int(deterministic), "d_sinks": 0, "d_bias": 0}
        options.run(deterministic)(abi.BackwardArgs, tensors, **wanted)
    for wanted, written in zip(gradients, into):
        if written is not wanted:
            wanted.copy_(written)


def _state(dropout: float, device: torch.device) -> torch.Tensor:
    """The seed and the offset of dropout, as torch hands them to the backward pass. Any numbers without dropout."""
    if not dropout:
        return torch.empty((2,), dtype=torch.uint64, device=device)
    return state_of(None, None, device).view(torch.uint64)


def _unused(q: torch.Tensor) -> tuple:
    """Outputs of torch's own kernel that nobody reads: a part of the random numbers, and the mask of a debug run."""
    return torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty((0,))


def _check_gradients(q: Any, k: Any, v: Any, options: _Options, state: torch.Tensor) -> None:
    """Refuses, in the forward pass, what has no backward pass: on the device, or because torch leaves out what it needs."""
    for name, given in (("seqused_k", options.lists[3]), ("alibi_slopes", options.slopes)):
        if given is not None:
            _refuse(f"{name} in a call that autograd records, whose backward pass torch gives no {name}", "torch.no_grad()")
    if options.is_plain():
        check_gradients(q, k, v, options.numbers)
    elif q.is_cuda:
        options.run().check_gradients(q, k, v, options.tensors(state))


def _swapped(*tensors: torch.Tensor) -> tuple:
    return tuple(t.transpose(1, 2) for t in tensors)


def sdpa_forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Optional[float] = None,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention, on [batch, heads, seqlen, head_dim]."""
    _check(return_debug_mask)
    # Strides as torch's own kernels give them. Compiled code relies on them.
    o = (
        torch.empty_like(query)
        if query.shape[-1] == value.shape[-1]
        else query.new_empty((*query.shape[:3], value.shape[3]))
    )
    options = _Options(_numbers(scale, is_causal), dropout_p)
    state = _state(dropout_p, query.device)
    if is_recorded(query, key, value):
        _check_gradients(*_swapped(query, key, value), options, state)
    lse = _run_forward(*_swapped(query, key, value, o), options, state)
    return o, lse, None, None, query.shape[2], key.shape[2], state, *_unused(query)


def sdpa_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: Optional[float] = None,
) -> tuple:
    """aten::_scaled_dot_product_flash_attention_backward."""
    _check(cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k)
    gradients = [torch.empty_like(t) for t in (query, key, value)]
    operands, into = _swapped(grad_out, query, key, value, out), list(_swapped(*gradients))
    _run_backward(*operands, logsumexp, into, _Options(_numbers(scale, is_causal), dropout_p), philox_seed)
    return tuple(gradients)


def flash_forward(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: Optional[float] = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    **more: Any,
) -> tuple:
    """aten::_flash_attention_forward, on [batch, seqlen, heads, head_dim].

    Nested tensors and torch.nn.attention.varlen come this way with cum_seq_q and cum_seq_k, int32 [sequences + 1]. The
    tensors are then [total, heads, head_dim]. max_q and max_k are hints for speed. seqused_k, [batch], has the used
    lengths of the keys, of packed and of other ones. alibi_slopes are [heads_q] or [batch, heads_q].
    """
    _check(return_debug_mask, **more)
    numbers = _numbers(scale, is_causal, window_size_left, window_size_right)
    lengths = (cum_seq_q, cum_seq_k, (max_q, max_k), seqused_k)
    options = _options(query, key, value, numbers, dropout_p, *lengths, alibi_slopes)
    state = _state(dropout_p, query.device)
    if is_recorded(query, key, value):
        _check_gradients(query, key, value, options, state)
    o = torch.empty_like(query)
    lse = _run_forward(query, key, value, o, options, state)
    return o, lse, state, *_unused(query)


def flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: Optional[float] = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
) -> tuple:
    """aten::_flash_attention_backward."""
    gradients = [torch.empty_like(t) for t in (query, key, value)]
    numbers = _numbers(scale, is_causal, window_size_left, window_size_right)
    options = _options(query, key, value, numbers, dropout_p, cum_seq_q, cum_seq_k, (max_q, max_k), None, None)
    _run_backward(grad_out, query, key, value, out, logsumexp, gradients, options, rng_state)
    return tuple(gradients)


class _Overrides:
    """The registered operators, as torch keeps them while they are active."""

    def __init__(self, key: str = "CUDA") -> None:
        library = torch.library.Library("aten", "IMPL", key)
        library.impl("_scaled_dot_product_flash_attention", sdpa_forward, key)
        library.impl("_scaled_dot_product_flash_attention_backward", sdpa_backward, key)
        library.impl("_flash_attention_forward", flash_forward, key)
        library.impl("_flash_attention_backward", flash_backward, key)
        self._library: Any = library

    def remove(self) -> None:
        """Puts torch's own kernels back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


class Handle:
    """Undoes register_sdpa."""

    def remove(self) -> None:
        """Puts torch's own kernels back. Calling it again does nothing."""
        registry = torch.nn.attention
        if registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()


def register() -> Handle:
    """See hopper_attention.register_sdpa."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"register_sdpa: torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; torch 2.11 has"
        )
    import warnings

    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_Overrides)
    with warnings.catch_warnings():
        # torch warns that kernels are overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        torch.nn.attention.activate_flash_attention_impl(NAME)
    return Handle()
