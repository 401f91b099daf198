"""Tests on a GPU: torch's streams, graphs, compiler and devices, SDPA, FP8, DLPack and models in 16 bit."""

import shutil
import unittest
from unittest import mock

import hopper_attention
from hopper_attention import abi

try:
    import torch
except ImportError:
    torch = None
else:
    import torch.nn.functional as F
    from hopper_attention import _torch, attention, attention_varlen, register_sdpa
    from torch.nn.attention import SDPBackend, sdpa_kernel


# Triton, which inductor needs, compiles its launchers with the machine's C compiler.
BACKEND = "inductor" if any(map(shutil.which, ("gcc", "cc", "clang"))) else "aot_eager"


def missing():
    """Why the tests cannot run."""
    if torch is None:
        return "no torch"
    if not torch.cuda.is_available() or hopper_attention.device_count() == 0:
        return "no GPU"
    problem = abi.ForwardProblem(
        dtype=abi.BF16, batch=1, seqlen_q=64, seqlen_kv=64, heads_q=1, heads_kv=1, head_dim_qk=64, head_dim_vo=64
    )
    return None if abi.load().supported(problem, 0) else f"no kernel: {abi.load().last_error()}"


class OnGpu(unittest.TestCase):
    device = "cuda:0"

    def setUp(self):
        why = missing()
        if why:
            self.skipTest(why)
        torch.manual_seed(0)
        torch._dynamo.reset()

    def tensors(self, dtype=None, grad=True, seqlen=300, heads_kv=2, head_dim=64):
        shapes = ((2, seqlen, 6, head_dim), (2, seqlen, heads_kv, head_dim), (2, seqlen, heads_kv, head_dim))
        made = [torch.randn(shape, device=self.device).to(dtype or torch.bfloat16) for shape in shapes]
        return [t.requires_grad_(grad) for t in made]

    def exact(self, q, k, v, causal):
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    def close(self, got, want, tolerance):
        self.assertEqual(got.shape, want.shape)
        error = (got.double() - want.double()).abs().max().item()
        self.assertLessEqual(error, tolerance * want.double().abs().max().item())


