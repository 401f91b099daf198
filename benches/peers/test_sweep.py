"""Tests of what needs no GPU: the C entry as Python sees it, and the sweep's own pieces. `python3 -m unittest discover benches/peers`."""

import collections
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import backward
import entry
import fp8
import inputs
import sweep

# A peer that answers every call with the status that the batch says, and notes the stream that it was given.
PEER = """
#include "hattn_peer.h"
static char text[] = "too many heads";
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return args->struct_bytes == sizeof(*args) ? args->batch : HATTN_PEER_INVALID; }
char const* hattn_peer_last_error(void) { return text; }
char const* hattn_peer_name(void) { return "stub"; }
"""
# Its gradients need as many bytes as there are queries.
BACKWARD = """
int hattn_peer_bwd(hattn_peer_bwd_args const* args) { return args->struct_bytes == sizeof(*args) ? args->batch : HATTN_PEER_INVALID; }
int hattn_peer_bwd_workspace(hattn_peer_bwd_args const* args, uint64_t* bytes) { *bytes = args->seqlen_q; return args->heads_q == 7 ? HATTN_PEER_UNSUPPORTED : 0; }
"""
# Its forward of e4m3 operands answers with the scaling, if a factor came.
FP8 = """
int hattn_peer_fwd_fp8(hattn_peer_fwd_fp8_args const* args) { return args->struct_bytes == sizeof(*args) && args->v_descale ? args->scaling : HATTN_PEER_INVALID; }
"""
# It says that it takes packed sequences, and its forward answers with their number if offsets came.
PACKS = """
#include "hattn_peer.h"
int hattn_peer_fwd(hattn_peer_fwd_args const* args) { return args->cu_seqlens && args->longest == 5 ? args->batch : HATTN_PEER_INVALID; }
int hattn_peer_packs(void) { return 1; }
char const* hattn_peer_name(void) { return "stub"; }
"""
POINT = {"direction": "bwd", "dtype": "bf16", "heads_q": 4, "heads_kv": 2, "head_dim": 64, "causal": True, "seqlen": 512, "batch": 0}


def compiled(source, folder, *options):
    out = os.path.join(folder, "out.so")
    subprocess.run(["cc", "-I", HERE, "-x", "c", "-", "-o", out, *options], input=source.encode(), check=True)
    return out


