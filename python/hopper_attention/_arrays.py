"""attention() on arrays of any framework that speaks DLPack: numpy, CuPy and others. Nothing is copied."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from . import abi
from ._block_lists import BlockLists, fields_of, lists_of_array, one_of
from ._plans import (
    Window,
    alibi_of,
    bias_fields,
    bias_shape,
    bias_sizes,
    check_list,
    dropout_of,
    hints_of,
    lists_of,
    limit_of,
    margin_of,
    mask_of,
    output_shapes,
    packed_problem,
    plans,
    scale_of,
    softcap_of,
)

# The C structs of DLPack (dlpack.h, version 1): a device, a type, a tensor, and the two structs that hand a tensor
# over.


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY = 1
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_TYPES = {(2, 16): abi.F16, (4, 16): abi.BF16, (2, 32): abi.F32}
_TYPE_NAMES = "float16, bfloat16, float32"
_LIST_TYPES = {(0, 32): abi.I32}

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Array:
    """A tensor that an array exports by DLPack. It keeps the export alive. The memory stays the array's."""

    def __init__(
        self, name: str, array: Any, stream: Optional[int], written: bool = False, is_list: bool = False
    ) -> None:
        if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
            raise TypeError(f"{name}: {type(array).__name__}; allowed: torch tensors and arrays that have __dlpack__")
        kind = int(array.__dlpack_device__()[0])
        # The exporter makes our stream wait for its own work. 1 is DLPack's number for the default stream.
        asked = {"stream": stream or 1} if kind in (_CUDA, _CUDA_MANAGED) else {}
        try:
            capsule = array.__dlpack__(max_version=(1, 1), **asked)
        except TypeError:
            # An exporter from before DLPack 1.0 knows no max_version.
            capsule = array.__dlpack__(**asked)
        # The capsule is not consumed: its name stays, and its own destructor frees the export.
        self._capsule = capsule
        if _is_valid(capsule, b"dltensor_versioned"):
            managed = _ManagedVersioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
            if managed.major != 1:
                raise BufferError(
                    f"{name}: an export of DLPack {managed.major}.{managed.minor}; allowed: 1.x and older"
                )
            if written and managed.flags & _READ_ONLY:
                raise BufferError(f"{name}: a read-only array; it would be written")
            found = managed.tensor
        else:
            found = _Managed.from_address(_get_pointer(capsule, b"dltensor")).tensor
        self.shape = tuple(found.shape[: found.ndim])
        stride = tuple(found.strides[: found.ndim]) if found.strides else abi.dense(self.shape)
        if self.shape and self.shape[-1] == 1:
            stride = (*stride[:-1], 1)
        types, names = (_LIST_TYPES, "int32") if is_list else (_TYPES, _TYPE_NAMES)
        self.dtype = types.get((found.dtype.code, found.dtype.bits)) if found.dtype.lanes == 1 else None
        if self.dtype is None:
            what = f"DLPack code {found.dtype.code}, {found.dtype.bits} bits, {found.dtype.lanes} lanes"
            raise TypeError(f"{name}: an element type that is not taken ({what}); allowed: {names}")
        if found.device.type not in (_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED):
            raise ValueError(f"{name}: DLPack device {found.device.type}; allowed: the host (1, 3) and CUDA (2, 13)")
        self.device = abi.CPU if found.device.type in (_CPU, _CUDA_HOST) else found.device.id
        address = (found.data or 0) + found.byte_offset
        self.struct = abi.tensor(address, self.dtype, self.shape, stride, self.device)


def _four(name: str, array: Any, stream: Optional[int]) -> Array:
    found = Array(name, array, stream)
    if len(found.shape) != 4:
        raise ValueError(f"{name}: {len(found.shape)} dimensions; allowed: 4, [batch, seqlen, heads, head_dim]")
    return found


def _output(name: str, given: Any, like: Any, shape: tuple, f32: bool, stream: Optional[int]) -> tuple:
    """An output array and its export: the caller's, or a new one of the framework of `like`."""
    if given is None:
        numpy = _numpy_of(like)
        if numpy is None:
            kind = f"{type(like).__module__}.{type(like).__name__}"
            raise TypeError(
                f"{name}: missing; only outputs of numpy and CuPy are allocated here. For {kind} give an array"
            )
        given = numpy.empty(shape, dtype=numpy.float32 if f32 else like.dtype)
    return given, Array(name, given, stream, written=True)


def _numpy_of(array: Any) -> Any:
    """numpy or CuPy, whichever an array is of. Arrays of other frameworks may be immutable."""
    import sys

    for name in ("numpy", "cupy"):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, module.ndarray):
            return module
    return None


