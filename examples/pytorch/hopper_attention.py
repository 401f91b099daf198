"""Hopper Attention's C ABI (version 1) from Python: the standard library's ctypes and nothing else.

    library = Library()                                        # or Library("path/of/libhopper_attention.so")
    problem = ForwardProblem(dtype=F32, batch=1, seqlen_q=4, seqlen_kv=6, heads_q=2, heads_kv=1,
                             head_dim_qk=8, head_dim_vo=8, mask=MASK_CAUSAL)
    plan = library.plan(problem, CPU)                          # once for many runs
    plan.run(q, k, v, o)                                       # four Tensor descriptions of memory

    gradients = library.plan(BackwardProblem.of(problem), CPU) # of a problem that was computed with its log-sum-exp
    gradients.run(q, k, v, o, lse, d_o, d_q, d_k, d_v)

Everything is checked by the library, once: a call that it refuses raises HattnError with its words. hopper_attention_torch.py
puts torch's tensors on top.
"""

import ctypes
import os
import types
import weakref

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
F16, BF16, F32, E4M3 = 1, 2, 3, 4
# hattn_device: this, or a GPU's ordinal
CPU = -1
# hattn_mask, hattn_corner, and a window's bound that bounds nothing
MASK_FULL, MASK_CAUSAL, MASK_WINDOW = 0, 1, 2
BOTTOM_RIGHT, TOP_LEFT = 0, 1
# hattn_scaling
PER_TENSOR, PER_HEAD, PER_BLOCK = 0, 1, 2
UNBOUNDED = -1

# What the loader is asked for when nobody names a file: the soname carries the ABI's version.
SONAME = f"libhopper_attention.so.{ABI_VERSION}"
VARIABLE = "HOPPER_ATTENTION_LIBRARY"


class HattnError(RuntimeError):
    """A call that was refused or failed: its status, the status's name, and the library's words."""

    def __init__(self, status, name, text):
        super().__init__(f"{text} ({name})")
        self.status, self.name, self.text = status, name, text


class _Versioned(ctypes.Structure):
    """A struct of the ABI: starts with its own size and the ABI's version, and is 0 where nothing is said."""

    def __init__(self, **fields):
        # ctypes would take a misspelt name as a new attribute, and the library would see a 0.
        unknown = set(fields) - {name for name, _ in self._fields_}
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        super().__init__(**{"struct_size": ctypes.sizeof(self), "abi_version": ABI_VERSION, **fields})


