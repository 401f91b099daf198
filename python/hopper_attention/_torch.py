"""attention() on torch tensors, and the operators behind it.

The operators hopper_attention::forward, forward_lse and backward, and those with sinks (_sinks.py), are registered with
torch.library. So torch.compile traces them as one node each, and autograd records them. Two implementations exist: _torch_op.so, if the package has
the file and torch takes it, and the ctypes functions below.

An eager call on a GPU takes a shorter way, if it can: through an operator of torch's own. That costs the host less,
since the arguments and the gradient of such an operator are C++ that was generated for it. See _DIRECT.
"""

from __future__ import annotations

import ctypes
import operator
import os
from typing import Any, Optional, Tuple, Union

import torch

from . import abi
from ._calls import Call, prepared
from ._plans import FULL, Window, margin_of, mask_of, scale_of

#: The oldest torch that this package works with.
OLDEST = (2, 8)

DTYPES = {torch.float16: abi.F16, torch.bfloat16: abi.BF16, torch.float32: abi.F32, torch.float8_e4m3fn: abi.E4M3}
_OPERANDS = (torch.float16, torch.bfloat16, torch.float32)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window: Window = None,
    top_left: bool = False,
    scale: Optional[float] = None,
    return_lse: bool = False,
    sm_margin: int = 0,
) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
    """See hopper_attention.attention."""
    if torch.compiler.is_compiling():
        return _traced(q, k, v, _numbers_of(causal, window, top_left, scale, sm_margin), return_lse)
    if type(window) is list:
        window = tuple(window)
    options = (causal, window, top_left, scale, sm_margin)
    try:
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        if (
            _direct is not None
            and not return_lse
            and _takes_direct(q)
            and type(q) in _PLAIN
            and type(k) in _PLAIN
            and type(v) in _PLAIN
            and not torch._C._len_torch_dispatch_stack()
        ):
            is_causal, mask, scale = _direct_options[options]
            if (
                not torch.is_grad_enabled()
                or q.requires_grad
                or k.requires_grad
                or v.requires_grad
                # A tensor of torch.func's transformations may require a gradient further down.
                or torch._C._functorch.peek_interpreter_stack() is not None
            ):
                return _direct(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
            # Without gradients the operator leaves out the log-sum-exp, and its memory.
            torch._C._set_grad_enabled(False)
            try:
                return _direct(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
            finally:
                torch._C._set_grad_enabled(True)
        numbers = _numbers[options]
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            o, lse = _Recorded.apply(q, k, v, numbers)
        else:
            # Below autograd, where register_autograd's Python would run for nothing.
            with _below():
                if not return_lse:
                    return _forward_op(q, k, v, *numbers)
                o, lse = _forward_lse_op(q, k, v, *numbers)
    except Exception as error:
        # The operators have refused, and launched nothing. What was wrong is looked for now, to keep the usual call
        # short.
        _check(q, k, v)
        raise _in_words(error) from None
    return (o, lse) if return_lse else o


def _numbers_of(causal: bool, window: Window, top_left: bool, scale: Optional[float], sm_margin: int) -> tuple:
    return (scale_of(scale), *mask_of(causal, window, top_left), margin_of(sm_margin))


def _backward_numbers(numbers: tuple, deterministic: bool) -> tuple:
    """The numbers in the order of the operator backward, which has the margin at its end."""
    return (*numbers[:5], deterministic, *numbers[5:])


def _direct_options_of(causal: bool, window: Window, top_left: bool, scale: Optional[float], sm_margin: int) -> tuple:
    """is_causal, attn_mask and scale of _DIRECT. attn_mask has what is_causal cannot say."""
    _, *mask = _numbers_of(causal, window, top_left, scale, sm_margin)
    scale = None if scale is None else float(scale)
    if mask == [*FULL, 0]:
        return False, None, scale
    if mask == [abi.MASK_CAUSAL, abi.BOTTOM_RIGHT, 0, 0, 0]:
        return True, None, scale
    # Autograd saves the tensor, which one of inference mode does not allow.
    with torch.inference_mode(False):
        return False, torch.tensor(mask, dtype=torch.int64, device="cpu"), scale


class _Kept(dict):
    """What `make` gave for the options that were used.

    There are a few in a program. One that makes up scales starts again.
    """

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, options: tuple) -> tuple:
        made = self._make(*options)
        if len(self) >= 1024:
            self.clear()
        # A tensor that was made inside torch.func's transformations is one of theirs.
        if torch._C._functorch.peek_interpreter_stack() is None:
            self[options] = made
        return made


_numbers = _Kept(_numbers_of)
_direct_options = _Kept(_direct_options_of)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.is_nested:
            allowed = "dense tensors, or q, k and v of the layout torch.jagged"
            raise TypeError(f"{name}: a nested tensor of the layout {t.layout}; allowed: {allowed}")
        if t.ndim != 4:
            raise ValueError(f"{name}: {t.ndim} dimensions; allowed: 4, [batch, seqlen, heads, head_dim]")
        _check_operand(name, t)


def is_jagged(t: Any) -> bool:
    """Whether a tensor is nested, with the layout torch.jagged."""
    return bool(t.is_nested) and t.layout == torch.jagged


def _check_operand(name: str, t: torch.Tensor) -> None:
    """Refuses a type or a device that no call takes."""
    if t.dtype not in _OPERANDS:
        hint = "; quantised operands go to attention_fp8" if t.dtype in DTYPES else ""
        raise TypeError(f"{name}: {t.dtype}; allowed: {', '.join(map(str, _OPERANDS))}{hint}")
    if t.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: a tensor on {t.device}; allowed: cpu, cuda")


def _autocast(q: Any, k: Any, v: Any) -> tuple:
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def is_recorded(*tensors: Any) -> bool:
    """Whether autograd records a call on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _traced(q: Any, k: Any, v: Any, numbers: tuple, return_lse: bool) -> Any:
    """What torch.compile sees: the operators, with the gradient that register_autograd gave them."""
    _check(q, k, v)
    q, k, v = _autocast(q, k, v)
    if not (return_lse or is_recorded(q, k, v)):
        return torch.ops.hopper_attention.forward(q, k, v, *numbers)
    o, lse = torch.ops.hopper_attention.forward_lse(q, k, v, *numbers)
    return (o, lse) if return_lse else o


class _Recorded(torch.autograd.Function):
    """What eager calls record that _DIRECT does not serve: on the CPU, and with the log-sum-exp.

    It takes a third of the time of register_autograd's Python, which does the same.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, numbers: tuple) -> Any:  # type: ignore[override]
        check_gradients(q, k, v, numbers)
        with _below():
            o, lse = _forward_lse_op(q, k, v, *numbers)
        ctx.save_for_backward(q, k, v, o, lse)
        # An output that nobody used then has the gradient None, and not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.numbers = numbers
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Any, d_lse: Any) -> Any:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        if d_o is None:
            d_o = torch.zeros_like(o)
        numbers = _backward_numbers(ctx.numbers, torch.are_deterministic_algorithms_enabled())
        if torch.is_grad_enabled():
            # create_graph: the operator's own gradient refuses the second derivative, if it is used.
            return *_backward_op(d_o, d_lse, q, k, v, o, lse, *numbers), None
        with _below():
            return *_backward_op(d_o, d_lse, q, k, v, o, lse, *numbers), None


