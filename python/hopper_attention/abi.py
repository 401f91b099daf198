"""The C ABI of Hopper Attention (version 1), with the standard library's ctypes alone.

    library = load()
    problem = ForwardProblem(dtype=F32, batch=1, seqlen_q=4, seqlen_kv=6, heads_q=2, heads_kv=1,
                             head_dim_qk=8, head_dim_vo=8, mask=MASK_CAUSAL)
    plan = library.plan(problem, CPU)                           # once for many runs
    plan.run(q, k, v, o)                                        # four Tensor structs, which describe memory

    gradients = library.plan(BackwardProblem.of(problem), CPU)  # of a forward pass that wrote its log-sum-exp
    gradients.run(q, k, v, o, lse, d_o, d_q, d_k, d_v)

The library checks all arguments. A call that it refuses raises HattnError with the library's words.
"""

from __future__ import annotations

import ctypes
import os
import threading
import types
import weakref
from typing import Any, Optional, Sequence

ABI_VERSION = 1

# hattn_status
OK = 0
ERROR_ARGUMENT = 1
ERROR_ABI = 2
ERROR_SHAPE = 3
ERROR_LAYOUT = 4
ERROR_DTYPE = 5
ERROR_VALUE = 6
ERROR_UNSUPPORTED = 7
ERROR_WORKSPACE = 8
ERROR_DEVICE = 9
ERROR_CAPTURE = 10
ERROR_DRIVER = 11
ERROR_LAUNCH = 12
ERROR_NO_DEVICE = 13
ERROR_INTERNAL = 14
ERROR_MEMORY = 15
ERROR_THREADS = 16

# hattn_dtype
F16, BF16, F32, E4M3, I32 = 1, 2, 3, 4, 5
# hattn_device: the host. A GPU is its ordinal.
CPU = -1
# hattn_mask, hattn_corner, and a bound of a window that bounds nothing. Chunks and a prefix have their keys in window_left
MASK_FULL, MASK_CAUSAL, MASK_WINDOW, MASK_CHUNKED, MASK_PREFIX = 0, 1, 2, 3, 4
BOTTOM_RIGHT, TOP_LEFT = 0, 1
UNBOUNDED = -1
UNSET = -1  # a size that the caller must give
# hattn_alibi
ALIBI_NONE, ALIBI_PER_HEAD, ALIBI_PER_BATCH = 0, 1, 2
# hattn_bias_dims: flags
BIAS_PER_BATCH, BIAS_PER_HEAD, BIAS_PER_QUERY = 1, 2, 4
# hattn_block_mask: flags
BLOCK_MASK_NONE, BLOCK_MASK_LISTS, BLOCK_MASK_PER_BATCH, BLOCK_MASK_PER_HEAD, BLOCK_MASK_FULL_BLOCKS = 0, 1, 2, 4, 8
# hattn_scaling
PER_TENSOR, PER_HEAD, PER_BLOCK = 0, 1, 2

#: The environment variable that names the shared library. It wins over the file in the package.
VARIABLE = "HOPPER_ATTENTION_LIBRARY"
#: What the system's loader is asked for when there is no file in the package.
SONAME = f"libhopper_attention.so.{ABI_VERSION}"
_IN_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libhopper_attention.so")


class HattnError(RuntimeError):
    """A call that the library refused, or that failed.

    `status` is the number, `name` the constant's name such as HATTN_ERROR_SHAPE, `text` the library's words.
    """

    def __init__(self, status: int, name: str, text: str) -> None:
        super().__init__(f"{text} ({name})")
        self.status, self.name, self.text = status, name, text


