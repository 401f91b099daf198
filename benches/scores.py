#!/usr/bin/env python3
"""Times what modifies scores: a softcap, ALiBi, attention sinks, a sliding window, and lists of blocks.

- All problems are causal. `blocks` alone has no mask: it lists a quarter of the blocks of 128 queries and 128 keys, the diagonal
  ones among them. The *plain* problem is the same without the modifier.
- Each modifier is timed in turn with the plain problem, and with the libraries that have it: FlashAttention-4, FlashAttention-3 in
  the wheel of xformers, cuDNN through its Python frontend, and PyTorch's FlexAttention.
- A library is *wrong* where O is off by more than 1%, or dQ by more than 3%, of its norm. Some queries of one head are checked. A
  library that is missing, fails or is wrong is named with the reason, and is not timed.
- A line has times in us. The *rate* is (blocks / the plain problem's blocks) * the plain time / our time: 1 is ideal. Blocks are
  128 x 128, and count if they hold a kept pair.
- The last lines have geometric means, and the least, for each direction, modifier and library.
- FlashAttention-4 and FlexAttention compile their kernels, FlexAttention for each point. That takes most of the time of a run.

    HOPPER_ATTENTION_LIBRARY=libhopper_attention.so PYTHONPATH=python python3 benches/scores.py --seqlens 8192,1024 --peers fa4,cudnn
"""

import argparse
import collections
import functools
import gc
import os
import statistics
import sys
import time
from typing import Any, Callable, NamedTuple, Optional

BEGIN = time.monotonic()

import hopper_attention  # noqa: E402
import torch  # noqa: E402

import timing  # noqa: E402

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers"))

BLOCK = 128
CAP, WINDOW = 50.0, 1024
# Listed blocks: one in this many.
ONE_IN = 4
# With a cap, queries are multiplied by this. Else scores are small, and the check would not notice a cap that is ignored.
CAPPED_QUERIES = 3
# The largest relative error of O and of dQ (of their norms).
BOUND_O, BOUND_DQ = 1e-2, 3e-2