def _problem(
    q: Array, k: Array, v: Array, mask: Any, scale: Optional[float], sm_margin: int, softcap: Any, **more: int
) -> abi.ForwardProblem:
    return abi.ForwardProblem.of(q, k, v, dtype=q.dtype, **_numbers(mask, scale, sm_margin, softcap), **more)


def _numbers(mask: Any, scale: Optional[float], sm_margin: int, softcap: Optional[float]) -> dict:
    numbers = {"softmax_scale": scale_of(scale), "softcap": softcap_of(softcap), "sm_margin": margin_of(sm_margin)}
    return {**numbers, **mask._asdict()}


def _workspace(plan: abi.Plan, like: Any, stream: Optional[int]) -> tuple:
    """Scratch memory of the framework that the operands are of, with its address."""
    if not plan.workspace_bytes:
        return None, None
    numpy = _numpy_of(like)
    if numpy is None:
        raise TypeError(
            f"workspace: this problem needs {plan.workspace_bytes} bytes on the GPU, and only CuPy's are allocated here; "
            "use torch or CuPy arrays, or the C ABI in hopper_attention.abi"
        )
    memory = numpy.empty(plan.workspace_bytes // 4 + 1, dtype=numpy.float32)
    export = Array("workspace", memory, stream, written=True)
    return export, export.struct.data


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    out: Any,
    lse_out: Any,
    stream: Optional[int],
    sm_margin: int,
    s_aux: Any = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    max_logits: tuple = (False, None),
    masks: tuple = (None, None),
    bias: Any = None,
    dropout: tuple = (0.0, None),
    workspace_limit: Optional[int] = None,
) -> Any:
    """See hopper_attention.attention.

    `max_logits`: whether they are wanted, and where. `masks`: attn_mask and block_mask. `dropout`: dropout_p and dropout_state.
    """
    exports = {name: _four(name, array, stream) for name, array in (("q", q), ("k", k), ("v", v))}
    lse = return_lse or lse_out is not None
    mask = mask_of(causal, window, top_left)
    sinks = _sinks(s_aux, stream)
    of = exports["q"], exports["k"], exports["v"]
    slopes = _slopes(alibi_slopes, stream)
    masks, added = _additive(masks, bias, q, of, {}, stream)
    lists, state = _lists(masks, q, of, stream), _state(dropout, q, stream)
    more = {"lse": int(lse), "sinks": _type_of(sinks), **_biased(slopes, max_logits), **fields_of(lists)}
    more.update(_bias_fields(added, {}), **_dropped(dropout), workspace_limit=limit_of(workspace_limit))
    problem = _problem(*of, mask, scale, sm_margin, softcap, **more)
    given = {**exports, **sinks, **slopes, **lists, **added, **state}
    return _forward(problem, q, given, out, lse_out, max_logits[1], stream)


def _lists(masks: tuple, like: Any, of: tuple, stream: Optional[int]) -> dict:
    """The exports of the lists of a mask by their names. Nothing where there is no mask."""
    if masks[0] is None and masks[1] is None:
        return {}
    named = lists_for(*masks, like, of[0].shape, of[1].shape).named()
    return {name: Array(name, given, stream, is_list=True) for name, given in named.items()}


def lists_for(attn_mask: Any, block_mask: Any, like: Any, q_shape: tuple, k_shape: tuple) -> BlockLists:
    """The lists of one of both masks, of the framework that `like` is of, for operands of these shapes."""
    one_of(block_mask, attn_mask)
    given = attn_mask if block_mask is None else block_mask
    if isinstance(given, BlockLists):
        return given
    if block_mask is not None:
        raise TypeError(f"block_mask: {type(block_mask).__name__}; allowed for these arrays: hopper_attention.BlockLists")
    xp = _numpy_of(attn_mask)
    if xp is None:
        raise TypeError(
            f"attn_mask: {type(attn_mask).__name__}; allowed: arrays of numpy and CuPy. Others: block_mask with "
            "hopper_attention.BlockLists"
        )
    lists = lists_of_array(xp, attn_mask, (q_shape[0], q_shape[2], q_shape[1], k_shape[1]))
    ours = _numpy_of(like)
    if ours is None or ours is xp or xp.__name__ != "numpy":
        return lists
    return BlockLists(*(ours.asarray(one) for one in lists))