class _Versioned(ctypes.Structure):
    """A struct of the ABI. It begins with its own size and the ABI's version. Fields that are not given are 0."""

    def __init__(self, **fields: Any) -> None:
        # ctypes would take a misspelt name as a new attribute, and the library would see a 0.
        unknown = set(fields) - {field[0] for field in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(**{"struct_size": ctypes.sizeof(self), "abi_version": ABI_VERSION, **fields})


def _fields(**fields: Any) -> list:
    return [("struct_size", ctypes.c_uint32), ("abi_version", ctypes.c_uint32), *fields.items()]


def _all_of(kind: Any, names: str) -> dict:
    return dict.fromkeys(names.split(), kind)


_LENGTHS = "cu_seqlens_q cu_seqlens_kv seqused_q seqused_kv"
#: Offsets and used lengths of sequences: flags of a problem, and tensors of a run.
LENGTHS = tuple(_LENGTHS.split())
_BLOCK_LISTS = "mask_block_cnt mask_block_idx mask_bits full_block_cnt full_block_idx"
#: The lists of a block-sparse mask: tensors of a run.
BLOCK_LISTS = tuple(_BLOCK_LISTS.split())
_SIZES = "batch seqlen_q seqlen_kv heads_q heads_kv head_dim_qk head_dim_vo window_left window_right"


class ForwardProblem(_Versioned):
    """hattn_forward_problem: what a forward pass computes."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int32, "dtype mask corner lse"),
        **_all_of(ctypes.c_int64, _SIZES),
        softmax_scale=ctypes.c_float,
        **_all_of(ctypes.c_int32, "arch output scaling amax half_scores sm_margin fill_gaps"),
        **_all_of(ctypes.c_int32, _LENGTHS),
        **_all_of(ctypes.c_int64, "max_seqlen_q max_seqlen_kv"),
        sinks=ctypes.c_int32,
        softcap=ctypes.c_float,
        **_all_of(ctypes.c_int32, "alibi max_logits block_mask block_mask_most_partial bias bias_dims"),
        dropout=ctypes.c_float,
        reserved=ctypes.c_int32,
        **_all_of(ctypes.c_int64, "bias_queries bias_keys"),
        workspace_limit=ctypes.c_uint64,
    )

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, **more: Any) -> ForwardProblem:
        """The problem of operands with a `shape`: [batch, seqlen, heads, head_dim]. `more` are its other fields."""
        return cls(
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            seqlen_kv=k.shape[1],
            heads_q=q.shape[2],
            heads_kv=k.shape[2],
            head_dim_qk=q.shape[3],
            head_dim_vo=v.shape[3],
            **more,
        )


class BackwardProblem(_Versioned):
    """hattn_backward_problem: which gradients to compute. `of` makes one of a forward problem."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int32, "dtype mask corner d_lse"),
        **_all_of(ctypes.c_int64, _SIZES),
        softmax_scale=ctypes.c_float,
        **_all_of(ctypes.c_int32, "deterministic arch sm_margin"),
        **_all_of(ctypes.c_int32, _LENGTHS),
        **_all_of(ctypes.c_int64, "max_seqlen_q max_seqlen_kv"),
        fill_gaps=ctypes.c_int32,
        softcap=ctypes.c_float,
        **_all_of(ctypes.c_int32, "sinks d_sinks alibi d_bias block_mask block_mask_most_partial bias bias_dims"),
        dropout=ctypes.c_float,
        reserved=ctypes.c_int32,
        **_all_of(ctypes.c_int64, "bias_queries bias_keys"),
        workspace_limit=ctypes.c_uint64,
    )

    @classmethod
    def of(
        cls, forward: ForwardProblem, d_lse: int = 0, deterministic: int = 0, d_sinks: int = 0, d_bias: int = 0
    ) -> BackwardProblem:
        """The gradients of a forward problem.

        `d_lse` is 1 if the log-sum-exp has a gradient too. `deterministic` is 1 for the same bits on every run.
        `d_sinks` is 1 if the gradient of the attention sinks is wanted, and `d_bias` if that of the bias is.
        """
        own, its = ({field[0] for field in kind._fields_} for kind in (cls, ForwardProblem))
        shared = {name: getattr(forward, name) for name in own & its - {"struct_size"}}
        return cls(d_lse=d_lse, deterministic=deterministic, d_sinks=d_sinks, d_bias=d_bias, **shared)


