"""The C entry of hattn_peer.h, seen from Python: the argument struct and a loader. Needs ctypes only."""

import ctypes
import os

STATUS = {0: "ok", 1: "invalid argument", 2: "unsupported problem", 3: "a CUDA call failed"}
DTYPES = {"f16": 0, "bf16": 1}
MASKS = {"full": 0, "causal": 1, "window": 2}
WORKSPACE_BYTES = 16 << 20


class Args(ctypes.Structure):
    """hattn_peer_fwd_args; test_sweep.py checks its size and offsets against the header's."""

    _fields_ = [
        ("struct_bytes", ctypes.c_uint64),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64 * 3),
        ("k_stride", ctypes.c_int64 * 3),
        ("v_stride", ctypes.c_int64 * 3),
        ("o_stride", ctypes.c_int64 * 3),
        ("batch", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_kv", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("head_dim_qk", ctypes.c_int32),
        ("head_dim_vo", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("corner", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    ]


class Library:
    """A shared object that exports hattn_peer_fwd and hattn_peer_name. Raises OSError or AttributeError when it does not."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        # RTLD_LOCAL, so that two libraries with the same inner symbols do not see each other's.
        self._handle = ctypes.CDLL(self.path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        name = self._handle.hattn_peer_name
        name.restype, name.argtypes = ctypes.c_char_p, []
        self.name = name().decode()
        self._fwd = self._handle.hattn_peer_fwd
        self._fwd.restype, self._fwd.argtypes = ctypes.c_int, [ctypes.POINTER(Args)]
        self._error = getattr(self._handle, "hattn_peer_last_error", None)
        if self._error is not None:
            self._error.restype, self._error.argtypes = ctypes.c_char_p, []

    def forward(self, args):
        """Enqueues the forward that `args` describes; returns the status code."""
        return self._fwd(ctypes.byref(args))

    def complaint(self, code):
        """What a status means, with the library's own words where it has some."""
        text = STATUS.get(code, f"status {code}")
        own = self._error() if self._error is not None else None
        return f"{text}: {own.decode(errors='replace')}" if own else text


def label_and_path(text):
    """`NAME=PATH` or `PATH`; a path with '=' in it needs a name before it."""
    label, equals, path = text.partition("=")
    if equals and "/" not in label:
        return label, path
    return None, text