def _additive(masks: tuple, bias: Any, like: Any, of: tuple, lengths: dict, stream: Optional[int]) -> tuple:
    """The masks without a floating-point attn_mask, which is a bias, and the export of the bias by its name, if any.

    `lengths` are as in `bias_sizes`.
    """
    attn_mask, block_mask = masks
    if attn_mask is not None and _numpy_of(attn_mask) is not None and attn_mask.dtype.kind == "f":
        if bias is not None:
            raise ValueError("attn_mask: floating-point numbers, beside a bias; allowed: one of both")
        masks, bias, name = (None, block_mask), attn_mask, "attn_mask"
    else:
        name = "bias"
    if bias is None:
        return masks, {}
    sizes = bias_sizes(*of[:2], lengths)
    its, ours = _numpy_of(bias), _numpy_of(like)
    if its is not None:
        shape = bias_shape(name, bias.shape, sizes)
        if bias.dtype == "float64":
            bias = bias.astype("float32")
        bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
        bias = its.ascontiguousarray(its.broadcast_to(bias, shape))
        if ours is not None and ours is not its and its.__name__ == "numpy":
            bias = ours.asarray(bias)
    export = Array(name, bias, stream)
    shape = bias_shape(name, export.shape, sizes)
    if export.shape != shape:
        raise ValueError(f"{name}: shape {list(export.shape)}; allowed for these arrays: {list(shape)}")
    return masks, {"bias": export}


def _bias_fields(added: dict, lengths: dict) -> dict:
    return bias_fields(added["bias"].dtype, added["bias"].shape, lengths) if added else {}


def _like(given: Any, like: Any, shape: tuple, dtype: int) -> Any:
    """The caller's array for the gradient of a bias, or a new one of the framework of `like`."""
    if given is not None:
        return given
    numpy = _numpy_of(like)
    names = {abi.F32: "float32", abi.F16: "float16"}
    if numpy is None or dtype not in names:
        raise TypeError("d_bias: missing; only outputs of numpy and CuPy in float32 and float16 are allocated here")
    return numpy.empty(shape, dtype=names[dtype])


def _sinks(s_aux: Any, stream: Optional[int]) -> dict:
    """The export of the attention sinks by its name. Nothing where there are none."""
    if s_aux is None:
        return {}
    export = Array("s_aux", s_aux, stream)
    if len(export.shape) != 1:
        raise ValueError(f"s_aux: {len(export.shape)} dimensions; allowed: 1, [heads_q]")
    return {"sinks": export}


def _type_of(sinks: dict) -> int:
    return sinks["sinks"].dtype if sinks else 0


def _slopes(alibi_slopes: Any, stream: Optional[int]) -> dict:
    """The export of ALiBi's slopes by its name. Nothing where there are none."""
    return {} if alibi_slopes is None else {"alibi_slopes": Array("alibi_slopes", alibi_slopes, stream)}


def _dropped(dropout: tuple) -> dict:
    """The field of a problem with this dropout."""
    return {"dropout": dropout_of(*dropout)}


def _state(dropout: tuple, like: Any, stream: Optional[int]) -> dict:
    """The export of the seed and the offset of dropout by its name: their four words. Nothing without dropout."""
    if not dropout_of(*dropout):
        return {}
    state = dropout[1]
    if state is None:
        raise TypeError("dropout_state: missing; allowed: the seed and the offset, int64 [2]")
    its, ours = _numpy_of(state), _numpy_of(like)
    if its is not None and state.dtype.kind in "iu" and state.dtype.itemsize == 8:
        state = its.ascontiguousarray(state).view("int32")
        if ours is not None and ours is not its and its.__name__ == "numpy":
            state = ours.asarray(state)
    export = Array("dropout_state", state, stream, is_list=True)
    if export.shape != (4,):
        allowed = "the seed and the offset: int64 [2] of numpy and CuPy, or their four words, int32 [4]"
        raise ValueError(f"dropout_state: shape {list(export.shape)} of words; allowed: {allowed}")
    return {"dropout_state": export}


def _biased(slopes: dict, max_logits: tuple = (False, None)) -> dict:
    """The fields of a forward problem with these slopes and maximum logits."""
    wanted = max_logits[0] or max_logits[1] is not None
    return {"alibi": alibi_of(slopes.get("alibi_slopes")), "max_logits": int(wanted)}