class QuantizeProblem(_Versioned):
    """hattn_quantize_problem: how Q, K and V become operands of E4M3."""

    _fields_ = _fields(
        forward=ctypes.POINTER(ForwardProblem),
        **_all_of(ctypes.c_int32, "source hadamard"),
        seed=ctypes.c_uint64,
    )


class Tensor(_Versioned):
    """hattn_tensor: where a tensor is and how it lies. `tensor` makes one. The caller keeps the memory alive."""

    _fields_ = _fields(
        data=ctypes.c_void_p,
        **_all_of(ctypes.c_int32, "dtype device ndim reserved"),
        shape=ctypes.c_int64 * 4,
        stride=ctypes.c_int64 * 4,
    )


_TensorPointer = ctypes.POINTER(Tensor)


class ForwardArgs(_Versioned):
    """hattn_forward_args: what a forward pass reads and writes."""

    _fields_ = _fields(
        **_all_of(_TensorPointer, "q k v o lse"),
        workspace=ctypes.c_void_p,
        workspace_bytes=ctypes.c_size_t,
        **_all_of(_TensorPointer, "descale_q descale_k descale_v scale_o amax"),
        **_all_of(_TensorPointer, _LENGTHS),
        **_all_of(_TensorPointer, "sinks alibi_slopes max_logits"),
        **_all_of(_TensorPointer, _BLOCK_LISTS),
        bias=_TensorPointer,
        dropout_state=_TensorPointer,
    )


class BackwardArgs(_Versioned):
    """hattn_backward_args: what a backward pass reads and writes."""

    _fields_ = _fields(
        **_all_of(_TensorPointer, "q k v o lse d_o d_lse d_q d_k d_v"),
        workspace=ctypes.c_void_p,
        workspace_bytes=ctypes.c_size_t,
        **_all_of(_TensorPointer, _LENGTHS),
        **_all_of(_TensorPointer, "sinks d_sinks alibi_slopes"),
        **_all_of(_TensorPointer, _BLOCK_LISTS),
        **_all_of(_TensorPointer, "bias dbias"),
        dropout_state=_TensorPointer,
    )


class QuantizeTensor(_Versioned):
    """hattn_quantize_tensor: one tensor to quantise."""

    _fields_ = _fields(
        **_all_of(_TensorPointer, "values stored descale"),
        given=ctypes.c_int32,
        reserved=ctypes.c_uint32,
    )


class QuantizeArgs(_Versioned):
    """hattn_quantize_args: what a quantiser reads and writes."""

    _fields_ = _fields(
        **_all_of(ctypes.POINTER(QuantizeTensor), "q k v"),
        counts=_TensorPointer,
        workspace=ctypes.c_void_p,
        workspace_bytes=ctypes.c_size_t,
        **_all_of(_TensorPointer, _LENGTHS),
    )


_NumbersPointer = ctypes.POINTER(ctypes.c_int32)
_LENGTHS_OF_MASK = "seqlen_q seqlen_kv"
_OWN_MASK = dict(mask=ctypes.c_int32, corner=ctypes.c_int32, window_left=ctypes.c_int64, window_right=ctypes.c_int64)


class Slices(_Versioned):
    """hattn_slices: slices that lists of blocks are made of."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int64, f"{_LENGTHS_OF_MASK} count"),
        **_all_of(_NumbersPointer, "q_ranges k_ranges types"),
    )


class Documents(_Versioned):
    """hattn_documents: documents that lists of blocks are made of."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int64, f"batch {_LENGTHS_OF_MASK}"),
        **_all_of(_NumbersPointer, "q_ids kv_ids"),
    )