class ForwardProblem(_Versioned):
    """hattn_forward_problem: what to compute."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("corner", ctypes.c_int32),
        ("lse", ctypes.c_int32),
        ("batch", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("heads_q", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("head_dim_qk", ctypes.c_int64),
        ("head_dim_vo", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
        ("arch", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("amax", ctypes.c_int32),
        ("half_scores", ctypes.c_int32),
    ]


class BackwardProblem(_Versioned):
    """hattn_backward_problem: which gradients to compute. `of` makes one."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("corner", ctypes.c_int32),
        ("d_lse", ctypes.c_int32),
        ("batch", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("heads_q", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("head_dim_qk", ctypes.c_int64),
        ("head_dim_vo", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softmax_scale", ctypes.c_float),
        ("deterministic", ctypes.c_int32),
        ("arch", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
    ]

    @classmethod
    def of(cls, forward, d_lse=0, deterministic=0):
        """The gradients of a forward problem. d_lse: 1 if the log-sum-exp has a gradient too. deterministic: 1 for the same
        bits on every run, which the CPU gives in any case."""
        shared = {name for name, _ in cls._fields_} & {name for name, _ in forward._fields_} - {"struct_size"}
        return cls(d_lse=d_lse, deterministic=deterministic, **{name: getattr(forward, name) for name in shared})


class Tensor(_Versioned):
    """hattn_tensor: where a tensor is and how it lies. `tensor` makes one; whoever does keeps the memory alive."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


class ForwardArgs(_Versioned):
    """hattn_forward_args: what a run reads and writes."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", ctypes.POINTER(Tensor)),
        ("k", ctypes.POINTER(Tensor)),
        ("v", ctypes.POINTER(Tensor)),
        ("o", ctypes.POINTER(Tensor)),
        ("lse", ctypes.POINTER(Tensor)),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("descale_q", ctypes.POINTER(Tensor)),
        ("descale_k", ctypes.POINTER(Tensor)),
        ("descale_v", ctypes.POINTER(Tensor)),
        ("scale_o", ctypes.POINTER(Tensor)),
        ("amax", ctypes.POINTER(Tensor)),
    ]


class BackwardArgs(_Versioned):
    """hattn_backward_args: what a run reads and writes."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", ctypes.POINTER(Tensor)),
        ("k", ctypes.POINTER(Tensor)),
        ("v", ctypes.POINTER(Tensor)),
        ("o", ctypes.POINTER(Tensor)),
        ("lse", ctypes.POINTER(Tensor)),
        ("d_o", ctypes.POINTER(Tensor)),
        ("d_lse", ctypes.POINTER(Tensor)),
        ("d_q", ctypes.POINTER(Tensor)),
        ("d_k", ctypes.POINTER(Tensor)),
        ("d_v", ctypes.POINTER(Tensor)),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


def tensor(address, dtype, shape, stride=None, device=CPU):
    """Describes memory: `[batch, seqlen, heads, head_dim]`, or `[batch, heads, seqlen]` for the log-sum-exp and its gradient. Strides
    count elements; without them the tensor is dense."""
    shape = tuple(shape)
    if stride is None:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= max(size, 1)
    stride = tuple(stride)
    if len(shape) not in (3, 4) or len(stride) != len(shape):
        raise ValueError(f"shape {shape} with strides {stride}; allowed: 4 of each, or 3 for the log-sum-exp")
    four = ctypes.c_int64 * 4
    return Tensor(data=address, dtype=dtype, device=device, ndim=len(shape), shape=four(*shape), stride=four(*stride))


class Library:
    """The shared library: `path`, else what $HOPPER_ATTENTION_LIBRARY names, else what the system's loader finds."""

    def __init__(self, path=None):
        self.path = os.fspath(path) if path is not None else os.environ.get(VARIABLE) or SONAME
        try:
            handle = ctypes.CDLL(self.path)
        except OSError as error:
            raise OSError(f"{error}; name the library in Library(path) or ${VARIABLE}, or install it where the loader looks") from None

        def function(name, restype, *argtypes):
            found = getattr(handle, name)
            found.restype, found.argtypes = restype, argtypes
            return found

        status, pointer = ctypes.c_int32, ctypes.POINTER
        self._status_name = function("hattn_status_name", ctypes.c_char_p, status)
        self._last_error = function("hattn_last_error", ctypes.c_char_p)
        self._device_count = function("hattn_device_count", status, pointer(ctypes.c_int32))

        def entries(name, problem, args):
            handle, size = ctypes.c_void_p, ctypes.c_size_t
            return types.SimpleNamespace(
                supported=function(f"hattn_{name}_supported", status, pointer(problem), ctypes.c_int32),
                create=function(f"hattn_{name}_plan_create", status, pointer(problem), ctypes.c_int32, pointer(handle)),
                destroy=function(f"hattn_{name}_plan_destroy", None, handle),
                describe=function(f"hattn_{name}_plan_describe", status, handle, ctypes.c_char_p, size, pointer(size)),
                workspace_size=function(f"hattn_{name}_plan_workspace_size", status, handle, pointer(size)),
                run=function(f"hattn_{name}_run", status, handle, pointer(args), ctypes.c_void_p),
            )

        self._entries = {
            ForwardProblem: entries("forward", ForwardProblem, ForwardArgs),
            BackwardProblem: entries("backward", BackwardProblem, BackwardArgs),
        }
        self.abi_version = function("hattn_abi_version", ctypes.c_uint32)()
        self.version = function("hattn_version", ctypes.c_char_p)().decode()
        if self.abi_version != ABI_VERSION:
            raise OSError(f"{self.path} has ABI version {self.abi_version}; this binding is for {ABI_VERSION}")

    def check(self, status):
        """Raises HattnError unless the status is OK."""
        if status != OK:
            raise HattnError(status, self.status_name(status), self.last_error())

    def status_name(self, status):
        """The constant's name, such as HATTN_ERROR_SHAPE."""
        return self._status_name(status).decode()

    def last_error(self):
        """What this thread's last failing call was refused for; empty before any."""
        return self._last_error().decode()

    def device_count(self):
        """The GPUs; 0 without a driver. Opens no context."""
        count = ctypes.c_int32()
        self.check(self._device_count(ctypes.byref(count)))
        return count.value

    def supported(self, problem, device):
        """Whether a device computes a problem: opens and loads nothing. When it does not, `last_error` says why; a problem
        that is wrong in itself raises HattnError."""
        status = self._entries[type(problem)].supported(ctypes.byref(problem), device)
        if status in (ERROR_UNSUPPORTED, ERROR_NO_DEVICE):
            return False
        self.check(status)
        return True

    def plan(self, problem, device):
        """How the device computes the problem: a Plan, or a BackwardPlan for a BackwardProblem, for any number of runs, threads
        and streams."""
        return (Plan if isinstance(problem, ForwardProblem) else BackwardPlan)(self, problem, device)


class _Plan:
    """What the plans of both passes have. One lives as long as somebody holds it."""

    def __init__(self, library, problem, device):
        self._library, self._entries = library, library._entries[type(problem)]
        handle = ctypes.c_void_p()
        library.check(self._entries.create(ctypes.byref(problem), device, ctypes.byref(handle)))
        self._handle = handle
        # Not at exit: the process gives everything back by itself, and the driver may be gone by then.
        weakref.finalize(self, self._entries.destroy, handle).atexit = False
        size = ctypes.c_size_t()
        library.check(self._entries.workspace_size(handle, ctypes.byref(size)))
        #: Bytes of scratch memory, on the plan's device, that every run needs for itself.
        self.workspace_bytes = size.value

    def describe(self):
        """The kernel and its schedule, in one line."""
        length = ctypes.c_size_t()
        self._library.check(self._entries.describe(self._handle, None, 0, ctypes.byref(length)))
        text = ctypes.create_string_buffer(length.value + 1)
        self._library.check(self._entries.describe(self._handle, text, len(text), ctypes.byref(length)))
        return text.value.decode()

    def _run(self, args, tensors, workspace, workspace_bytes, stream):
        pointers = {name: ctypes.pointer(given) for name, given in tensors.items() if given is not None}
        args = args(workspace=workspace, workspace_bytes=workspace_bytes, **pointers)
        self._library.check(self._entries.run(self._handle, ctypes.byref(args), stream))


class Plan(_Plan):
    """hattn_forward_plan."""

    def run(self, q, k, v, o, lse=None, workspace=None, workspace_bytes=0, stream=None):
        """Computes on the CPU; enqueues on `stream` (a CUstream as an integer, None for the default stream) on a GPU.
        Python's lock is free meanwhile."""
        self._run(ForwardArgs, {"q": q, "k": k, "v": v, "o": o, "lse": lse}, workspace, workspace_bytes, stream)


class BackwardPlan(_Plan):
    """hattn_backward_plan."""

    def run(self, q, k, v, o, lse, d_o, d_q, d_k, d_v, d_lse=None, workspace=None, workspace_bytes=0, stream=None):
        """Computes the gradients of q, k and v, as `Plan.run` does the forward pass that gave o and lse."""
        tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "d_lse": d_lse, "d_q": d_q, "d_k": d_k, "d_v": d_v}
        self._run(BackwardArgs, tensors, workspace, workspace_bytes, stream)