def call(operator: Any, recorded: bool, *arguments: Any) -> Any:
    """Calls an operator; below autograd where nothing is recorded, as register_autograd's Python would run for nothing."""
    try:
        if recorded or torch.compiler.is_compiling():
            return operator(*arguments)
        with _below():
            return operator(*arguments)
    except RuntimeError as error:
        raise _in_words(error) from None


def _in_words(error: Exception) -> Exception:
    """An error of the compiled operators as HattnError. They put the status's name at the end of the text."""
    if isinstance(error, abi.HattnError) or not isinstance(error, RuntimeError):
        return error
    text, separator, name = str(error).split("\n", 1)[0].rpartition(" (HATTN_ERROR_")
    status = getattr(abi, "ERROR_" + name.rstrip(")"), None)
    return abi.HattnError(status, f"HATTN_ERROR_{name[:-1]}", text) if separator and status else error


# -- the ctypes implementation


def ordinal(device: torch.device) -> int:
    """A torch device as the library counts. Both follow the driver's order."""
    if device.type == "cpu":
        return abi.CPU
    if device.type != "cuda":
        raise ValueError(f"a tensor on {device}; allowed: cpu, cuda")
    return device.index


def described(t: torch.Tensor) -> tuple:
    """A tensor for Call.

    In torch a dimension of one element may have any stride. The library wants a 1 for the last.
    """
    if t.dtype == torch.int32:
        # Dense, though torch may give a list of one number any stride.
        return abi.I32, ordinal(t.device), t.shape, abi.dense(t.shape)
    shape, stride = t.shape, t.stride()
    if shape and shape[-1] == 1:
        stride = (*stride[:-1], 1)
    return DTYPES[t.dtype], ordinal(t.device), shape, stride