class Prefixes(_Versioned):
    """hattn_prefixes: prefixes that lists of blocks are made of."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int64, f"batch {_LENGTHS_OF_MASK}"),
        prefixes=_NumbersPointer,
        **_OWN_MASK,
    )


class Spans(_Versioned):
    """hattn_spans: spans that lists of blocks are made of."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int64, f"batch {_LENGTHS_OF_MASK}"),
        **_all_of(_NumbersPointer, "counts spans"),
        **_OWN_MASK,
        **_all_of(ctypes.c_int32, "within within_corner"),
        **_all_of(ctypes.c_int64, "within_left within_right"),
    )


class DenseMask(_Versioned):
    """hattn_dense_mask: a dense mask that lists of blocks are made of."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int64, f"batch heads_q {_LENGTHS_OF_MASK}"),
        kept=ctypes.POINTER(ctypes.c_uint8),
    )


class BlockArrays(_Versioned):
    """hattn_block_arrays: where the numbers of lists of blocks are."""

    _fields_ = _fields(
        **_all_of(ctypes.c_int32, "block_mask block_mask_most_partial"),
        **_all_of(ctypes.c_int64 * 4, "shape bits_shape"),
        **_all_of(_NumbersPointer, _BLOCK_LISTS),
        **_all_of(ctypes.c_int64, "cnt_elements idx_elements bits_elements"),
    )


#: Every struct by its name in C.
STRUCTS = {
    "hattn_forward_problem": ForwardProblem,
    "hattn_backward_problem": BackwardProblem,
    "hattn_quantize_problem": QuantizeProblem,
    "hattn_tensor": Tensor,
    "hattn_forward_args": ForwardArgs,
    "hattn_backward_args": BackwardArgs,
    "hattn_quantize_tensor": QuantizeTensor,
    "hattn_quantize_args": QuantizeArgs,
    "hattn_slices": Slices,
    "hattn_documents": Documents,
    "hattn_prefixes": Prefixes,
    "hattn_spans": Spans,
    "hattn_dense_mask": DenseMask,
    "hattn_block_arrays": BlockArrays,
}


def dense(shape: Sequence[int]) -> tuple:
    """The strides of a dense tensor, in elements."""
    stride: list = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)


def tensor(
    address: int, dtype: int, shape: Sequence[int], stride: Optional[Sequence[int]] = None, device: int = CPU
) -> Tensor:
    """Describes memory of 1 to 4 dimensions. Strides count elements. Without strides the tensor is dense."""
    shape = tuple(shape)
    stride = dense(shape) if stride is None else tuple(stride)
    if not 1 <= len(shape) <= 4 or len(stride) != len(shape):
        raise ValueError(f"shape {shape} with strides {stride}; allowed: 1 to 4 dimensions, and as many strides")
    four = ctypes.c_int64 * 4
    return Tensor(data=address, dtype=dtype, device=device, ndim=len(shape), shape=four(*shape), stride=four(*stride))


class Library:
    """The shared library.

    Without `path` it is the file that $HOPPER_ATTENTION_LIBRARY names, else the file in the package, else what the
    system's loader finds.
    """

    def __init__(self, path: Optional[str] = None) -> None:
        in_package = _IN_PACKAGE if os.path.exists(_IN_PACKAGE) else SONAME
        #: The file, or the name that the loader resolved.
        self.path = os.fspath(path) if path is not None else os.environ.get(VARIABLE) or in_package
        try:
            handle = ctypes.CDLL(self.path)
        except OSError as error:
            raise OSError(
                f"{error}; name the library in ${VARIABLE}, or install the wheel, or install the library where the loader looks"
            ) from None

        def function(name: str, restype: Any, *argtypes: Any) -> Any:
            found = getattr(handle, name)
            found.restype, found.argtypes = restype, argtypes
            return found

        status, pointer = ctypes.c_int32, ctypes.POINTER
        self._status_name = function("hattn_status_name", ctypes.c_char_p, status)
        self._last_error = function("hattn_last_error", ctypes.c_char_p)
        self._device_count = function("hattn_device_count", status, pointer(ctypes.c_int32))

        def entries(name: str, problem: Any, args: Any) -> types.SimpleNamespace:
            plan, size = ctypes.c_void_p, ctypes.c_size_t
            return types.SimpleNamespace(
                supported=function(f"hattn_{name}_supported", status, pointer(problem), ctypes.c_int32),
                create=function(f"hattn_{name}_plan_create", status, pointer(problem), ctypes.c_int32, pointer(plan)),
                destroy=function(f"hattn_{name}_plan_destroy", None, plan),
                describe=function(f"hattn_{name}_plan_describe", status, plan, ctypes.c_char_p, size, pointer(size)),
                workspace_size=function(f"hattn_{name}_plan_workspace_size", status, plan, pointer(size)),
                run=function(f"hattn_{name}_run", status, plan, pointer(args), ctypes.c_void_p),
            )

        self._entries = {
            ForwardProblem: entries("forward", ForwardProblem, ForwardArgs),
            BackwardProblem: entries("backward", BackwardProblem, BackwardArgs),
            QuantizeProblem: entries("quantize", QuantizeProblem, QuantizeArgs),
        }
        self.abi_version: int = function("hattn_abi_version", ctypes.c_uint32)()
        self.version: str = function("hattn_version", ctypes.c_char_p)().decode()
        if self.abi_version != ABI_VERSION:
            raise OSError(f"{self.path} has ABI version {self.abi_version}; this package is for {ABI_VERSION}")

    def check(self, status: int) -> None:
        """Raises HattnError unless the status is OK."""
        if status != OK:
            raise HattnError(status, self.status_name(status), self.last_error())

    def status_name(self, status: int) -> str:
        """The constant's name, such as HATTN_ERROR_SHAPE."""
        return self._status_name(status).decode()

    def last_error(self) -> str:
        """The text of this thread's last failure. Empty before the first."""
        return self._last_error().decode()

    def device_count(self) -> int:
        """The number of GPUs. 0 without a driver. Creates no context."""
        count = ctypes.c_int32()
        self.check(self._device_count(ctypes.byref(count)))
        return count.value

    def supported(self, problem: _Versioned, device: int) -> bool:
        """Whether a device computes a problem. Loads nothing.

        If it is False, `last_error` says why. A problem that is wrong in itself raises HattnError.
        """
        status = self._entries[type(problem)].supported(ctypes.byref(problem), device)
        if status in (ERROR_UNSUPPORTED, ERROR_NO_DEVICE):
            return False
        self.check(status)
        return True

    def plan(self, problem: _Versioned, device: int) -> Plan:
        """How the device computes the problem. A plan may run any number of times, on any threads and streams."""
        kinds = {ForwardProblem: ForwardPlan, BackwardProblem: BackwardPlan, QuantizeProblem: QuantizePlan}
        return kinds[type(problem)](self, problem, device)