class Torch(OnGpu):
    def test_values_and_gradients(self):
        for dtype, tolerance in ((torch.bfloat16, 0.03), (torch.float16, 0.004)):
            for head_dim in (64, 128):
                for causal in (False, True):
                    with self.subTest(dtype=dtype, head_dim=head_dim, causal=causal):
                        leaves = self.tensors(dtype, head_dim=head_dim)
                        doubles = [t.detach().double().requires_grad_() for t in leaves]
                        o, want = attention(*leaves, causal=causal), self.exact(*doubles, causal)
                        self.close(o, want, tolerance)
                        d_o = torch.randn_like(o)
                        gradients = torch.autograd.grad(want, doubles, d_o.double())
                        for mine, theirs in zip(torch.autograd.grad(o, leaves, d_o), gradients):
                            self.close(mine, theirs, tolerance)

    def test_head_dims_without_gradients(self):
        """The forward takes pairs up to 256. Gradients end at 128: a call that autograd would record is refused."""
        arch = "sm90" if torch.cuda.get_device_capability(self.device) == (9, 0) else "sm80"
        refusal = f"for a backward pass of bf16, causal, on {arch}; nearest: .* 128 with 128. Without gradients"
        for head_dim, head_dim_vo in ((136, 136), (192, 128), (64, 192), (200, 72), (256, 256)):
            with self.subTest(head_dim=head_dim, head_dim_vo=head_dim_vo):
                q, k, v = self.tensors(grad=False, head_dim=head_dim)
                v = torch.randn(*v.shape[:3], head_dim_vo, device=self.device).to(v.dtype)
                want = self.exact(q, k, v, True)
                self.close(attention(q, k, v, causal=True), want, 0.03)
                o, lse = attention(q, k, v, causal=True, return_lse=True)
                self.close(o, want, 0.03)
                cu = torch.tensor([0, 300, 600], device=self.device)
                rows = [t.flatten(0, 1) for t in (q, k, v)]
                self.close(attention_varlen(*rows, cu, causal=True).view_as(want), want, 0.03)
                leaves = [t.requires_grad_() for t in (q, k, v)]
                with torch.no_grad():
                    self.close(attention(*leaves, causal=True), want, 0.03)
                for again in range(2):
                    self.assertRaisesRegex(abi.HattnError, refusal, attention, *leaves, causal=True)
                    with self.assertRaisesRegex(abi.HattnError, refusal):
                        attention(*leaves, causal=True, return_lse=True)
                    with self.assertRaisesRegex(abi.HattnError, refusal):
                        attention_varlen(*(t.flatten(0, 1) for t in leaves), cu, causal=True)
                    with mock.patch.object(_torch, "_direct", None):
                        self.assertRaisesRegex(abi.HattnError, refusal, attention, *leaves, causal=True)
        # Beyond 256 there is no forward, with or without gradients.
        for grad in (False, True):
            leaves = self.tensors(grad=grad, head_dim=264)
            self.assertRaisesRegex(abi.HattnError, "head_dim_qk 264 .* up to 256 with 256", attention, *leaves)

    def test_what_records(self):
        """An operator of torch's own. With the log-sum-exp, or without that operator, Python. All give the same."""
        if _torch.no_direct is not None:
            self.skipTest(_torch.no_direct)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for options in ({}, {"causal": True}, {"window": (40, 3)}, {"causal": True, "top_left": True, "scale": 0.3}):
            with self.subTest(**options):
                leaves = self.tensors()
                o = attention(*leaves, **options)
                want, _ = attention(*leaves, **options, return_lse=True)
                self.assertIn("ForCpuBackward", type(o.grad_fn).__name__)
                self.assertIn("Recorded", type(want.grad_fn).__name__)
                plain = [t.detach() for t in leaves]
                with mock.patch.object(_torch, "_direct", None):
                    ordinary, without = attention(*leaves, **options), attention(*plain, **options)
                self.assertIn("Recorded", type(ordinary.grad_fn).__name__)
                with torch.no_grad():
                    others = [ordinary, without, attention(*leaves, **options), attention(*plain, **options)]
                for other in (o, *others):
                    self.assertTrue(torch.equal(other, want))
                d_o = torch.randn_like(o)
                gradients = torch.autograd.grad(want, leaves, d_o)
                # The same bits, since all ask for a deterministic backward pass.
                for other in (o, ordinary):
                    for mine, theirs in zip(torch.autograd.grad(other, leaves, d_o), gradients):
                        self.assertTrue(torch.equal(mine, theirs))

    def test_a_margin(self):
        """Hopper kernels leave multiprocessors to others. Results are right, through each of the operators."""
        leaves = self.tensors()
        if torch.cuda.get_device_capability(self.device) != (9, 0):
            self.assertRaisesRegex(abi.HattnError, "sm_margin 1 with sm80 kernels", attention, *leaves, sm_margin=1)
            return
        want = attention(*leaves, causal=True)
        gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
        all_of_them = torch.cuda.get_device_properties(self.device).multi_processor_count
        for margin in (1, 16, all_of_them - 1):
            for return_lse in (False, True):
                with self.subTest(margin=margin, return_lse=return_lse):
                    o = attention(*leaves, causal=True, sm_margin=margin, return_lse=return_lse)
                    o = o[0] if return_lse else o
                    # Fewer multiprocessors may mean other tiles, and so other last bits.
                    self.close(o, want, 0.02)
                    got = torch.autograd.grad(o, leaves, torch.ones_like(o))
                    for mine, theirs in zip(got, gradients):
                        self.close(mine, theirs, 0.02)
        words = f"sm_margin: {all_of_them}; allowed: 0 to {all_of_them - 1}"
        self.assertRaisesRegex(abi.HattnError, words, attention, *leaves, sm_margin=all_of_them)

    def test_a_limit_of_the_workspace(self):
        """This forward pass needs nearly none. Gradients name what they need."""
        leaves = self.tensors()
        want = attention(*leaves, causal=True)
        gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
        o = attention(*leaves, causal=True, workspace_limit=2**40)
        self.close(o, want, 0.02)
        for mine, theirs in zip(torch.autograd.grad(o, leaves, torch.ones_like(o)), gradients):
            self.close(mine, theirs, 0.02)
        with self.assertRaisesRegex(abi.HattnError, r"workspace_limit: 100; allowed: \d+ and above"):
            attention(*leaves, causal=True, workspace_limit=100)

    def test_the_current_stream(self):
        q, k, v = self.tensors(grad=False, seqlen=2000)
        want = attention(q, k, v)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The operands are ready 20 ms later. A kernel on another stream would read them before.
            late = [torch.zeros_like(t) for t in (q, k, v)]
            torch.cuda._sleep(40_000_000)
            for t, source in zip(late, (q, k, v)):
                t.copy_(source)
            o = attention(*late)
        stream.synchronize()
        self.assertTrue(torch.equal(o, want))

    def test_a_graph_of_both_passes(self):
        leaves = self.tensors()
        d_o = torch.randn(leaves[0].shape, device=self.device, dtype=torch.bfloat16)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)

        def step():
            o = attention(*leaves, causal=True)
            return o.detach(), *torch.autograd.grad(o, leaves, d_o)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        for _ in range(2):
            with torch.no_grad():
                for t in leaves:
                    t.normal_()
            graph.replay()
            torch.cuda.synchronize()
            for mine, want in zip(results, step()):
                self.assertTrue(torch.equal(mine, want))

    def test_compiled(self):
        leaves = self.tensors()

        def step(q, k, v):
            return attention(q * 1.5, k, v, causal=True).float().square().mean()

        compiled = torch.compile(step, fullgraph=True, backend=BACKEND)
        want = torch.autograd.grad(step(*leaves), leaves)
        for mine, theirs in zip(torch.autograd.grad(compiled(*leaves), leaves), want):
            self.close(mine, theirs, 0.02)

    def test_compiled_into_graphs(self):
        if BACKEND != "inductor":
            self.skipTest("no C compiler, which Triton needs")
        leaves = self.tensors(grad=False)
        reduced = torch.compile(lambda *t: attention(*t, causal=True) * 2, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            self.close(reduced(*leaves), attention(*leaves, causal=True) * 2, 0.01)

    def test_autocast(self):
        q, k, v = (t.float() for t in self.tensors(grad=False))
        with torch.autocast("cuda", dtype=torch.float16):
            o = attention(q, k, v)
        self.assertTrue(torch.equal(o, attention(q.half(), k.half(), v.half())))
        self.assertRaisesRegex(abi.HattnError, "f32", attention, q, k, v)

    def test_deterministic_gradients(self):
        leaves = self.tensors(seqlen=1500)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        runs = [torch.autograd.grad(attention(*leaves, causal=True).float().square().sum(), leaves) for _ in range(3)]
        for again in runs[1:]:
            self.assertTrue(all(map(torch.equal, again, runs[0])))

    def test_memory_is_not_reused_too_soon(self):
        leaves = self.tensors(seqlen=1000)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        want = torch.autograd.grad(attention(*leaves).float().sum(), leaves)
        # Scratch memory of one call is freed while its kernel still runs, and the next call takes it.
        found = [torch.autograd.grad(attention(*leaves).float().sum(), leaves) for _ in range(20)]
        for got in found:
            self.assertTrue(all(map(torch.equal, got, want)))

    def test_a_second_gpu(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("one GPU alone")
        leaves = self.tensors()
        there = [t.detach().to("cuda:1").requires_grad_() for t in leaves]
        self.assertEqual(torch.cuda.current_device(), 0)
        o, other = attention(*leaves, causal=True), attention(*there, causal=True)
        self.assertEqual(str(other.device), "cuda:1")
        self.assertTrue(torch.equal(o.cpu(), other.cpu()))
        for mine, theirs in zip(
            torch.autograd.grad(o.float().sum(), leaves), torch.autograd.grad(other.float().sum(), there)
        ):
            self.close(theirs.cpu(), mine.cpu(), 0.01)
        with self.assertRaisesRegex(abi.HattnError, "cuda:1"):
            attention(leaves[0], there[1], leaves[2])

    def test_what_is_refused(self):
        q, k, v = self.tensors(grad=False)
        self.assertRaisesRegex(abi.HattnError, "head_dim", attention, q[..., :60], k[..., :60], v)
        self.assertRaisesRegex(abi.HattnError, "k", attention, q, k.cpu(), v)
        shifted = torch.randn(q.numel() + 1, device=self.device).bfloat16()[1:].view(q.shape)
        self.assertRaisesRegex(abi.HattnError, "q", attention, shifted, k, v)


class Packed(OnGpu):
    """Packed sequences. test_varlen.py has what does not depend on the device."""

    def packed(self, *rows):
        cu = torch.tensor((0, *rows)).cumsum(0)
        shapes = ((sum(rows), 6, 64), (sum(rows), 2, 64), (sum(rows), 2, 64))
        made = [torch.randn(shape, device=self.device).bfloat16().requires_grad_() for shape in shapes]
        return cu, made

    def test_each_sequence_and_no_wait(self):
        rows = (300, 0, 1, 77, 130)
        for options in ({}, {"causal": True}, {"window": (40, 3)}):
            with self.subTest(**options):
                cu, leaves = self.packed(*rows)
                on_gpu = cu.to(self.device)
                d_o = torch.randn_like(leaves[0])
                o = attention_varlen(*leaves, on_gpu, **options)  # loads the kernels
                torch.autograd.grad(o, leaves, d_o)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    o = attention_varlen(*leaves, on_gpu, max_seqlen_q=300, max_seqlen_kv=300, **options)
                    found = (o, *torch.autograd.grad(o, leaves, d_o))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                parts = [t.split(rows) for t in leaves]
                one_by_one = [attention(*(t[None] for t in one), **options)[0] for one in zip(*parts) if len(one[0])]
                want = torch.cat(one_by_one)
                for got, theirs in zip(found, (want, *torch.autograd.grad(want, leaves, d_o))):
                    self.close(got, theirs, 0.02)
                # Offsets on the CPU are copied.
                self.assertTrue(torch.equal(attention_varlen(*leaves, cu, **options), o))

    def test_a_margin(self):
        """Hopper kernels leave multiprocessors to others. Older ones refuse a margin by name."""
        cu, leaves = self.packed(300, 0, 77)
        if torch.cuda.get_device_capability(self.device) != (9, 0):
            with self.assertRaisesRegex(abi.HattnError, "sm_margin 1 with sm80 kernels"):
                attention_varlen(*leaves, cu, sm_margin=1)
            return
        all_of_them = torch.cuda.get_device_properties(self.device).multi_processor_count
        for more in ({}, {"s_aux": torch.randn(6, device=self.device)}, {"softcap": 5.0}):
            want = attention_varlen(*leaves, cu, causal=True, **more)
            gradients = torch.autograd.grad(want, leaves, torch.ones_like(want))
            for margin in (1, 16, all_of_them - 1):
                with self.subTest(margin=margin, more=tuple(more)):
                    o = attention_varlen(*leaves, cu, causal=True, sm_margin=margin, **more)
                    self.close(o, want, 0.02)
                    for mine, theirs in zip(torch.autograd.grad(o, leaves, torch.ones_like(o)), gradients):
                        self.close(mine, theirs, 0.02)
        words = f"sm_margin: {all_of_them}; allowed: 0 to {all_of_them - 1}"
        with self.assertRaisesRegex(abi.HattnError, words):
            attention_varlen(*leaves, cu, sm_margin=all_of_them)

    def test_one_graph_serves_other_lengths(self):
        cu, leaves = self.packed(300, 77, 131)
        leaves = [t.detach() for t in leaves]
        held = cu.to(self.device, torch.int32)
        attention_varlen(*leaves, held, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = attention_varlen(*leaves, held, causal=True)
        for rows in ((300, 77, 131), (1, 500, 7), (0, 0, 400)):
            cu = torch.tensor((0, *rows)).cumsum(0)
            held.copy_(cu)
            graph.replay()
            self.assertTrue(torch.equal(o, attention_varlen(*leaves, cu, causal=True)), rows)

    def test_compiled(self):
        cu, leaves = self.packed(300, 0, 77)
        cu = cu.to(self.device)
        compiled = torch.compile(lambda *given: attention_varlen(*given, causal=True), backend=BACKEND, fullgraph=True)
        found = [
            (o, *torch.autograd.grad(o.float().sum(), leaves))
            for o in (
                attention_varlen(*leaves, cu, causal=True),
                compiled(*leaves, cu),
            )
        ]
        for got, want in zip(found[1], found[0]):
            self.close(got, want, 0.01)


class Sdpa(OnGpu):
    def setUp(self):
        super().setUp()
        if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
            self.skipTest(f"torch {torch.__version__} has no register_flash_attention_impl")

    def sdpa(self, q, k, v, **options):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)

    def test_both_passes_are_ours_until_undone(self):
        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for causal in (False, True):
            leaves = self.tensors()
            d_o = torch.randn(leaves[0].shape, device=self.device, dtype=torch.bfloat16)

            def step():
                o = self.sdpa(*leaves, is_causal=causal, enable_gqa=True)
                return o.detach(), *torch.autograd.grad(o, leaves, d_o)

            before = step()
            o = attention(*leaves, causal=causal)
            want = o.detach(), *torch.autograd.grad(o, leaves, d_o)
            handle = register_sdpa()
            try:
                ours = step()
            finally:
                handle.remove()
            # Equal to a call of ours to the last bit, which another kernel is not.
            self.assertTrue(all(map(torch.equal, ours, want)))
            self.assertFalse(all(map(torch.equal, ours, before)))
            # torch's own backward may add in another order each time. Its forward does not.
            again = step()
            self.assertTrue(torch.equal(again[0], before[0]))
            self.assertFalse(any(map(torch.equal, again, ours)))
            for mine, theirs in zip(ours, before):
                self.close(mine, theirs, 0.03)

    def test_other_head_dims_and_compiled(self):
        leaves = self.tensors(heads_kv=6, head_dim=72)
        want = self.sdpa(*leaves)
        handle = register_sdpa()
        try:
            self.close(self.sdpa(*leaves), want, 0.03)
            compiled = torch.compile(
                lambda q, k, v: self.sdpa(q, k, v, is_causal=True).float().square().mean(), backend=BACKEND
            )
            for mine, theirs in zip(
                torch.autograd.grad(compiled(*leaves), leaves),
                torch.autograd.grad(self.sdpa(*leaves, is_causal=True).float().square().mean(), leaves),
            ):
                self.close(mine, theirs, 0.03)
        finally:
            handle.remove()

    def test_packed_sequences(self):
        """Nested tensors, and torch.nn.attention.varlen: attention_varlen to the last bit, in both passes."""
        from torch.nn.attention.varlen import varlen_attn

        self.addCleanup(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        leaves = [torch.randn(300, 4, 64, device=self.device).bfloat16().requires_grad_() for _ in range(3)]
        cu = torch.tensor([0, 120, 121, 300], device=self.device)
        want = attention_varlen(*leaves, cu, causal=True, max_seqlen_q=179, max_seqlen_kv=179)
        d_o = torch.randn_like(want)
        gradients = torch.autograd.grad(want, leaves, d_o)

        def nested():
            made = [torch.nested.nested_tensor_from_jagged(t, cu).transpose(1, 2) for t in leaves]
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(*made, is_causal=True).transpose(1, 2).values()

        handle = register_sdpa()
        try:
            found = nested(), varlen_attn(*leaves, cu.int(), cu.int(), 179, 179, window_size=(-1, 0))
            for o in found:
                self.close(o, want, 0.02)
                for mine, theirs in zip(torch.autograd.grad(o, leaves, d_o), gradients):
                    self.close(mine, theirs, 0.02)
            # Equal to a call of ours to the last bit, which another kernel is not.
            self.assertTrue(torch.equal(found[1], want))
            slopes = torch.rand(4, device=self.device)
            with torch.no_grad():
                dense = [t[None] for t in leaves]
                rest = (None, None, 300, 300, 0.0, True, False)
                o = torch.ops.aten._flash_attention_forward(*dense, *rest, alibi_slopes=slopes)[0]
                self.assertTrue(torch.equal(o, attention(*dense, causal=True, alibi_slopes=slopes)))
        finally:
            handle.remove()

    def test_refusals(self):
        q, k, v = self.tensors(heads_kv=6, grad=False)
        handle = register_sdpa()
        try:
            with self.assertRaisesRegex(abi.HattnError, "dropout: 1"):
                self.sdpa(q, k, v, dropout_p=1.0)
        finally:
            handle.remove()

    def test_head_dims_without_gradients(self):
        if torch.cuda.get_device_capability(self.device) != (9, 0):
            self.skipTest("no Hopper GPU")
        q, k, v = self.tensors(heads_kv=6, grad=False, head_dim=256)
        want = self.exact(q, k, v, False)
        handle = register_sdpa()
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                self.close(self.sdpa(q, k, v), want, 0.03)
                q.requires_grad_()
                with self.assertRaisesRegex(abi.HattnError, "for a backward pass of bf16"):
                    self.sdpa(q, k, v)
        finally:
            handle.remove()


class Others(OnGpu):
    def test_fp8(self):
        for head_dim, values in ((128, 128), (192, 128), (256, 256)):
            q, k, v = self.tensors(grad=False, head_dim=head_dim)
            v = v[..., :values].contiguous()
            want = self.exact(q, k, v, True)
            for scaling in ("per_tensor", "per_head", "per_block"):
                for half_scores in (False, True):
                    with self.subTest(head_dim=head_dim, scaling=scaling, half_scores=half_scores):
                        self.check_fp8(q, k, v, want, scaling, half_scores)

    def check_fp8(self, q, k, v, want, scaling, half_scores):
        operands = hopper_attention.quantize(q, k, v, scaling=scaling, hadamard=3, half_scores=half_scores)
        o, amax = hopper_attention.attention_fp8(operands, causal=True, return_amax=True)
        rmse = ((o - want).square().mean() / want.square().mean()).sqrt().item()
        self.assertLess(rmse, 0.08)
        self.assertAlmostEqual(amax.item(), o.abs().max().item(), delta=0.01 * amax.item())

    def test_dlpack(self):
        class Exporter:
            def __init__(self, tensor):
                self.tensor = tensor

            def __dlpack__(self, stream=None, max_version=None):
                return self.tensor.__dlpack__(stream=stream)

            def __dlpack_device__(self):
                return self.tensor.__dlpack_device__()

        q, k, v = self.tensors(grad=False)
        want, want_lse = attention(q, k, v, causal=True, return_lse=True)
        for stream in (None, torch.cuda.Stream()):
            o, lse = torch.empty_like(want), torch.empty_like(want_lse)
            number = None if stream is None else stream.cuda_stream
            outputs = {"out": Exporter(o), "lse_out": Exporter(lse)}
            hopper_attention.attention(*map(Exporter, (q, k, v)), causal=True, stream=number, **outputs)
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(o, want) and torch.equal(lse, want_lse))

    def test_transformers(self):
        try:
            import models
        except ImportError as error:
            self.skipTest(f"no transformers: {error}")
        hopper_attention.register_transformers()
        for kind, side in (("llama", None), ("llama", "left"), ("mistral", "left"), ("bert", "right"), ("vit", None)):
            with self.subTest(kind=kind, side=side):
                settings = models.config(kind, 256, 4, 4 if kind in ("bert", "vit") else 2, 2, window=30)
                model = models.model(kind, settings).to(self.device)
                inputs = models.inputs(kind, settings, 3, 80, self.device)
                keep = None if side is None else models.padding(3, 80, side, self.device)
                more = {} if keep is None else {"attention_mask": keep}
                exact = model(**inputs, **more).logits
                logits = {}
                model = model.bfloat16()
                inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
                for name in ("eager", "sdpa", "hopper_attention"):
                    model.set_attn_implementation(name)
                    logits[name] = model(**inputs, **more).logits.float()
                errors = {}
                for name, found in logits.items():
                    off = found - exact if keep is None else (found - exact)[keep.bool()]
                    errors[name] = off.square().mean().sqrt().item()
                self.assertLess(errors["hopper_attention"], 1.2 * max(errors["eager"], errors["sdpa"]), errors)

    def test_transformers_of_other_head_dims(self):
        """Gemma 2 and 3, Phi 3, DeepSeek V3 and SigLIP: 256, 96, 192 with 128, and 72. Without gradients."""
        try:
            import models
        except ImportError as error:
            self.skipTest(f"no transformers: {error}")
        hopper_attention.register_transformers()
        for kind in ("gemma2", "gemma3", "phi3", "deepseek_v3", "siglip"):
            with self.subTest(kind=kind), torch.no_grad():
                settings = models.config(kind, 256, 4, 2, 2, window=30)
                model = models.model(kind, settings).to(self.device)
                inputs = models.inputs(kind, settings, 3, 80, self.device)
                model.set_attn_implementation("eager")
                exact = model(**inputs).logits
                model = model.bfloat16()
                inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
                eager = model(**inputs).logits.float()
                model.set_attn_implementation("hopper_attention")
                ours = model(**inputs).logits.float()
                errors = [(found - exact).square().mean().sqrt().item() for found in (ours, eager)]
                self.assertLess(errors[0], 1.2 * errors[1], errors)

    def test_a_padding_free_transformers_batch(self):
        """Its logits and gradients are those of the padded batch, to what bf16 gives."""
        try:
            import models
        except ImportError as error:
            self.skipTest(f"no transformers: {error}")
        hopper_attention.register_transformers()
        for kind in ("llama", "mistral"):
            with self.subTest(kind=kind):
                settings = models.config(kind, 256, 4, 2, 2, window=30)
                model = models.model(kind, settings).to(self.device)
                ids = models.inputs(kind, settings, 3, 80, self.device)["input_ids"]
                keep = models.padding(3, 80, "right", self.device)
                tokens = keep.bool()
                positions = (keep.cumsum(1) - 1)[tokens][None]

                def both(given, logits_of):
                    logits = logits_of(model(**given, use_cache=False).logits).float()
                    return logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))

                padded = {"input_ids": ids, "attention_mask": keep}
                packed = {"input_ids": ids[tokens][None], "position_ids": positions}
                model.set_attn_implementation("eager")
                exact = both(padded, lambda x: x[tokens])
                model = model.bfloat16()
                model.set_attn_implementation("hopper_attention")
                found = [both(padded, lambda x: x[tokens]), both(packed, lambda x: x[0])]

                def error(made):
                    off = sum((a.float() - b).square().sum().item() for a, b in zip(made, exact))
                    return (off / sum(b.square().sum().item() for b in exact)) ** 0.5

                self.assertEqual(found[1][0].shape, found[0][0].shape)
                self.assertLess(error(found[1]), 1.05 * error(found[0]))
                # Without positions the sequences see each other.
                del packed["position_ids"]
                self.assertGreater(error(both(packed, lambda x: x[0])), 2 * error(found[1]))
