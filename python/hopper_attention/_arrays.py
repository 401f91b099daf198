"""attention() on arrays of any framework that speaks DLPack: numpy, CuPy and others. Nothing is copied."""

from __future__ import annotations

import ctypes
from typing import Any, Optional

from . import abi
from ._plans import Window, margin_of, mask_of, plans, scale_of

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

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


class Array:
    """A tensor that an array exports by DLPack. It keeps the export alive. The memory stays the array's."""

    def __init__(self, name: str, array: Any, stream: Optional[int], written: bool = False) -> None:
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
        self.dtype = _TYPES.get((found.dtype.code, found.dtype.bits)) if found.dtype.lanes == 1 else None
        if self.dtype is None:
            what = f"DLPack code {found.dtype.code}, {found.dtype.bits} bits, {found.dtype.lanes} lanes"
            raise TypeError(f"{name}: an element type that is not taken ({what}); allowed: {_TYPE_NAMES}")
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
    q: Array, k: Array, v: Array, mask: Any, scale: Optional[float], sm_margin: int, **more: int
) -> abi.ForwardProblem:
    numbers = {"softmax_scale": scale_of(scale), "sm_margin": margin_of(sm_margin), **mask._asdict()}
    return abi.ForwardProblem.of(q, k, v, dtype=q.dtype, **numbers, **more)


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
) -> Any:
    """See hopper_attention.attention."""
    exports = [_four(name, array, stream) for name, array in (("q", q), ("k", k), ("v", v))]
    lse = return_lse or lse_out is not None
    mask = mask_of(causal, window, top_left)
    problem = _problem(exports[0], exports[1], exports[2], mask, scale, sm_margin, lse=int(lse))
    plan = plans().get(exports[0].device, problem)
    batch, seqlen_q, heads_q, _ = exports[0].shape
    out, o = _output("out", out, q, (batch, seqlen_q, heads_q, exports[2].shape[3]), False, stream)
    made = lse_struct = None
    if lse:
        lse_out, made = _output("lse_out", lse_out, q, (batch, heads_q, seqlen_q), True, stream)
        lse_struct = made.struct
    memory, address = _workspace(plan, q, stream)
    plan.run(*(e.struct for e in exports), o.struct, lse_struct, address, plan.workspace_bytes, stream)
    del memory, made
    return (out, lse_out) if lse else out


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
) -> tuple:
    """See hopper_attention.attention_backward."""
    inputs = {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}
    exports = {name: _four(name, array, stream) for name, array in inputs.items()}
    exports["lse"] = Array("lse", lse, stream)
    if d_lse is not None:
        exports["d_lse"] = Array("d_lse", d_lse, stream)
    mask = mask_of(causal, window, top_left)
    forward = _problem(exports["q"], exports["k"], exports["v"], mask, scale, sm_margin)
    problem = abi.BackwardProblem.of(forward, d_lse=int(d_lse is not None), deterministic=int(deterministic))
    plan = plans().get(exports["q"].device, problem)
    gradients = []
    for i, name in enumerate("qkv"):
        array, export = _output(f"d_{name}", out[i] if out else None, inputs[name], exports[name].shape, False, stream)
        gradients.append(array)
        exports[f"d_{name}"] = export
    memory, address = _workspace(plan, q, stream)
    structs = {name: export.struct for name, export in exports.items()}
    plan.run(**structs, workspace=address, workspace_bytes=plan.workspace_bytes, stream=stream)
    del memory
    return tuple(gradients)


__all__ = ["Array", "attention", "attention_backward"]