def _forward(
    problem: abi.ForwardProblem, like: Any, exports: dict, out: Any, lse_out: Any, max_logits_out: Any, stream: Any
) -> Any:
    """Runs a forward pass on inputs by their names. Outputs are those of the caller, or new ones."""
    plan = _plan(problem, like, exports["q"].device)
    o_shape, lse_shape = output_shapes(exports["q"].shape, exports["v"].shape)
    exports = dict(exports)
    out, exports["o"] = _output("out", out, like, o_shape, False, stream)
    if problem.lse:
        lse_out, exports["lse"] = _output("lse_out", lse_out, like, lse_shape, True, stream)
    if problem.max_logits:
        shape = (problem.heads_q,)
        max_logits_out, exports["max_logits"] = _output("max_logits_out", max_logits_out, like, shape, True, stream)
    _run(plan, like, exports, stream)
    made = (out, *([lse_out] if problem.lse else []), *([max_logits_out] if problem.max_logits else []))
    return made if len(made) > 1 else out


def _plan(problem: abi.ForwardProblem, like: Any, device: int) -> abi.Plan:
    """The plan of a forward problem. Where no scratch memory can be allocated, one that needs none, if there is one."""
    plan = plans().get(device, problem)
    if not plan.workspace_bytes or _numpy_of(like) is not None:
        return plan
    limited = type(problem).from_buffer_copy(problem)
    limited.workspace_limit = 1
    try:
        return plans().get(device, limited)
    except abi.HattnError:
        return plan


def _run(plan: abi.Plan, like: Any, exports: dict, stream: Optional[int]) -> None:
    memory, address = _workspace(plan, like, stream)
    structs = {name: export.struct for name, export in exports.items()}
    plan.run(**structs, workspace=address, workspace_bytes=plan.workspace_bytes, stream=stream)
    del memory


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    d_lse: Any,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    deterministic: bool,
    out: Any,
    stream: Optional[int],
    sm_margin: int,
    s_aux: Any = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    masks: tuple = (None, None),
    bias: Any = None,
    return_d_bias: bool = False,
    dropout: tuple = (0.0, None),
    workspace_limit: Optional[int] = None,
) -> tuple:
    """See hopper_attention.attention_backward. `masks` and `dropout` are as in `attention`."""
    inputs = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}
    exports = {name: _four(name, array, stream) for name, array in inputs.items()}
    exports["lse"] = Array("lse", lse, stream)
    if d_lse is not None:
        exports["d_lse"] = Array("d_lse", d_lse, stream)
    mask = mask_of(causal, window, top_left)
    sinks = _sinks(s_aux, stream)
    of = exports["q"], exports["k"], exports["v"]
    slopes = _slopes(alibi_slopes, stream)
    masks, added = _additive(masks, bias, q, of, {}, stream)
    lists, state = _lists(masks, q, of, stream), _state(dropout, q, stream)
    more = {"sinks": _type_of(sinks), **_biased(slopes), **fields_of(lists)}
    more.update(_bias_fields(added, {}), **_dropped(dropout), workspace_limit=limit_of(workspace_limit))
    forward = _problem(*of, mask, scale, sm_margin, softcap, **more)
    given = {**exports, **sinks, **slopes, **lists, **added, **state}
    return _backward(forward, (q, k, v), given, deterministic, out, stream, return_d_bias)


def _backward(
    forward: abi.ForwardProblem,
    likes: tuple,
    exports: dict,
    deterministic: bool,
    out: Any,
    stream: Any,
    d_bias: bool = False,
) -> tuple:
    """Runs the backward pass of a forward problem on inputs by their names."""
    d_lse = int("d_lse" in exports)
    with_sinks = "sinks" in exports
    numbers = {"deterministic": int(deterministic), "d_sinks": int(with_sinks), "d_bias": int(d_bias)}
    problem = abi.BackwardProblem.of(forward, d_lse=d_lse, **numbers)
    plan = plans().get(exports["q"].device, problem)
    gradients, exports = [], dict(exports)
    for i, (name, like) in enumerate(zip("qkv", likes)):
        array, export = _output(f"d_{name}", out[i] if out else None, like, exports[name].shape, False, stream)
        gradients.append(array)
        exports[f"d_{name}"] = export
    if with_sinks:
        given, shape = (out[3] if out else None), exports["sinks"].shape
        array, exports["d_sinks"] = _output("d_s_aux", given, likes[0], shape, True, stream)
        gradients.append(array)
    if d_bias:
        given = exports["bias"]
        array = _like(out[-1] if out else None, likes[0], given.shape, given.dtype)
        exports["dbias"] = Array("d_bias", array, stream, written=True)
        gradients.append(array)
    _run(plan, likes[0], exports, stream)
    return tuple(gradients)