class Plan:
    """What the plans of all passes have in common."""

    _args: Any = None

    def __init__(self, library: Library, problem: _Versioned, device: int) -> None:
        self._library, self._entries = library, library._entries[type(problem)]
        handle = ctypes.c_void_p()
        library.check(self._entries.create(ctypes.byref(problem), device, ctypes.byref(handle)))
        self._handle = handle
        # Not at exit: the process gives everything back by itself, and the driver may be gone by then.
        weakref.finalize(self, self._entries.destroy, handle).atexit = False
        size = ctypes.c_size_t()
        library.check(self._entries.workspace_size(handle, ctypes.byref(size)))
        #: Bytes of scratch memory on the plan's device. Each run that may overlap another needs its own.
        self.workspace_bytes: int = size.value

    def describe(self) -> str:
        """The problem, the kernel and its schedule."""
        length = ctypes.c_size_t()
        self._library.check(self._entries.describe(self._handle, None, 0, ctypes.byref(length)))
        text = ctypes.create_string_buffer(length.value + 1)
        self._library.check(self._entries.describe(self._handle, text, len(text), ctypes.byref(length)))
        return text.value.decode()

    def run_args(self, args: _Versioned, stream: Optional[int] = None) -> None:
        """Runs with a filled struct of arguments. Python's lock is free meanwhile."""
        self._library.check(self._entries.run(self._handle, ctypes.byref(args), stream))

    def _run(self, tensors: dict, workspace: Optional[int], workspace_bytes: int, stream: Optional[int]) -> None:
        pointers = {name: ctypes.pointer(given) for name, given in tensors.items() if given is not None}
        self.run_args(self._args(workspace=workspace, workspace_bytes=workspace_bytes, **pointers), stream)