def _stream_of(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The first is faster. A torch without CUDA has only the second.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


def run(call: Call, like: torch.Tensor, tensors: tuple) -> None:
    """Runs a call on the current stream of the device of `like`.

    The workspace comes from torch's allocator, like every temporary of an operator. The allocator gives memory of a
    stream to later work of that stream only. So it is not used by another before the kernel is done.
    """
    workspace = stream = None
    if call.workspace_bytes:
        memory = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=like.device)
        workspace = memory.data_ptr()
    if like.is_cuda:
        stream = _raw_stream(like.device.index)
    call.run([t.data_ptr() for t in tensors], workspace, stream)


def readable(t: torch.Tensor) -> torch.Tensor:
    """A tensor as the library reads it, copied where it must be.

    For tensors whose strides nobody chose, such as gradients.
    """
    step = 16 // t.element_size()
    ok = t.stride(-1) == 1 or t.shape[-1] == 1
    if t.ndim == 4:
        # torch.compile knows no addresses, and aligns what it makes.
        ok = ok and (torch.compiler.is_compiling() or t.data_ptr() % 16 == 0)
        ok = ok and all(s % step == 0 or n == 1 for n, s in zip(t.shape[:-1], t.stride()))
    if ok:
        return t
    t = t.contiguous()
    return t if torch.compiler.is_compiling() or t.data_ptr() % 16 == 0 else t.clone()


def problem_of(
    q: Any,
    k: Any,
    v: Any,
    scale: float,
    mask: int,
    corner: int,
    left: int,
    right: int,
    sm_margin: int = 0,
    **more: int,
) -> abi.ForwardProblem:
    """The forward problem of operands and the numbers of an operator."""
    return abi.ForwardProblem.of(
        q,
        k,
        v,
        dtype=DTYPES[q.dtype],
        softmax_scale=scale,
        mask=mask,
        corner=corner,
        window_left=left,
        window_right=right,
        sm_margin=margin_of(sm_margin),
        **more,
    )


# Of what was found to have gradients.
_with_gradients: set = set()


def require_gradients(key: Any, device: int, problems: Any) -> None:
    """Refuses a forward pass that autograd records where the device computes it, but not its gradients.

    So a program that trains learns it before the forward pass of the whole model. `problems` gives the forward and the
    backward problem, and is called once for a key.
    """
    if key in _with_gradients:
        return
    library = abi.load()
    forward, backward = problems()
    if library.supported(forward, device) and not library.supported(backward, device):
        # op.cc says the same.
        text = library.last_error() + ". Without gradients, as under torch.no_grad(), it is computed"
        raise abi.HattnError(abi.ERROR_UNSUPPORTED, library.status_name(abi.ERROR_UNSUPPORTED), text)
    if len(_with_gradients) >= 1024:
        _with_gradients.clear()
    _with_gradients.add(key)


def check_gradients(q: Any, k: Any, v: Any, numbers: tuple) -> None:
    """`require_gradients` of an operator's operands. The CPU has gradients of all that it computes."""
    if not q.is_cuda:
        return

    def problems() -> tuple:
        forward = problem_of(q, k, v, *numbers)
        return forward, abi.BackwardProblem.of(forward)

    require_gradients((q.dtype, q.device, q.shape, k.shape, v.shape, numbers), ordinal(q.device), problems)


def _empty(q: torch.Tensor, v: torch.Tensor, with_lse: bool) -> list:
    outputs = [q.new_empty((*q.shape[:3], v.shape[3]))]
    if with_lse:
        outputs.append(q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))
    return outputs


def _key(tensors: tuple) -> tuple:
    return tuple([(t.dtype, t.device, t.shape, t.stride()) for t in tensors])


def forward_into(
    q: Any, k: Any, v: Any, o: Any, lse: Optional[torch.Tensor], numbers: tuple, sinks: Optional[torch.Tensor] = None
) -> None:
    """Runs a forward pass that writes o, and lse if it is given."""
    given = (q, k, v, o) if lse is None else (q, k, v, o, lse) if sinks is None else (q, k, v, o, lse, sinks)

    def make() -> Call:
        of_sinks = {} if sinks is None else {"sinks": DTYPES[sinks.dtype]}
        problem = problem_of(q, k, v, *numbers, lse=int(lse is not None), **of_sinks)
        names = ("q", "k", "v", "o", "lse", "sinks")
        return Call(abi.ForwardArgs, problem, ordinal(q.device), dict(zip(names, map(described, given))))

    run(prepared((numbers, _key(given)), make), q, given)


