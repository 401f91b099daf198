#!/usr/bin/env python3
"""Times one sequence of 8k to 512k tokens, and says the clock: `hattn plot` makes charts of the output.

Each point is called again and again for --seconds, with L2 emptied before each call. Its time is the median of the second half
of the calls: by then the card is warm, and has lowered its clock. The clock is that of the multiprocessors meanwhile, as
nvidia-smi says. A line has TFLOP/s. FLOPs are 4 * tokens^2 * head_dim * heads, 2.5 times that in the backward, and half under a
causal mask. From 256k tokens on there are half as many heads.

    HOPPER_ATTENTION_LIBRARY=libhopper_attention.so PYTHONPATH=python python3 benches/growth.py --heads 16/16,16/4 >growth.txt
"""

import argparse
import atexit
import statistics
import subprocess
import threading
import time

import hopper_attention
import torch

import timing

# From so many tokens on there are half as many heads: memory and time are short.
LONG = 256 << 10


class Clock:
    """The clock of the multiprocessors in MHz, asked for all the time."""

    def __init__(self):
        query = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "50"]
        self.seen = []
        self.process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        atexit.register(self.process.terminate)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.seen.append((time.monotonic(), float(line)))

    def since(self, begin):
        """The median since a time, or the last one where none came since."""
        return statistics.median([mhz for at, mhz in self.seen if at >= begin] or [mhz for _, mhz in self.seen[-1:]] or [0.0])


def calls(direction, causal, shape_q, shape_kv):
    """A call of the pass, with torch's tensors."""
    q, *kv = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in (shape_q, shape_kv, shape_kv))
    if direction == "fwd":
        return lambda: hopper_attention.attention(q, *kv, causal=causal, return_lse=True)
    d_o = torch.randn_like(q)
    inputs = timing.leaves(d_o, q, *kv)
    return timing.recorded(lambda: hopper_attention.attention(*inputs, causal=causal), inputs, d_o)[0]


def measure(call, seconds, flush, clock):
    """The median of the second half of the calls in ms, and the clock meanwhile."""
    call()
    torch.cuda.synchronize()
    begin, taken = time.monotonic(), []
    while time.monotonic() - begin < seconds or len(taken) < 3:
        torch.cuda._sleep(1_000_000)  # the GPU waits while the host enqueues the call
        start, end = timing.timed(call, flush)
        end.synchronize()
        taken.append((time.monotonic(), start.elapsed_time(end)))
    late = taken[len(taken) // 2 :]
    return statistics.median(ms for _, ms in late), clock.since(late[0][0] - late[0][1] / 1e3)


def words(text):
    return text.split(",")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", type=words, default=["fwd", "bwd"])
    parser.add_argument("--dims", type=words, default=["64", "128"])
    parser.add_argument("--masks", type=words, default=["causal", "full"])
    parser.add_argument("--heads", type=words, default=["16/16", "16/4"])
    parser.add_argument("--tokens", type=words, default=["8k", "16k", "32k", "64k", "128k", "256k", "512k"])
    parser.add_argument("--seconds", type=float, default=1.1)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16, one sequence")
    flush, clock = timing.flush_memory(), Clock()
    for direction in options.directions:
        for dim in map(int, options.dims):
            for mask in options.masks:
                for heads in options.heads:
                    for tokens in options.tokens:
                        length = int(tokens.rstrip("k")) << 10
                        heads_q, heads_kv = (max(1, int(n) // (2 if length >= LONG else 1)) for n in heads.split("/"))
                        call = calls(direction, mask == "causal", (1, length, heads_q, dim), (1, length, heads_kv, dim))
                        ms, mhz = measure(call, options.seconds, flush, clock)
                        flops = 4 * length**2 * dim * heads_q * (2.5 if direction == "bwd" else 1) / (2 if mask == "causal" else 1)
                        name = f"{direction} d{dim} {mask} {tokens} h{heads_q}/{heads_kv}"
                        print(f"{name}: hopper-attention {flops / ms / 1e9:.0f} ({mhz:.0f} MHz); {ms:.3g} ms", flush=True)
                        del call
                        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