class ForwardPlan(Plan):
    """hattn_forward_plan."""

    _args = ForwardArgs

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Optional[Tensor] = None,
        workspace: Optional[int] = None,
        workspace_bytes: int = 0,
        stream: Optional[int] = None,
        **more: Optional[Tensor],
    ) -> None:
        """Computes on the CPU. On a GPU it enqueues on `stream`, a CUstream as an integer (None: the default stream).

        `more` has what the problem asks for beside these: of FP8 descale_q, descale_k, descale_v, scale_o and amax, and
        of packed sequences cu_seqlens_q, cu_seqlens_kv, seqused_q and seqused_kv; and sinks, alibi_slopes, max_logits,
        bias, dropout_state and those of BLOCK_LISTS.
        """
        self._run({"q": q, "k": k, "v": v, "o": o, "lse": lse, **more}, workspace, workspace_bytes, stream)


class BackwardPlan(Plan):
    """hattn_backward_plan."""

    _args = BackwardArgs

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        d_o: Tensor,
        d_q: Tensor,
        d_k: Tensor,
        d_v: Tensor,
        d_lse: Optional[Tensor] = None,
        workspace: Optional[int] = None,
        workspace_bytes: int = 0,
        stream: Optional[int] = None,
        **lengths: Optional[Tensor],
    ) -> None:
        """Computes the gradients of q, k and v, in the way of `ForwardPlan.run`. o and lse are what that run wrote.

        `lengths` has the cu_seqlens_q, cu_seqlens_kv, seqused_q and seqused_kv that the problem asks for, and the sinks,
        d_sinks, alibi_slopes, bias, dbias, dropout_state and those of BLOCK_LISTS.
        """
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "lse": lse,
            "d_o": d_o,
            "d_lse": d_lse,
            "d_q": d_q,
            "d_k": d_k,
            "d_v": d_v,
            **lengths,
        }
        self._run(tensors, workspace, workspace_bytes, stream)


class QuantizePlan(Plan):
    """hattn_quantize_plan."""

    _args = QuantizeArgs

    def run(
        self,
        q: Optional[QuantizeTensor] = None,
        k: Optional[QuantizeTensor] = None,
        v: Optional[QuantizeTensor] = None,
        counts: Optional[Tensor] = None,
        workspace: Optional[int] = None,
        workspace_bytes: int = 0,
        stream: Optional[int] = None,
        **lengths: Optional[Tensor],
    ) -> None:
        """Quantises the given tensors, in the way of `ForwardPlan.run`.

        `lengths` has the cu_seqlens_q, cu_seqlens_kv, seqused_q and seqused_kv that the problem asks for.
        """
        self._run({"q": q, "k": k, "v": v, "counts": counts, **lengths}, workspace, workspace_bytes, stream)


_loaded: Optional[Library] = None
_loading = threading.Lock()


def load() -> Library:
    """The library that the whole package uses. The first call loads it."""
    global _loaded
    if _loaded is None:
        with _loading:
            if _loaded is None:
                _loaded = Library()
    return _loaded