def _forward(q: Any, k: Any, v: Any, *numbers: Any) -> Any:
    (o,) = _empty(q, v, False)
    forward_into(q, k, v, o, None, numbers)
    return o


def _forward_lse(q: Any, k: Any, v: Any, *numbers: Any) -> Any:
    o, lse = _empty(q, v, True)
    forward_into(q, k, v, o, lse, numbers)
    return o, lse


_GRADIENTS = ("d_q", "d_k", "d_v", "d_sinks")


def backward_into(
    d_o: Any,
    d_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    gradients: list,
    numbers: tuple,
    deterministic: bool,
    sinks: Optional[torch.Tensor] = None,
) -> None:
    """Runs a backward pass that writes the three gradients, and that of the sinks where there are any."""
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, **dict(zip(_GRADIENTS, gradients))}
    tensors |= {} if d_lse is None else {"d_lse": d_lse}
    tensors |= {} if sinks is None else {"sinks": sinks}
    given = tuple(tensors.values())

    def make() -> Call:
        of_sinks = {} if sinks is None else {"sinks": DTYPES[sinks.dtype]}
        forward = problem_of(q, k, v, *numbers, **of_sinks)
        wanted = {"d_lse": int(d_lse is not None), "d_sinks": int(sinks is not None)}
        problem = abi.BackwardProblem.of(forward, deterministic=int(deterministic), **wanted)
        described_ones = {name: described(t) for name, t in tensors.items()}
        return Call(abi.BackwardArgs, problem, ordinal(q.device), described_ones)

    run(prepared((numbers, deterministic, tuple(tensors), _key(given)), make), q, given)


def _backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *rest: Any) -> Any:
    # The dispatcher leaves the margin out where it is 0.
    numbers, deterministic = rest[:5] + rest[6:], rest[5]
    gradients = [t.new_empty(t.shape) for t in (q, k, v)]
    d_lse = None if d_lse is None else readable(d_lse)
    backward_into(readable(d_o), d_lse, q, k, v, o, lse, gradients, numbers, deterministic)
    return tuple(gradients)


def _forward_sinks(q: Any, k: Any, v: Any, sinks: Any, *numbers: Any) -> Any:
    o, lse = _empty(q, v, True)
    forward_into(q, k, v, o, lse, numbers, sinks)
    return o, lse


def _backward_sinks(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, sinks: Any, o: Any, lse: Any, *rest: Any) -> Any:
    numbers, deterministic = rest[:5] + rest[6:], rest[5]
    gradients = [*(t.new_empty(t.shape) for t in (q, k, v)), torch.empty_like(sinks, dtype=torch.float32)]
    d_lse = None if d_lse is None else readable(d_lse)
    backward_into(readable(d_o), d_lse, q, k, v, o, lse, gradients, numbers, deterministic, sinks)
    return tuple(gradients)


# -- what torch is told about the operators