def _list(name: str, given: Any, like: Any, stream: Optional[int]) -> Optional[Array]:
    """The export of offsets or used lengths: int32, where the operands are.

    Integers of numpy and CuPy are cast, and go to the framework of `like`. Numbers that int32 does not hold become its
    largest or smallest, which are no rows of a tensor.
    """
    if given is None:
        return None
    its, ours = _numpy_of(given), _numpy_of(like)
    if its is not None and given.dtype.kind in "iu":
        if given.dtype.itemsize > 4 or given.dtype.kind == "u":
            given = its.clip(given.astype("int64"), -(2**31), 2**31 - 1)
        given = its.ascontiguousarray(given, dtype="int32")
        if ours is not None and ours is not its and its.__name__ == "numpy":
            given = ours.asarray(given)
    export = Array(name, given, stream, is_list=True)
    check_list(name, export.shape)
    return export


def _packed(q: Any, k: Any, v: Any, lists: tuple, stream: Optional[int]) -> tuple:
    """The exports of operands, and those of the lengths by name. None stands for lengths that were not given."""
    exports = {name: Array(name, array, stream) for name, array in (("q", q), ("k", k), ("v", v))}
    named = lists_of(exports["q"], exports["k"], exports["v"], lists)  # type: ignore[arg-type]
    return exports, {name: _list(name, given, q, stream) for name, given in named.items()}


def _given(lists: dict) -> dict:
    return {name: export for name, export in lists.items() if export is not None}


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    lists: tuple,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    return_lse: bool,
    max_seqlens: tuple,
    fill_gaps: bool,
    out: Any,
    lse_out: Any,
    stream: Optional[int],
    sm_margin: int,
    s_aux: Any = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    max_logits: tuple = (False, None),
    bias: Any = None,
    dropout: tuple = (0.0, None),
    workspace_limit: Optional[int] = None,
) -> Any:
    """See hopper_attention.attention_varlen. `lists` are those of `abi.LENGTHS`."""
    exports, lengths = _packed(q, k, v, lists, stream)
    lse = return_lse or lse_out is not None
    numbers = _numbers(mask_of(causal, window, top_left), scale, sm_margin, softcap)
    hints = hints_of(*max_seqlens, fill_gaps)
    of = exports["q"], exports["k"], exports["v"]
    sinks = _sinks(s_aux, stream)
    slopes = _slopes(alibi_slopes, stream)
    _, added = _additive((None, None), bias, q, of, lengths, stream)
    more = {"dtype": exports["q"].dtype, "lse": int(lse), "sinks": _type_of(sinks), **_biased(slopes, max_logits)}
    more.update(_bias_fields(added, lengths), **_dropped(dropout), workspace_limit=limit_of(workspace_limit))
    problem = packed_problem(*of, lengths, hints, **more, **numbers)
    given = {**exports, **_given(lengths), **sinks, **slopes, **added, **_state(dropout, q, stream)}
    return _forward(problem, q, given, out, lse_out, max_logits[1], stream)


def attention_varlen_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    d_lse: Any,
    lists: tuple,
    causal: bool,
    window: Window,
    top_left: bool,
    scale: Optional[float],
    max_seqlens: tuple,
    deterministic: bool,
    fill_gaps: bool,
    out: Any,
    stream: Optional[int],
    sm_margin: int,
    s_aux: Any = None,
    softcap: Optional[float] = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    return_d_bias: bool = False,
    dropout: tuple = (0.0, None),
    workspace_limit: Optional[int] = None,
) -> tuple:
    """See hopper_attention.attention_varlen_backward. `lists` are those of `abi.LENGTHS`."""
    exports, lengths = _packed(q, k, v, lists, stream)
    numbers = _numbers(mask_of(causal, window, top_left), scale, sm_margin, softcap)
    hints = hints_of(*max_seqlens, fill_gaps)
    of = exports["q"], exports["k"], exports["v"]
    sinks = _sinks(s_aux, stream)
    slopes = _slopes(alibi_slopes, stream)
    _, added = _additive((None, None), bias, q, of, lengths, stream)
    fields = {"dtype": exports["q"].dtype, "sinks": _type_of(sinks), **_biased(slopes)}
    fields.update(_bias_fields(added, lengths), **_dropped(dropout), workspace_limit=limit_of(workspace_limit))
    forward = packed_problem(*of, lengths, hints, **fields, **numbers)
    more = {"o": o, "lse": lse, "d_o": d_o, **({} if d_lse is None else {"d_lse": d_lse})}
    exports.update({name: Array(name, array, stream) for name, array in more.items()})
    given = {**exports, **_given(lengths), **sinks, **slopes, **added, **_state(dropout, q, stream)}
    return _backward(forward, (q, k, v), given, deterministic, out, stream, return_d_bias)


__all__ = ["Array", "attention", "attention_backward", "attention_varlen", "attention_varlen_backward"]