class HeadDims(unittest.TestCase):
    def test_a_pair_reaches_the_entry(self):
        tensor = types.SimpleNamespace(data_ptr=lambda: 0, stride=lambda: (3, 2, 1, 1))
        fields = {}
        for p in (POINT, {**POINT, "head_dim": 192, "head_dim_vo": 128}):
            a = entry.filled(entry.Args, p, dict.fromkeys("qkvo", tensor), tensor, None)
            fields[entry.values(p)] = (a.head_dim_qk, a.head_dim_vo, round(a.softmax_scale**-2))
        self.assertEqual(fields, {64: (64, 64, 64), 128: (192, 128, 192)})

    def test_peers_are_asked_for_what_they_take(self):
        taken = {}
        for name in ("cudnn", "fa2", "fa3", "fa4"):
            for dims in ((64, 64), (256, 256), (264, 264), (192, 128), (128, 192)):
                with contextlib.suppress(RuntimeError):
                    sweep.refuse_dims(name, {"head_dim": dims[0], "head_dim_vo": dims[1]})
                    taken.setdefault(dims, []).append(name)
        self.assertEqual({dims: len(names) for dims, names in taken.items()}, {(64, 64): 4, (256, 256): 4, (192, 128): 3})
        self.assertNotIn("fa2", taken[192, 128])
        with self.assertRaisesRegex(RuntimeError, "unsupported problem: fa2 is not asked for head dims 192 and 128"):
            sweep.refuse_dims("fa2", {"head_dim": 192, "head_dim_vo": 128})

    def test_outputs_lie_as_queries_do(self):
        try:
            import torch
        except ImportError as error:
            self.skipTest(f"no torch: {error}")
        for q in (torch.empty(2, 5, 3, 24), torch.empty(2, 3, 5, 24).transpose(1, 2), torch.empty(1, 1, 3, 24)):
            o = entry.like_output({"head_dim": 24, "head_dim_vo": 8}, q, torch)
            self.assertEqual((tuple(o.shape), o.numel()), ((*q.shape[:3], 8), o.untyped_storage().nbytes() // 4))
            self.assertEqual([step // 8 for step in o.stride()[:3]], [step // 24 for step in q.stride()[:3]])
            same = entry.like_output({"head_dim": 24}, q, torch, torch.bfloat16)
            self.assertEqual((same.stride(), same.dtype), (q.stride(), torch.bfloat16))


class Entry(unittest.TestCase):
    def test_structs_match_the_header(self):
        structs = {"hattn_peer_fwd_args": entry.Args, "hattn_peer_bwd_args": entry.BackwardArgs, "hattn_peer_fwd_fp8_args": entry.Fp8Args}
        for struct, kind in structs.items():
            names = [name for name, _ in kind._fields_]
            asked = [f"sizeof({struct})"] + [f"offsetof({struct}, {name})" for name in names]
            lines = "".join(f'printf("%zu\\n", (size_t)({x}));' for x in asked)
            source = f'#include "hattn_peer.h"\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {{ {lines} return 0; }}\n'
            with tempfile.TemporaryDirectory() as folder:
                told = [int(x) for x in subprocess.run([compiled(source, folder)], stdout=subprocess.PIPE, check=True).stdout.split()]
            self.assertEqual(told[0], entry.ctypes.sizeof(kind))
            self.assertEqual(told[1:], [getattr(kind, name).offset for name in names])

    def test_fp8_args_only_grew(self):
        # An adapter that was compiled with the older header reads what it knows where it always was.
        self.assertEqual((entry.Fp8Args.stream.offset, entry.Fp8Args.workspace_bytes.offset, entry.Fp8Args.half_scores.offset), (232, 248, 256))
        old = FP8.replace("sizeof(*args)", "256").replace("==", ">=", 1)
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER + old, folder, "-shared", "-fPIC"))
        args = entry.Fp8Args(struct_bytes=264, v_descale=1, scaling=2, half_scores=1)
        self.assertEqual(library.forward_fp8(args), 2)

    def test_constants_match_the_header(self):
        with open(os.path.join(HERE, "hattn_peer.h")) as file:
            header = dict(re.findall(r"HATTN_PEER_(\w+) = (\d+)", file.read()))
        for name, value in list(entry.DTYPES.items()) + list(entry.MASKS.items()):
            self.assertEqual(int(header[name.upper()]), value)
        for name, value in entry.SCALINGS.items():
            self.assertEqual(int(header[f"PER_{name.upper()}"]), value)
        self.assertEqual({int(header[x]) for x in ("OK", "INVALID", "UNSUPPORTED", "FAILED")}, set(entry.STATUS))

    def test_a_library_is_called_and_its_words_are_told(self):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER, folder, "-shared", "-fPIC"))
            self.assertEqual(library.name, "stub")
            args = entry.Args()
            args.struct_bytes = entry.ctypes.sizeof(args)
            self.assertEqual(library.forward(args), 0)
            args.batch = 2
            self.assertEqual(library.complaint(library.forward(args)), "unsupported problem: too many heads")

    def test_a_backward_is_called_and_asked_for_its_scratch(self):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER + BACKWARD, folder, "-shared", "-fPIC"))
        self.assertTrue(library.has_backward)
        args = entry.BackwardArgs()
        args.struct_bytes, args.seqlen_q = entry.ctypes.sizeof(args), 300
        self.assertEqual((library.backward(args), library.backward_workspace(args)), (0, (0, 300)))
        args.batch, args.heads_q = 2, 7
        self.assertEqual((library.backward(args), library.backward_workspace(args)[0]), (2, 2))

    def test_a_library_without_a_backward_has_none(self):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER, folder, "-shared", "-fPIC"))
        self.assertFalse(library.has_backward)
        self.assertEqual(library.backward_workspace(entry.BackwardArgs()), (0, entry.WORKSPACE_BYTES))
        with self.assertRaisesRegex(RuntimeError, f"{entry.STATUS[2]}: fa9 exports no hattn_peer_bwd"):
            backward.contestant(types.SimpleNamespace(name="fa9", role="peer", library=library, torch=None), None)

    def test_labels(self):
        self.assertEqual(entry.label_and_path("fa3=/a/b=c.so"), ("fa3", "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("/a/b=c.so"), (None, "/a/b=c.so"))
        self.assertEqual(entry.label_and_path("x.so"), (None, "x.so"))

    def test_a_library_without_the_entry_is_refused(self):
        self.assertRaises((OSError, AttributeError), entry.Library, "libm.so.6")


def packed_point(**more):
    """Three sequences of 8 tokens together, and as many operations as four of three."""
    packed = {"kind": "long", "lengths": [2, 5, 1], "dense": [4, 3]}
    return {**POINT, "direction": "fwd", "batch": 1, "seqlen": 8, "packed": packed, **more}


class FakeTensor:
    """What the contestants ask of a tensor."""

    def __init__(self, address, stride=(1, 2, 3, 1), bytes=0):
        self.address, self.strides, self.bytes, self.device, self.dtype = address, stride, bytes, "cuda", "bf16"
        self.wants_grad, self.copied, self.value = False, None, None

    data_ptr = lambda self: self.address
    squeeze = lambda self, dim: ("squeezed", self.address)
    unsqueeze = lambda self, dim: ("unsqueezed", self.address)
    stride = lambda self: self.strides
    size = lambda self: (9, 9, 9, 9)
    detach = lambda self: FakeTensor(self.address, self.strides)

    def requires_grad_(self):
        self.wants_grad = True
        return self

    def fill_(self, value):
        self.value = value
        return self

    def copy_(self, other):
        self.copied = other
        return self


class FakeTorch:
    """What the contestants ask of PyTorch: it notes what it is asked for."""

    uint8, bfloat16, float32, int32, __version__ = "uint8", "bf16", "f32", "i32", "2"

    def __init__(self):
        self.cuda = types.SimpleNamespace(
            synchronize=lambda: None, current_stream=lambda: types.SimpleNamespace(cuda_stream=77)
        )
        self.nn, self.ops = types.SimpleNamespace(attention=mock.Mock(), functional=mock.Mock()), mock.Mock()
        self.autograd = types.SimpleNamespace(grad=lambda *args, **keywords: (args, keywords))
        self.addresses, self.grad_enabled = iter(range(1000, 2000)), False

    def empty_strided(self, size, stride, dtype, device):
        return FakeTensor(next(self.addresses), stride)

    def tensor(self, numbers, dtype, device):
        made = FakeTensor(next(self.addresses))
        made.numbers = numbers
        return made

    def full(self, size, value, dtype, device):
        return FakeTensor(next(self.addresses), bytes=size).fill_(value)

    def empty(self, count, dtype, device):
        return FakeTensor(next(self.addresses), bytes=count)

    @contextlib.contextmanager
    def enable_grad(self):
        self.grad_enabled = True
        yield
        self.grad_enabled = False


class Backward(unittest.TestCase):
    def given(self):
        return {name: FakeTensor(at, (at, 2 * at, 3 * at, 1)) for at, name in enumerate(("q", "k", "v", "o", "d_o", "lse"), 1)}

    def test_a_library_gets_addresses_strides_and_scratch(self):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(PEER + BACKWARD, folder, "-shared", "-fPIC"))
        inner = types.SimpleNamespace(name="x", role="peer", library=library, torch=FakeTorch())
        x = backward.contestant(inner, None)
        x.prepare({**POINT, "window": 9}, self.given())
        args = x.args
        self.assertEqual([getattr(args, name) for name in ("q", "k", "v", "o", "d_o", "lse")], [1, 2, 3, 4, 5, 6])
        self.assertEqual([getattr(args, name) for name in backward.NAMES], [x.data_ptr() for x in x.gradients])
        for name, like in (("d_o", 5), ("d_q", 1), ("d_k", 2), ("d_v", 3)):
            self.assertEqual(list(getattr(args, name + "_stride")), [like, 2 * like, 3 * like])
        self.assertTrue(all(math.isnan(gradient.value) for gradient in x.gradients))
        self.assertEqual((args.heads_q, args.heads_kv, args.mask, args.window_left, args.window_right), (4, 2, 2, 9, 0))
        self.assertEqual((args.stream, args.workspace, args.workspace_bytes, x.workspace.bytes), (77, x.workspace.address, 512, 512))
        self.assertIs(x.call(), x.gradients)
        args.batch = 2
        self.assertRaisesRegex(RuntimeError, "unsupported problem: too many heads", x.call)
        self.assertRaisesRegex(RuntimeError, "unsupported problem", x.prepare, {**POINT, "heads_q": 7}, self.given())

    def test_pytorch_is_asked_for_gradients_of_one_forward(self):
        torch, given = FakeTorch(), self.given()

        class Inner:
            name, role, forwards = "fa2", "peer", 0

            def prepare(self, p, q, k, v):
                self.leaves = (q, k, v)

            @contextlib.contextmanager
            def context(self):
                self.inside = True
                yield
                self.inside = False

            def call(self):
                self.forwards += 1
                self.ready = torch.grad_enabled and self.inside and all(x.wants_grad for x in self.leaves)
                self.o = FakeTensor(50, (7, 8, 9, 1))
                return self.o

        inner = Inner()
        x = backward.contestant(inner, torch)
        x.prepare(POINT, given)
        self.assertTrue(inner.ready and not torch.grad_enabled)
        for _ in range(2):
            args, keywords = x.call()
            self.assertEqual((args[0], args[1], keywords), (inner.o, inner.leaves, {"retain_graph": True}))
            # dO in the order of this library's own O.
            self.assertEqual((args[2].copied, args[2].stride()), (given["d_o"], (7, 8, 9, 1)))
        self.assertEqual(inner.forwards, 1)
        with x.context():
            self.assertTrue(inner.inside)

    def test_o_and_the_lse_are_of_the_first_forward_that_is_right(self):
        class Forward:
            def __init__(self, name, o):
                self.name, self.o, self.lse = name, o, types.SimpleNamespace(clone=lambda: f"lse of {name}")

            def prepare(self, *_):
                if self.o is None:
                    raise RuntimeError("no kernel")

            def call(self):
                return types.SimpleNamespace(clone=lambda: self.o)

        judge = lambda x, o: "row 1 > 0" if o.clone() == "wrong" else None
        forwards = [Forward("a", None), Forward("b", "wrong"), Forward("c", "right"), Forward("d", "right")]
        saved = lambda forwards, **p: backward.saved({**POINT, **p}, None, None, None, forwards, judge, FakeTorch())
        self.assertEqual(saved(forwards), ("right", "lse of c"))
        with self.assertRaisesRegex(RuntimeError, "a: no kernel; b: row 1 > 0; PyTorch's FlashAttention-2: it has no window$"):
            saved(forwards[:2], window=9)

    def test_gradients_may_move_in_their_last_bits_alone(self):
        torch = types.SimpleNamespace(equal=lambda x, y: x == y)
        original, backward.whole = backward.whole, lambda x, y, torch: abs(x - y)
        bit = backward.ULPS["bf16"] / 2
        try:
            moved = lambda by: backward.changed(POINT, (1.0,) * 3, (1.0 + by,) * 3, torch)
            self.assertEqual(moved(0.0), [])
            self.assertEqual(moved(bit), [])
            self.assertEqual(moved(4 * bit), ["d_q", "d_k", "d_v"])
            self.assertEqual(moved(math.nan), ["d_q", "d_k", "d_v"])
        finally:
            backward.whole = original

    def test_nan_is_larger_than_everything(self):
        for a, b in ((math.nan, 1.0), (1.0, math.nan)):
            self.assertTrue(math.isnan(backward.larger(a, b)))
        self.assertEqual((backward.larger(1.0, 2.0), backward.larger(2.0, 1.0)), (2.0, 2.0))


class Fp8(unittest.TestCase):
    def ours(self, source):
        with tempfile.TemporaryDirectory() as folder:
            library = entry.Library(compiled(source, folder, "-shared", "-fPIC"))
        workspace = types.SimpleNamespace(data_ptr=lambda: 5, numel=lambda: 6)
        return types.SimpleNamespace(name="x", role="ours", library=library, torch=FakeTorch(), workspace=workspace)

    def operands(self):
        stored = [FakeTensor(at, (at, 2 * at, 3 * at, 1)) for at in (1, 2, 3)]
        p = {**POINT, "direction": "fwd", "dtype": "e4m3", "batch": 1}
        return types.SimpleNamespace(p=p, stored=stored, factors=[FakeTensor(at) for at in (11, 12, 13)])

    def test_a_library_gets_addresses_strides_and_factors(self):
        for library, name, scaling in ((self.ours(PEER + FP8), "x", 0), (fp8.Blocks(self.ours(PEER + FP8)), "x-block", 2)):
            x = fp8.contestant(library, None, None)
            self.assertEqual((x.name, x.role), (name, "ours"))
            x.prepare(self.operands())
            args = x.args
            self.assertEqual([getattr(args, field) for field in ("q", "k", "v", "q_descale", "k_descale", "v_descale")], [1, 2, 3, 11, 12, 13])
            self.assertEqual((list(args.v_stride), args.stream, args.workspace, args.workspace_bytes), ([3, 6, 9], 77, 5, 6))
            self.assertEqual((args.dtype, args.scaling, args.o_dtype, args.mask, args.heads_kv), (2, scaling, 1, 1, 2))
            self.assertEqual((args.half_scores, args.wish, args.struct_bytes), (1, 0, 304))
            self.assertEqual((args.o, args.lse), (x.o.address, x.lse.address))
            self.assertTrue(math.isnan(x.o.value) and math.isnan(x.lse.value))
            args.scaling = 0
            self.assertIs(x.call(), x.o)
            args.scaling = 2
            self.assertRaisesRegex(RuntimeError, "unsupported problem: too many heads", x.call)

    def test_a_name_may_ask_for_a_kernel(self):
        names = {"x": 0, "x-block": 0, "x@f16": 1, "x@f32-block": 2, "x@f16-192": 1 + 16 * 192, "y@f32-128x3": 2 + 16 * 128 + 65536 * 3}
        self.assertEqual({name: fp8.wish_of(name) for name in names}, names)
        for name in ("x@", "x@f8", "x@f32x2", "x@f32-128x2-"):
            self.assertRaisesRegex(RuntimeError, "allowed after @", fp8.wish_of, name)

    def test_who_takes_no_e4m3_is_unsupported(self):
        refused = lambda x, frontend=None: self.assertRaisesRegex(RuntimeError, entry.STATUS[2], fp8.contestant, x, frontend, None)
        refused(self.ours(PEER))
        refused(fp8.Blocks(self.ours(PEER)))
        refused(types.SimpleNamespace(name="cudnn"))
        refused(types.SimpleNamespace(name="fa2"), object())
        self.assertIsInstance(fp8.contestant(types.SimpleNamespace(name="cudnn"), object(), None), fp8.CudnnFp8)

    def test_cudnn_is_missing_where_its_frontend_is(self):
        job, missing, before = {"points": [{"dtype": "e4m3"}], "python_peers": True}, [], sys.modules.get("cudnn")
        sys.modules["cudnn"] = None  # what makes an import fail
        try:
            self.assertIsNone(sweep.load_frontend({**job, "points": [{"dtype": "bf16"}]}, missing))
            self.assertIsNone(sweep.load_frontend({**job, "python_peers": False}, missing))
            self.assertEqual(missing, [])
            self.assertIsNone(sweep.load_frontend(job, missing))
        finally:
            del sys.modules["cudnn"]
            if before is not None:
                sys.modules["cudnn"] = before
        [told] = missing
        self.assertEqual((told["name"], told["role"]), ("cudnn", "peer"))
        self.assertIn("e4m3 operands need nvidia-cudnn-frontend", told["error"])

    def test_ours_run_twice_where_there_are_e4m3_points_and_at_these_alone(self):
        library, told = self.ours(PEER + FP8), []
        found = [library, fp8.Blocks(library)]
        original, sweep.make_point = sweep.make_point, lambda *_: None
        try:
            for dtype in ("e4m3", "bf16"):
                job = {"banned": {}, "layout": "bshd"}
                sweep.run_point(0, {**POINT, "dtype": dtype}, found, job, None, lambda event, **fields: told.append(fields), FakeTorch())
        finally:
            sweep.make_point = original
        self.assertEqual([[run["name"] for run in fields["runs"]] for fields in told], [["x", "x-block"], ["x"]])


class Packed(unittest.TestCase):
    def ours(self, source=PACKS):
        with tempfile.TemporaryDirectory() as folder:
            return entry.Library(compiled(source, folder, "-shared", "-fPIC"))

    def test_a_library_gets_offsets(self):
        x = sweep.Dense(self.ours(), "x-dense", "ours", FakeTorch())
        x.workspace.numel = lambda: 6
        p = packed_point()
        x.prepare(p, *(FakeTensor(at, (at, 2 * at, 3 * at, 1)) for at in (1, 2, 3)))
        self.assertEqual(x.offsets.numbers, [0, 2, 7, 8])
        self.assertEqual((x.args.cu_seqlens, x.args.longest, x.args.reserved_2), (x.offsets.address, 5, 0))
        self.assertEqual((x.args.batch, x.args.seqlen_q, x.args.seqlen_kv, x.lse.bytes), (3, 8, 8, (1, 4, 8)))
        self.assertEqual(x.library.forward(x.args), 3)
        x.prepare(entry.dense(p), *(FakeTensor(at) for at in (1, 2, 3)))
        self.assertEqual((x.args.batch, x.args.seqlen_q, x.args.cu_seqlens, x.offsets), (4, 3, None, None))

    def test_who_does_not_pack_is_unsupported(self):
        library = self.ours(PEER + BACKWARD + FP8)
        refused = lambda call, *args: self.assertRaisesRegex(RuntimeError, entry.STATUS[2], call, *args)
        refused(library.offsets, packed_point(), FakeTorch())
        self.assertIsNone(library.offsets(POINT, FakeTorch()))
        refused(object.__new__(sweep.Sdpa).prepare, packed_point(), 1, 2, 3)
        refused(sweep.Flash("fa3", None, "package", "1").prepare, packed_point(), FakeTensor(1), FakeTensor(2), FakeTensor(3))
        refused(fp8.CudnnFp8(mock.Mock(), "cudnn", FakeTorch()).prepare, types.SimpleNamespace(p=packed_point()))

    def test_packages_get_offsets_and_tensors_without_a_batch(self):
        asked = {}

        def varlen(*qkv, **keywords):
            asked.update(keywords, qkv=qkv)
            return FakeTensor(9), "lse"

        peer = sweep.Flash("fa4", None, "package", "1", varlen, FakeTorch())
        peer.prepare(packed_point(window=2), FakeTensor(1), FakeTensor(2), FakeTensor(3))
        self.assertEqual(peer.call(), ("unsqueezed", 9))
        self.assertEqual(asked["qkv"], tuple(("squeezed", at) for at in (1, 2, 3)))
        self.assertEqual((asked["cu_seqlens_q"].numbers, asked["cu_seqlens_k"].numbers), ([0, 2, 7, 8],) * 2)
        self.assertEqual((asked["max_seqlen_q"], asked["max_seqlen_k"], asked["causal"], asked["window_size"]), (5, 5, True, (2, 0)))

    def test_pytorchs_flash_attention_gets_them_too(self):
        torch = FakeTorch()
        operator = torch.ops.aten._flash_attention_forward
        operator.return_value = (FakeTensor(9), "lse")
        peer = sweep.SdpaFlash(torch)
        for window, causal, keywords in ((None, True, {}), (2, False, {"window_size_left": 2, "window_size_right": 0})):
            peer.prepare(packed_point(window=window), FakeTensor(1), FakeTensor(2), FakeTensor(3))
            self.assertEqual(peer.call(), ("unsqueezed", 9))
            args = operator.call_args.args
            self.assertEqual(args[:3], tuple(("squeezed", at) for at in (1, 2, 3)))
            self.assertEqual(([x.numbers for x in args[3:5]], args[5:]), ([[0, 2, 7, 8]] * 2, (5, 5, 0.0, causal, False)))
            self.assertEqual(operator.call_args.kwargs, keywords)

    def test_ours_runs_twice_at_packed_points_and_at_these_alone(self):
        torch, told = FakeTorch(), []
        points = [packed_point(), {**POINT, "direction": "fwd"}, packed_point(dtype="e4m3")]
        with tempfile.TemporaryDirectory() as folder:
            path = compiled(PACKS, folder, "-shared", "-fPIC")
            job = {"ours": [path, f"y={path}"], "peers": [f"z={path}"], "python_peers": False, "points": points}
            found, missing = sweep.load(job, torch)
        self.assertEqual(([x.name for x in found], missing), (["stub", "y", "z", "stub-block", "y-block", "stub-dense"], []))
        with mock.patch.object(sweep, "make_point", lambda *_: None):
            for p in points:
                tell = lambda event, **fields: told.append([run["name"] for run in fields["runs"]])
                sweep.run_point(0, p, found, {"banned": {}, "layout": "bshd"}, None, tell, torch)
        self.assertEqual(told, [["stub", "y", "z", "stub-dense"], ["stub", "y", "z"], ["stub", "y", "z", "stub-dense"]])

    def test_each_run_has_its_own_point(self):
        def point(name):
            made = mock.Mock()
            made.contestant, made.prepare = lambda x: (name, x.name), lambda x: told.append((name, x.name))
            made.check, made.changed = lambda x, outputs, agreed: (name, agreed), lambda before, after: name
            return made

        told, made = [], []
        with mock.patch.object(sweep, "make_one", lambda p, *_: made.append(p) or point("packed" if "packed" in p else "dense")):
            beside = sweep.make_point(packed_point(), None, None, None, None)
        self.assertEqual([(p["batch"], p["seqlen"]) for p in made], [(1, 8), (4, 3)])
        ours, dense = (types.SimpleNamespace(name=name) for name in ("x", "x-dense"))
        self.assertEqual((beside.contestant(ours), beside.contestant(dense)), (("packed", "x"), ("dense", "x-dense")))
        self.assertEqual((beside.check(ours, (), "o"), beside.check(dense, (), "o")), (("packed", "o"), ("dense", None)))
        for x in (ours, dense):
            beside.prepare(x)
        self.assertEqual(told, [("packed", "x"), ("dense", "x-dense")])

    def test_packed_e4m3_operands_and_their_dense_batch_promise_nothing(self):
        library = self.ours(PACKS + 'int hattn_peer_fwd_fp8(hattn_peer_fwd_fp8_args const* args) { return args->cu_seqlens != 0; }')
        inner = types.SimpleNamespace(name="x", role="ours", library=library, torch=FakeTorch(), workspace=mock.Mock())
        inner.workspace.data_ptr, inner.workspace.numel = lambda: 5, lambda: 6
        promised = []
        packed = packed_point(dtype="e4m3")
        alone = {**POINT, "dtype": "e4m3"}
        for p in (packed, entry.dense(packed), alone, {**alone, "f32_scores": True}):
            x = fp8.contestant(inner, None, None)
            x.prepare(types.SimpleNamespace(p=p, stored=[FakeTensor(at) for at in (1, 2, 3)], factors=[FakeTensor(at) for at in (4, 5, 6)]))
            promised.append((x.args.half_scores, library.forward_fp8(x.args)))
        self.assertEqual(promised, [(0, 1), (0, 0), (1, 0), (0, 0)])


class Inputs(unittest.TestCase):
    def test_words_and_nan_queries(self):
        self.assertEqual(inputs.words([{}, {"inputs": "normal"}]), "unit-variance normal inputs")
        points = [{}, {"inputs": "late"}, {"inputs": "nan"}, {"inputs": "late"}]
        self.assertEqual(inputs.words(points), "unit-variance normal inputs, or these as late, nan")
        self.assertEqual([inputs.nan_rows({"inputs": name}) for name in inputs.CLASSES[:4]], [None] * 4)
        self.assertEqual(list(range(300))[inputs.nan_rows({"inputs": "nan"})], [0, 128, 256])

    def test_the_classes_are_those_of_hattn(self):
        with open(os.path.join(HERE, "../../crates/hopper-attention-verify/src/inputs.rs")) as file:
            source = file.read()
        self.assertEqual(tuple(re.findall(r'Self::\w+ => "(\w+)"', source)), inputs.CLASSES)
        constants = {name: float(value) for name, value in re.findall(r"const (\w+): \w+ = ([\d.]+);", source)}
        for name in ("PEAKY", "ALONG", "SINK", "LATE", "KEYS_TO_A_LATE_ONE", "QUERIES_TO_A_NAN"):
            self.assertEqual(constants[name], getattr(inputs, name), name)
        with self.assertRaisesRegex(RuntimeError, "inputs flat; allowed: normal, peaky, sink, late, nan"):
            inputs.change({"inputs": "flat"}, None, None, None)

    def test_e4m3_operands_have_a_factor_a_head_unless_they_are_normal(self):
        asked = []
        with mock.patch.object(fp8, "contestant", lambda x, frontend, torch, scaling: asked.append(scaling)):
            for p in ({}, {"inputs": "sink"}):
                fp8.Point({**POINT, **p}, None, None, None, None, None, None).contestant(None)
        self.assertEqual(asked, ["tensor", "head"])

    def test_errors_are_means_over_draws(self):
        made, errors = [], iter([(2.0, 5.0), (3.0, 9.0)])
        point = types.SimpleNamespace(prepare=lambda x: made.append(x.name), error=lambda x, outputs: next(errors))
        runners = [types.SimpleNamespace(name=name, context=contextlib.nullcontext, call=lambda: "o") for name in ("a", "b")]
        runs = {"a": {"status": "ok", "check": {"rms": 1.0, "max": 1.0, "row": 7}}, "b": {"status": "wrong", "check": {}}}
        forward = {**POINT, "direction": "fwd"}
        more = lambda p, **job: sweep.more_draws(p, job, runners, runs, None, FakeTorch())
        with mock.patch.object(sweep, "make_point", lambda *_: point):
            more(forward)
            more(POINT, draws=3)
            self.assertEqual((made, runs["a"]["check"]["rms"]), ([], 1.0))
            more(forward, draws=3)
        self.assertEqual(made, ["a", "a"])
        self.assertEqual(runs["a"]["check"], {"rms": 2.0, "max": 5.0, "row": 7, "draws": 3})
        self.assertEqual(runs["b"]["check"], {})


@unittest.skipUnless(__import__("importlib.util").util.find_spec("torch"), "this Python has no PyTorch")
class InputsInPyTorch(unittest.TestCase):
    """On the CPU."""

    def setUp(self):
        import torch

        torch.manual_seed(1)
        self.torch = torch

    def operands(self, name, seqlen=512, heads=2, dim=64):
        q, k = (self.torch.randn(2, seqlen, heads, dim) for _ in "qk")
        before = q.clone(), k.clone()
        inputs.change({"inputs": name, "head_dim": dim}, q, k, self.torch)
        return (q, k), before

    def test_what_a_class_makes_of_normal_operands(self):
        (q, k), (q_before, k_before) = self.operands("peaky")
        self.assertTrue(self.torch.equal(q, 3 * q_before) and self.torch.equal(k, 3 * k_before))
        (q, k), (_, before) = self.operands("sink")
        self.assertEqual(sorted({at[1] for at in (k != before).nonzero().tolist()}), [0])
        scores = self.torch.einsum("bqhd,bhd->bqh", q, k[:, 0]) / 8
        self.assertTrue(bool(((scores.mean(1) - 15).abs() < 1).all()))
        (q, k), (_, before) = self.operands("late")
        changed = (k != before).any(-1)
        self.assertTrue(bool((changed.sum(1) == 8).all()))
        scores = (self.torch.einsum("bqhd,bkhd->bqkh", q, k) / 8).mean(1)[changed]
        self.assertTrue(-1.5 < float(scores.min()) and 15 < float(scores.max()) < 26.5)
        (q, k), (q_before, k_before) = self.operands("nan")
        at = self.torch.isnan(q).all(-1).any(-1).any(0).nonzero().flatten().tolist()
        self.assertEqual((at, int(self.torch.isnan(q).sum())), ([0, 128, 256, 384], 4 * 2 * 2 * 64))
        self.assertTrue(self.torch.equal(k, k_before))

    def test_nan_belongs_where_a_query_is_nan(self):
        torch = self.torch
        exact = torch.randn(1, 256, 1, 8, dtype=torch.float64)
        exact[:, ::128] = float("nan")
        rows = torch.arange(0, 256, 4)
        lse = torch.zeros(256, dtype=torch.float64)
        lse[::128] = float("nan")
        reference = [(0, 0, rows, exact[0, rows, 0], lse[rows])]
        x = types.SimpleNamespace(lse=lse.float().view(1, 1, 256))
        nan = inputs.nan_rows({"inputs": "nan"})
        check = lambda o: sweep.check(x, o, reference, exact.float(), sweep.BOUNDS["bf16"], torch, nan)
        numbers, complaint = check(exact.float())
        self.assertIsNone(complaint)
        self.assertEqual((numbers["unwritten"], numbers["cross"]), (0, 0.0))
        self.assertLess(numbers["rms"], 1e-6)
        self.assertEqual(check(exact.float().nan_to_num(0.0))[1], "16 elements of NaN queries are not NaN")
        more = exact.float()
        more[0, 1] = float("nan")
        self.assertIn("8 elements are NaN", check(more)[1])
        off = exact.float() * 1.001
        self.assertAlmostEqual(check(off)[0]["rms"], 1e-3, places=6)

    def test_gradients_of_other_inputs_are_held_by_head_and_dv_as_ever(self):
        torch = self.torch
        exact = [torch.randn(1, 256, 1, 8, dtype=torch.float64) for _ in range(3)]
        reference = [(0, 0, range(1), exact[0].transpose(1, 2)[0], exact[1][0, :, 0], exact[2][0, :, 0])]
        # One block of small gradients, in which half of each is an error.
        for x in exact[:2]:
            x[:, :64] *= 1e-3
        off = [x.float() for x in exact]
        for x in off[:2]:
            x[:, :64] *= 1.5
        check = lambda gradients, normal: backward.check({}, gradients, reference, None, backward.BOUNDS["bf16"], torch, normal)[1]
        self.assertIsNone(check([x.float() for x in exact], True))
        self.assertIn("d_q 0.5 > 0.03", check(off, True))
        self.assertIsNone(check(off, False))
        self.assertIn("d_v 0.1 > 0.03", check([*off[:2], 1.1 * off[2]], False))
        self.assertIn("d_k 1 > 0.6", check([off[0], 2 * exact[1].float(), off[2]], False))

    def test_packed_gradients_are_those_of_each_sequence(self):
        torch, p = self.torch, packed_point(heads_q=4, heads_kv=2, head_dim=16)
        draw = lambda heads: torch.randn(1, 8, heads, 16)
        q, k, v, d_o = draw(4), draw(2), draw(2), draw(4)
        found = backward.oracle(p, q, k, v, d_o, torch)
        self.assertEqual([(b, kv, list(heads)) for b, kv, heads, *_ in found], [(0, 0, [0, 1]), (0, 1, [2, 3])])
        for rows in (slice(0, 2), slice(2, 7), slice(7, 8)):
            one = {**p, "seqlen": rows.stop - rows.start}
            del one["packed"]
            alone = backward.oracle(one, *(x[:, rows] for x in (q, k, v, d_o)), torch)
            for (*_, d_q, d_k, d_v), (*_, e_q, e_k, e_v) in zip(found, alone):
                for x, y in ((d_q[:, rows], e_q), (d_k[rows], e_k), (d_v[rows], e_v)):
                    self.assertTrue(torch.equal(x, y))

    def test_nan_counts_for_nothing_in_a_factor(self):
        torch = self.torch
        x = torch.randn(2, 256, 4, 16)
        x[:, ::128] = float("nan")
        for scaling, shape in (("tensor", (1, 1, 1)), ("head", (2, 2, 1)), ("block", (2, 4, 2))):
            stored, factors = fp8.quantised(x, scaling, 14.0, 2, torch)
            self.assertEqual(tuple(factors.shape), shape)
            self.assertTrue(bool(torch.isfinite(factors).all()))
            real = stored.float() * fp8.spread(factors, 256, 4)
            self.assertTrue(torch.equal(torch.isnan(real), torch.isnan(x)))
            self.assertEqual(float(stored.float().nan_to_num(0.0).abs().max()), 14.0)
            self.assertLess(float((real - x).nan_to_num(0.0).abs().max()), 0.3)


class Sweep(unittest.TestCase):
    def test_a_library_follows_each_other_equally_often(self):
        for n in range(1, 8):
            pairs = collections.Counter()
            for i in range(2 * n):
                order = sweep.balanced(range(n), i)
                self.assertEqual(sorted(order), list(range(n)))
                pairs.update(zip(order, order[1:]))
            self.assertEqual(pairs, {(a, b): 2 for a in range(n) for b in range(n) if a != b})

    def test_a_librarys_second_run_follows_the_same_neighbours_as_its_first(self):
        order = lambda i, *names: [x.name for x in sweep.turns([types.SimpleNamespace(name=name) for name in names], i)]
        self.assertEqual(order(0, "us", "fa3", "cudnn", "us-block"), ["us", "fa3", "cudnn", "us-block", "fa3", "cudnn"])
        self.assertEqual(order(1, "us", "fa3", "cudnn", "us-block"), ["fa3", "cudnn", "us", "fa3", "cudnn", "us-block"])
        self.assertEqual(order(3, "us", "fa3", "cudnn", "us-block"), ["cudnn", "fa3", "us", "cudnn", "fa3", "us-block"])
        self.assertEqual(order(0, "fa3", "us-block"), ["fa3", "fa3", "us-block"])
        self.assertEqual(order(0, "us", "fa3", "cudnn"), ["us", "fa3", "cudnn"])

    def test_missing_libraries_are_named(self):
        job = {"ours": ["hopper-attention=nowhere/lib.so"], "peers": ["libm.so.6"], "python_peers": False}
        found, missing = sweep.load(job, torch=None)
        self.assertEqual(found, [])
        self.assertEqual([(x["name"], x["role"]) for x in missing], [("hopper-attention", "ours"), ("libm.so.6", "peer")])
        self.assertIn("OSError", missing[0]["error"])

    def test_python_peers_that_do_not_import_are_named(self):
        def broken():
            raise ImportError("no module\n  of that name")

        original = sweep.python_peers
        sweep.python_peers = lambda torch: {"fa4": broken}
        try:
            _, missing = sweep.load({"ours": [], "peers": [], "python_peers": True}, torch=None)
        finally:
            sweep.python_peers = original
        self.assertEqual(missing, [{"name": "fa4", "role": "peer", "error": "ImportError: no module of that name"}])

    def test_outputs_in_tuples(self):
        for answer in ("o", ("o", "lse"), ["o", None]):
            peer = sweep.Flash("fa3", lambda *qkv, causal: answer, "package", "1")
            peer.prepare({"head_dim": 64, "causal": True}, 1, 2, 3)
            self.assertEqual(peer.call(), "o")

    def test_windows_reach_the_peers_that_have_them(self):
        peer = sweep.Flash("fa3", lambda *qkv, **keywords: keywords, "package", "1")
        peer.prepare({"head_dim": 64, "causal": True, "window": 1024}, 1, 2, 3)
        self.assertEqual(peer.call(), {"causal": True, "window_size": (1024, 0)})
        with self.assertRaisesRegex(RuntimeError, entry.STATUS[2]):
            object.__new__(sweep.Sdpa).prepare({"head_dim": 64, "causal": True, "window": 1024}, 1, 2, 3)

    def test_flash_attention_4_is_called_and_asked_for_gradients_of_its_output_alone(self):
        torch, asked = FakeTorch(), []
        output = FakeTensor(50, (7, 8, 9, 1))

        def flash_attn_func(q, k, v, **keywords):
            asked.append((torch.grad_enabled, (q, k, v), keywords))
            return output, "lse" if torch.grad_enabled else None

        package = types.ModuleType("flash_attn")
        package.cute = types.ModuleType("flash_attn.cute")
        package.cute.flash_attn_func = flash_attn_func
        with mock.patch.dict(sys.modules, {"flash_attn": package, "flash_attn.cute": package.cute}):
            peer = sweep.python_peers(torch)["fa4"]()
        self.assertEqual((peer.name, peer.role, peer.origin()["file"]), ("fa4", "peer", "flash_attn.cute"))
        peer.prepare({**POINT, "window": 9}, 1, 2, 3)
        self.assertEqual(sweep.called(peer), (output,))
        self.assertEqual(asked.pop(), (False, (1, 2, 3), {"causal": True, "window_size": (9, 0)}))

        x = backward.contestant(peer, torch)
        x.prepare(POINT, {name: FakeTensor(at) for at, name in enumerate(("q", "k", "v", "d_o"), 1)})
        with x.context():
            args, keywords = x.call()
        [(grad_enabled, leaves, told)] = asked  # one forward, before the timing
        self.assertTrue(grad_enabled and all(leaf.wants_grad for leaf in leaves))
        self.assertEqual(told, {"causal": True})
        self.assertEqual((args[0], args[1], keywords), (output, leaves, {"retain_graph": True}))

    def timed(self, host_us, rounds):
        """The spins of a point whose call takes so many microseconds in each round, and what it was told."""
        told, clock, durations = [], [0.0], iter(host_us)

        class Event:
            def __init__(self, enable_timing):
                pass

            def record(self):
                told.append("record")

            def elapsed_time(self, end):
                return 1.0

        class Contestant:
            name, role, lse, context = "fa4", "peer", None, contextlib.nullcontext

            def call(self):
                told.append("call")
                clock[0] += next(durations) * 1e-6
                return types.SimpleNamespace(clone=lambda: "o")

        torch = FakeTorch()
        torch.cuda.Event, torch.cuda._sleep = Event, lambda ticks: told.append(ticks)
        point = types.SimpleNamespace(contestant=lambda x: x, prepare=lambda x: told.append("prepare"))
        point.check, point.changed = lambda *_: ({}, None), lambda *_: []
        tell = lambda event, **fields: told.append((event, fields))
        with mock.patch.object(sweep, "make_point", lambda *_: point), mock.patch.object(sweep.time, "perf_counter", lambda: clock[0]):
            sweep.run_point(0, POINT, [Contestant()], {"banned": {}, "layout": "bshd", "iters": rounds}, lambda: None, tell, torch)
        return [x for x in told if isinstance(x, int)], told

    def test_what_is_compiled_at_a_first_call_is_not_timed(self):
        seconds = 20e6
        spins, told = self.timed([seconds, 50, 60, 70, 80, 90, 10], 2)
        at = told.index(("timing", {"index": 0}))
        self.assertEqual(told[:at], [("library", {"index": 0, "name": "fa4"}), "prepare", "call"])
        self.assertEqual(told[at + 1 : at + 5], [sweep.SPIN_TICKS, "record", "call", "record"])
        self.assertEqual(spins, [sweep.SPIN_TICKS] * (sweep.WARM_UPS + 2))
        [run] = told[-1][1]["runs"]
        self.assertEqual((run["status"], run["ms"]), ("ok", [1.0, 1.0]))
        self.assertAlmostEqual(run["host_us"], 90, places=3)

    def test_the_gpu_spins_for_longer_than_the_slowest_call_takes(self):
        spins, _ = self.timed([0, 9000, 9000, 400, 400, 400, 0], 2)
        self.assertEqual(spins[: sweep.WARM_UPS], [sweep.SPIN_TICKS] * sweep.WARM_UPS)
        for ticks in spins[sweep.WARM_UPS :]:
            self.assertAlmostEqual(ticks / sweep.TICKS_PER_US, 2 * 400, delta=1)
        self.assertEqual(sweep.spin_ticks([1.0, 249.0]), sweep.SPIN_TICKS)
        self.assertEqual(sweep.spin_ticks([1e6, 1.0]), sweep.MOST_SPIN_TICKS)

    def test_who_cannot_begin_a_point_is_named(self):
        def point(*_):
            raise RuntimeError("no forward gave the O")

        told, original = [], sweep.BackwardPoint
        sweep.BackwardPoint = point
        try:
            found = [types.SimpleNamespace(name=name, role="peer") for name in ("a", "b")]
            job = {"banned": {"b": "it ended the process", "c": "another"}, "layout": "bshd"}
            sweep.run_point(3, POINT, found, job, None, lambda event, **fields: told.append((event, fields)), FakeTorch())
        finally:
            sweep.BackwardPoint = original
        [(event, fields)] = told
        self.assertEqual((event, fields["index"]), ("point", 3))
        runs = [(run["name"], run["status"], run["error"]) for run in fields["runs"]]
        self.assertEqual(runs, [("a", "failed", "RuntimeError: no forward gave the O"), ("b", "failed", "it ended the process")])

    @unittest.skipIf(__import__("importlib.util").util.find_spec("torch"), "this Python has PyTorch: hattn bench itself is the test")
    def test_without_pytorch_it_says_so_and_succeeds(self):
        job = {"ordinal": 0}
        out = subprocess.run([sys.executable, os.path.join(HERE, "sweep.py")], input=json.dumps(job).encode(), stdout=subprocess.PIPE, check=True)
        event = json.loads(out.stdout)
        self.assertEqual(event["event"], "absent")
        self.assertIn("no PyTorch", event["error"])


if __name__ == "__main__":
    unittest.main()