# The margin came later. It stands at the end, so that calls without it stay right.
_NUMBERS, _MARGIN = "float scale, int mask, int corner, int window_left, int window_right", "int sm_margin=0"
_library = torch.library.Library("hopper_attention", "DEF")
for _schema in (
    f"forward(Tensor q, Tensor k, Tensor v, {_NUMBERS}, {_MARGIN}) -> Tensor",
    f"forward_lse(Tensor q, Tensor k, Tensor v, {_NUMBERS}, {_MARGIN}) -> (Tensor, Tensor)",
    "backward(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_NUMBERS}, bool deterministic, {_MARGIN}) -> (Tensor, Tensor, Tensor)",
    f"forward_sinks(Tensor q, Tensor k, Tensor v, Tensor sinks, {_NUMBERS}, {_MARGIN}) -> (Tensor, Tensor)",
    "backward_sinks(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor o, Tensor lse, "
    f"{_NUMBERS}, bool deterministic, {_MARGIN}) -> (Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


_OP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_torch_op.so")


def _register() -> Optional[str]:
    """Registers the operators. Gives None with the compiled ones, else why the ctypes ones serve."""
    why = "the package has no _torch_op.so"
    if os.path.exists(_OP):
        try:
            register = ctypes.CDLL(_OP).hattn_torch_register
        except (OSError, AttributeError) as error:
            why = f"_torch_op.so: {error}"
        else:
            register.restype, register.argtypes = ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
            text = ctypes.create_string_buffer(1000)
            if register(os.fsencode(abi.load().path), text, len(text)) == 0:
                return None
            why = text.value.decode(errors="replace")
    for name, function in (
        ("forward", _forward),
        ("forward_lse", _forward_lse),
        ("backward", _backward),
        ("forward_sinks", _forward_sinks),
        ("backward_sinks", _backward_sinks),
    ):
        for key in ("CPU", "CUDA"):
            _library.impl(name, function, key)
    return why


#: None if the compiled operators serve. Else why the ctypes ones do.
fallback = _register()

#: The operator of torch that eager calls on a GPU go through, and its gradient.
#:
#: torch has kernels of them for the CPU alone, and calls them with tensors of the CPU alone. _torch_op.so gives them
#: kernels for CUDA. So nothing of torch is replaced. Autograd records the operator in C++, and its backward pass
#: needs no Python. The operator has no mask but is_causal, and no margin: attn_mask has the numbers of another mask and
#: the margin, on the CPU. Its log-sum-exp has no gradient, and is empty where gradients are off.
_DIRECT = {
    "_scaled_dot_product_flash_attention_for_cpu": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}


def _register_direct(key: str) -> Optional[str]:
    """Gives the operators of _DIRECT kernels for a dispatch key. None if that was done, else why not."""
    if fallback is not None:
        return fallback
    for name, schema in _DIRECT.items():
        operator_of_torch = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if operator_of_torch is None:
            return f"torch has no aten::{name}"
        its = str(operator_of_torch._schema)
        if its != f"aten::{name}{schema}":
            return f"torch has another {its}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) and key != "CPU":
            return f"torch has an aten::{name} for {key} itself"
    # What attention() uses on this way alone.
    for module, name in ((torch, next(iter(_DIRECT))), (torch._C, "_len_torch_dispatch_stack")):
        if not hasattr(module, name):
            return f"torch has no function {name}"
    register = ctypes.CDLL(_OP).hattn_torch_register_recorded
    register.restype, register.argtypes = ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    text = ctypes.create_string_buffer(1000)
    return text.value.decode(errors="replace") if register(key.encode(), text, len(text)) else None


#: None if eager calls on a GPU go through _DIRECT. Else why they go through the package's own operators.
no_direct: Optional[str] = _register_direct("CUDA")
#: The function of torch that they call. Tests set it to None, so that the package's own operators serve.
_direct: Any = None if no_direct else getattr(torch, next(iter(_DIRECT)))
_takes_direct = operator.attrgetter("is_cuda")

# Bound once. A call through torch.ops looks the operator up again.
_forward_op = torch.ops.hopper_attention.forward.default
_forward_lse_op = torch.ops.hopper_attention.forward_lse.default
_backward_op = torch.ops.hopper_attention.backward.default
_below = torch._C._AutoDispatchBelowAutograd


@torch.library.register_fake("hopper_attention::forward", lib=_library)
def _fake_forward(q: Any, k: Any, v: Any, *numbers: Any) -> Any:
    return _empty(q, v, False)[0]


@torch.library.register_fake("hopper_attention::forward_lse", lib=_library)
def _fake_forward_lse(q: Any, k: Any, v: Any, *numbers: Any) -> Any:
    return tuple(_empty(q, v, True))


@torch.library.register_fake("hopper_attention::backward", lib=_library)
def _fake_backward(d_o: Any, d_lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, *numbers = inputs
    ctx.numbers = tuple(numbers)
    ctx.save_for_backward(q, k, v, *output)
    # An output that nobody used then has the gradient None, and not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Any, d_lse: Any) -> tuple:
    q, k, v, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    numbers = _backward_numbers(ctx.numbers, torch.are_deterministic_algorithms_enabled())
    all_three = torch.ops.hopper_attention.backward(d_o, d_lse, q, k, v, o, lse, *numbers)
    nothing = (None,) * (len(ctx.needs_input_grad) - 3)
    return *(d if wanted else None for d, wanted in zip(all_three, ctx.needs_input_grad)), *nothing


def _no_lse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("hopper_attention::forward keeps no log-sum-exp, so it has no gradient; use forward_lse")


def _second(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("attention: a second derivative was asked for; allowed: gradients of first order")


torch.library.register_autograd("hopper_attention::forward_lse", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hopper_attention::forward", _no_lse, lib=_library)
torch.library.register_autograd("hopper_attention::backward", _second, lib=_library)