class Modifier(NamedTuple):
    """What is done to scores. `sinks` and `slopes` are f32 [heads], and `table` says which blocks are listed."""

    name: str
    causal: bool = True
    cap: float = 0.0
    slopes: Optional[torch.Tensor] = None
    sinks: Optional[torch.Tensor] = None
    window: Optional[int] = None
    table: Optional[torch.Tensor] = None

    def keeps(self):
        """A function that says whether query i sees key j. It refers to tensors and numbers alone, as FlexAttention wants it."""
        listing, window = self.table, self.window
        if listing is not None:
            return lambda i, j: listing[i // BLOCK, j // BLOCK]
        if window is not None:
            return lambda i, j: (i >= j) & (i - j <= window)
        return lambda i, j: i >= j

    def blocks(self, keys):
        """The number of blocks that hold a kept pair."""
        count = -(-keys // BLOCK)
        if self.table is not None:
            return int(self.table.sum())
        if not self.causal:
            return count * count
        before = count if self.window is None else (self.window + BLOCK - 1) // BLOCK
        return sum(min(row, before) + 1 for row in range(count))


def table(keys, device="cuda"):
    """Which blocks are listed: as many for each block of queries, the one on the diagonal and random others."""
    count = -(-keys // BLOCK)
    order = torch.rand((count, count), generator=torch.Generator().manual_seed(7)).fill_diagonal_(2.0)
    listed = torch.zeros((count, count), dtype=torch.bool)
    return listed.scatter_(1, order.topk(max(1, count // ONE_IN)).indices, True).to(device)


def modifier(name, keys, heads, device="cuda"):
    """A modifier by its name on the command line. None where it changes nothing."""
    if name == "softcap":
        return Modifier(f"softcap {CAP:g}", cap=CAP)
    if name == "alibi":
        slopes = torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)], device=device)
        return Modifier(name, slopes=slopes)
    if name == "sinks":
        drawn = torch.randn(heads, generator=torch.Generator().manual_seed(7))
        return Modifier(name, sinks=(4.0 + drawn).to(device))
    if name == "window":
        return Modifier(f"window {WINDOW}", window=WINDOW) if keys > WINDOW else None
    return Modifier(name, causal=False, table=table(keys, device))


MODIFIERS = ("softcap", "alibi", "sinks", "window", "blocks")


# -- the definition


def checked(keys, heads):
    """The head and the queries whose rows are checked."""
    step = max(1, keys // 64)
    return heads // 2, range(step - 1, keys, step)


def definition(m, q, k, v, d_o, head, rows):
    """O of some queries of a head of the first sequence in f32, and their dQ where there is a d_o."""
    rows = torch.tensor(list(rows), device=q.device)
    own = q[0, rows, head].float().requires_grad_(d_o is not None)
    scores = (own @ k[0, :, head].float().T) * q.shape[-1] ** -0.5
    if m.cap:
        scores = m.cap * torch.tanh(scores / m.cap)
    keys = torch.arange(k.shape[1], device=q.device)
    if m.slopes is not None:
        scores = scores - m.slopes[head] * (rows[:, None] - keys).abs()
    scores = scores.masked_fill(~m.keeps()(rows[:, None], keys[None]), float("-inf"))
    if m.sinks is not None:
        scores = torch.cat((scores, m.sinks[head].expand(len(rows), 1)), 1)
    o = scores.softmax(-1)[:, : len(keys)] @ v[0, :, head].float()
    if d_o is None:
        return o, None
    (d_q,) = torch.autograd.grad(o, own, d_o[0, rows, head].float())
    return o.detach(), d_q


def off(found, wanted):
    """The relative error of a tensor (of the norm). NaN where it holds a NaN."""
    return ((found - wanted).norm() / wanted.norm()).item()


class Run(NamedTuple):
    """A call that can be timed, its O, and what takes dQ, dK and dV from the call's result in a backward."""

    call: Callable
    o: torch.Tensor
    gradients: Optional[Callable] = None

    def rows(self, head, rows):
        """O and dQ of the rows that are checked, in f32."""
        rows = torch.tensor(list(rows), device=self.o.device)
        made = [self.o] + ([] if self.gradients is None else [self.gradients(self.call())[0]])
        return [x.detach()[0, rows, head].float() for x in made]


def complaint(found, wanted):
    """What is wrong with O, or with dQ in a backward, of the checked rows. None if nothing is."""
    for name, own, other, bound in zip(("o", "dq"), found, wanted, (BOUND_O, BOUND_DQ)):
        error = off(own, other)
        if not error < bound:
            return f"{name} is off by {error:.2g} of its size"
    return None


# -- ours and the peers. Each takes a modifier, q, k, v and d_o ([batch, seqlen, heads, head_dim]), and gives a Run. Without a d_o
# that is a forward without gradients, and else a backward alone.


def leaves(d_o, *tensors):
    return timing.leaves(d_o, *(x for x in tensors if x is not None))


def recorded(function, inputs, d_o):
    """The Run of a function that autograd records."""
    call, o = timing.recorded(function, inputs, d_o)
    return Run(call, o, None if d_o is None else lambda gradients: gradients[:3])


def listed(listing):
    """How many blocks each row of a table has, and which: int32 [1, 1, rows] and [1, 1, rows, columns]."""
    counts = listing.sum(1, dtype=torch.int32)
    indices = torch.argsort(~listing, dim=1, stable=True).to(torch.int32).contiguous()
    return counts[None, None], indices[None, None]


def ours(m, q, k, v, d_o):
    q, k, v, *sinks = inputs = leaves(d_o, q, k, v, m.sinks)
    options = {"causal": m.causal}
    if m.cap:
        options["softcap"] = m.cap
    if m.slopes is not None:
        options["alibi_slopes"] = m.slopes
    if sinks:
        options["s_aux"] = sinks[0]
    if m.window is not None:
        options["window"] = (m.window, None)
    if m.table is not None:
        counts, indices = listed(m.table)
        nothing = torch.zeros_like(counts), torch.zeros_like(indices), counts.new_zeros((*counts.shape, 0))
        options["block_mask"] = hopper_attention.BlockLists(*nothing, counts, indices)
    return recorded(lambda: hopper_attention.attention(q, k, v, **options), inputs, d_o)


@functools.cache
def fa4_alibi(heads):
    """ALiBi as FlashAttention-4's score_mod, and its derivative. Both are compiled, and find these modules as globals."""
    global cutlass, cute
    import cutlass
    from cutlass import cute

    step = -8.0 / heads

    @cute.jit
    def biased(scores, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        exponent = (h_idx + cute.full_like(h_idx, 1)).to(cutlass.Float32) * cute.full_like(scores, step)
        return scores - cute.math.exp2(exponent) * (q_idx - kv_idx).to(cutlass.Float32)

    @cute.jit
    def derived(gradients, scores, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return gradients

    return biased, derived


def fa4(m, q, k, v, d_o):
    from flash_attn.cute import flash_attn_func

    q, k, v, *sinks = inputs = leaves(d_o, q, k, v, m.sinks)
    options = {"causal": m.causal, "softcap": m.cap}
    if m.slopes is not None:
        options["score_mod"], options["score_mod_bwd"] = fa4_alibi(q.shape[2])
    if sinks:
        options["learnable_sink"] = sinks[0]
    if m.window is not None:
        options["window_size"] = (m.window, 0)
    if m.table is not None:
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        # A forward has lists of keys, and a backward lists of queries.
        for name, listing in (("block_sparse_tensors", m.table), ("block_sparse_tensors_bwd", m.table.T)):
            counts, indices = listed(listing)
            nothing = torch.zeros_like(counts), torch.zeros_like(indices)
            options[name] = BlockSparseTensorsTorch(*nothing, counts, indices, block_size=(BLOCK, BLOCK))
    return recorded(lambda: flash_attn_func(q, k, v, **options)[0], inputs, d_o)


@functools.cache
def fa3_operators():
    import flash3

    return flash3.load(torch)


def fa3(m, q, k, v, d_o):
    operators = fa3_operators()
    said = {"is_causal": m.causal, "softcap": 0.0}
    if m.window is not None:
        said.update(is_causal=False, window_size_left=m.window, window_size_right=0)

    def forward():
        # 0: FlashAttention-3 chooses the number of splits.
        return operators.fwd(q, k, v, num_splits=0, **said)

    o, lse, *_ = forward()
    if d_o is None:
        return Run(forward, o)
    gradients = dict(zip(("dq", "dk", "dv"), map(torch.empty_like, (q, k, v))))
    return Run(lambda: operators.bwd(d_o, q, k, v, o, lse, **said, **gradients), o, lambda _: list(gradients.values()))


@functools.cache
def cudnn_handle():
    import cudnn

    return cudnn.create_handle()


class Graph:
    """A graph of cuDNN's frontend, and the tensors that it reads and writes."""

    def __init__(self):
        import cudnn

        self.cudnn, self.pack, self.handle = cudnn, {}, cudnn_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        f32 = cudnn.data_type.FLOAT
        self.types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float32: f32}
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16, intermediate_data_type=f32, compute_data_type=f32, handle=self.handle
        )

    def given(self, name, x):
        """A tensor [batch, heads, seqlen, head_dim] of any strides."""
        node = self.graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=self.types[x.dtype])
        self.pack[node] = x
        return node

    def wanted(self, node, x):
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(self.types[x.dtype])
        self.pack[node] = x

    def built(self):
        """A call that runs the graph."""
        graph, modes = self.graph, self.cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        return lambda: graph.execute(self.pack, workspace, handle=self.handle)


def cudnn(m, q, k, v, d_o):
    """cuDNN computes ALiBi's slopes itself. They equal ours if the number of heads is a power of two."""
    q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
    sinks = None if m.sinks is None else m.sinks.detach().view(1, -1, 1, 1)

    def options(graph):
        said = {"attn_scale": q.shape[-1] ** -0.5, "use_alibi_mask": m.slopes is not None, "diagonal_band_right_bound": 0}
        said["diagonal_alignment"] = graph.cudnn.diagonal_alignment.TOP_LEFT
        if m.window is not None:
            said["diagonal_band_left_bound"] = m.window + 1  # its bound counts the query's own key
        if sinks is not None:
            said["sink_token"] = graph.given("sinks", sinks)
        return said

    forward = Graph()
    operands = [forward.given(name, x) for name, x in zip("qkv", (q, k, v))]
    node_o, node_lse = forward.graph.sdpa(*operands, generate_stats=d_o is not None, **options(forward))
    o = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    forward.wanted(node_o, o)
    lse = torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
    if d_o is not None:
        forward.wanted(node_lse, lse)
    call = forward.built()
    call()
    if d_o is None:
        return Run(call, o.transpose(1, 2))
    back = Graph()
    given = (q, k, v, o, d_o.transpose(1, 2), lse)
    operands = [back.given(name, x) for name, x in zip(("q", "k", "v", "o", "d_o", "lse"), given)]
    said = options(back)
    if sinks is not None:
        said["dSink_token"] = back.given("d_sinks", torch.empty_like(sinks))
    gradients = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
    for node, x in zip(back.graph.sdpa_backward(*operands, **said), gradients):
        back.wanted(node, x)
    return Run(back.built(), o.transpose(1, 2), lambda _: [x.transpose(1, 2) for x in gradients])


def flex_score(cap, slopes):
    """A cap or ALiBi as FlexAttention's score_mod. None if there is neither."""
    if cap:
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    if slopes is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    return None


def flex(m, q, k, v, d_o):
    """FlexAttention has no sinks. A sink multiplies O by sigmoid(LSE - sink), so that this product is compiled with it."""
    from torch.nn.attention import flex_attention as module

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    inputs = leaves(d_o, *heads_first, m.sinks)
    keeps = m.keeps()
    block_mask = module.create_block_mask(lambda b, h, i, j: keeps(i, j), None, None, q.shape[1], k.shape[1], device="cuda")

    def with_sinks(q, k, v, sinks, block_mask):
        o, lse = module.flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        return (o * torch.sigmoid(lse - sinks[:, None])[..., None]).to(o.dtype)

    if m.sinks is None:
        compiled, more = torch.compile(module.flex_attention, dynamic=False), {"score_mod": flex_score(m.cap, m.slopes)}
    else:
        compiled, more = torch.compile(with_sinks, dynamic=False), {}
    gradient = None if d_o is None else d_o.transpose(1, 2)
    run = recorded(lambda: compiled(*inputs, block_mask=block_mask, **more), inputs, gradient)
    return Run(run.call, run.o.transpose(1, 2), None if d_o is None else lambda gradients: [x.transpose(1, 2) for x in gradients[:3]])


# What makes a Run of a library, and which modifiers it is asked for. (xformers' build of FlashAttention-3 has no softcap.)
PEERS = {
    "fa4": (fa4, MODIFIERS),
    "fa3": (fa3, ("window",)),
    "cudnn": (cudnn, ("alibi", "sinks", "window")),
    "flex": (flex, MODIFIERS),
}


# -- the points


class Bench:
    """Times points, prints a line for each, and remembers their ratios for the summary."""

    def __init__(self, options):
        self.options, self.flush = options, timing.flush_memory()
        # Ratios by direction, modifier and library. Library None: our rate over our plain rate.
        self.ratios = collections.defaultdict(list)
        # Why a library failed. It is not tried again with the same modifier, direction and head dim.
        self.refused = {}
        self.wrong = False

    def over(self):
        return self.options.budget is not None and time.monotonic() - BEGIN > self.options.budget

    def peer(self, name, key, made, wanted, where):
        """A checked Run of a library, or why there is none."""
        make, _ = PEERS[name]
        if key in self.refused:
            return None, self.refused[key]
        try:
            run = make(*made)
            said = complaint(run.rows(*where), wanted)
            if said is None:
                return run, None
            return None, f"wrong: {said}"
        except Exception as error:  # a peer may fail in any way, and is then named as such
            first = (str(error).strip() or "no message").splitlines()[0]
            said = f"{type(error).__name__}: {first}"[:160]
        self.refused[key] = said
        return None, said

    def point(self, direction, dim, keys, asked):
        shape = (max(1, self.options.tokens // keys), keys, 2048 // dim, dim)
        m = modifier(asked, keys, shape[2])
        if m is None:
            return
        q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        q = q * CAPPED_QUERIES if m.cap else q
        d_o = d_o if direction == "bwd" else None
        plain = Modifier("plain", causal=m.causal)
        where = checked(keys, shape[2])
        name = f"{direction} d{dim} s{keys} {m.name}"
        expected = definition(m, q, k, v, d_o, *where)
        runs = {"plain": ours(plain, q, k, v, d_o), "ours": ours(m, q, k, v, d_o)}
        own_rows = runs["ours"].rows(*where)
        said = complaint(own_rows, expected)
        if said is not None:
            self.wrong = True
            print(f"{name}: ours wrong: {said}", flush=True)
            return
        # A peer's O is held against the definition, and its dQ against ours.
        wanted, notes = [expected[0], *own_rows[1:]], []
        for peer in self.options.peers:
            if asked not in PEERS[peer][1]:
                continue
            if self.over():
                notes.append(f"{peer} was not tried: --budget is used up")
                continue
            run, why = self.peer(peer, (peer, direction, dim, asked), (m, q, k, v, d_o), wanted, where)
            if run is None:
                notes.append(f"{peer} {why}")
            else:
                runs[peer] = run
        taken = dict(zip(runs, timing.times([run.call for run in runs.values()], self.options.rounds, self.flush)))
        full, own = taken.pop("plain"), taken.pop("ours")
        rate = m.blocks(keys) / plain.blocks(keys) * full / own
        self.ratios[direction, m.name, None].append(rate)
        for peer, theirs in taken.items():
            self.ratios[direction, m.name, peer].append(theirs / own)
        notes = [f"{peer} {theirs:.1f} us, {theirs / own:.2f} of ours" for peer, theirs in taken.items()] + notes
        print("; ".join([f"{name}: plain {full:.1f} us, ours {own:.1f} us ({rate:.3f} of the plain rate)", *notes]), flush=True)

    def points(self):
        options = self.options
        for keys in options.seqlens:
            for dim in options.dims:
                for direction in options.directions:
                    for asked in options.modifiers:
                        if self.over():
                            print(f"stopped before {direction} d{dim} s{keys} {asked}: --budget is used up", flush=True)
                            return
                        self.point(direction, dim, keys, asked)
                        # What a point compiled serves no other one.
                        if "flex" in options.peers:
                            torch._dynamo.reset()
                        gc.collect()
                        torch.cuda.empty_cache()

    def summary(self):
        print(f"\nIn {time.monotonic() - BEGIN:.0f} s. A library's time / ours, our rate / our plain rate: geometric mean, and the least.")
        for (direction, name, peer), ratios in sorted(self.ratios.items(), key=lambda item: (*item[0][:2], item[0][2] or "")):
            mean, least, count = statistics.geometric_mean(ratios), min(ratios), len(ratios)
            what = f"{peer}'s time / ours" if peer else "our rate / our plain rate"
            print(f"{direction} {name}: {what} {mean:.3f}, least {least:.3f} ({count} points)", flush=True)


def words(allowed=None) -> Callable[[str], Any]:
    """Reads words with commas between them: those that are allowed, or numbers."""

    def read(text):
        given = text.split(",")
        if allowed is None and all(word.isdigit() for word in given):
            return [int(word) for word in given]
        if allowed is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers with commas between them.")
        unknown = [word for word in given if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}. It takes {', '.join(allowed)}.")
        return given

    return read


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", type=words(("fwd", "bwd")), default=["fwd", "bwd"], help="passes")
    parser.add_argument("--dims", type=words(), default=[64, 128], help="head dims")
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--seqlens", type=words(), default=lengths, help="sequence lengths, timed in this order")
    parser.add_argument("--modifiers", type=words(MODIFIERS), default=list(MODIFIERS), help="what is timed")
    parser.add_argument("--peers", type=words((*PEERS, "none")), default=list(PEERS), help="`none` times ours alone")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of all sequences together")
    parser.add_argument("--rounds", type=int, default=12, help="how often each call is timed")
    parser.add_argument("--budget", type=float, help="seconds after which no point and no library is begun")
    options = parser.parse_args()
    options.peers = [peer for peer in options.peers if peer != "none"]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, {options.tokens} tokens, 2048 / head dim heads", flush=True)
    bench = Bench(options)
    try:
        bench.points()
    finally:
        bench.summary()
    sys.exit(1 if bench.wrong else 0)


if __name__ == "__main__":
    main()
