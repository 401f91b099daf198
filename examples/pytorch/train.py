#!/usr/bin/env python3
"""Trains a small language model on the text of this file, and then shows the other ways into the package.

    python3 train.py [--steps 200]

On the GPU (bf16) if there is one, else on the CPU (f32).
"""

import argparse
import sys

import hopper_attention
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A transformer block: 4 query heads that share 2 KV heads."""

    def __init__(self, dim=128, heads=4, heads_kv=2):
        super().__init__()
        self.shapes = (heads, heads_kv, heads_kv)
        self.head_dim = dim // heads
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.shapes) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, seqlen, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, seqlen, -1, self.head_dim).split(self.shapes, 2)
        # Views of one tensor: the library reads them where they lie.
        attended = hopper_attention.attention(*parts, causal=True)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    def __init__(self, vocab=256, dim=128, seqlen=128, blocks=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(seqlen, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(blocks)))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.blocks(x))


def train(device, dtype, steps):
    """The loss of the first and of the last step."""
    torch.manual_seed(0)
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()), device=device)
    model = Model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(text) - 129, (16,)).tolist()
        ids = torch.stack([text[start : start + 129] for start in starts])
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4}: loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


def fp8(device, dtype):
    """Attention on FP8 operands, beside the same on the operands that they were made of."""
    q, k, v = (torch.randn(2, 256, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    operands = hopper_attention.quantize(q, k, v, hadamard=1)
    o = hopper_attention.attention_fp8(operands, causal=True)
    want = hopper_attention.attention(q, k, v, causal=True)
    error = ((o.float() - want.float()).square().mean() / want.float().square().mean()).sqrt().item()
    print(f"FP8: relative root-mean-square error {error:.3f}")
    return error


def transformers_model():
    """A random Llama on the library."""
    try:
        import transformers
    except ImportError:
        print("skipped: no transformers")
        return
    hopper_attention.register_transformers()
    settings = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = transformers.LlamaForCausalLM(settings).eval()
    ids = torch.randint(0, 256, (2, 32))
    want = model(ids).logits
    model.set_attn_implementation("hopper_attention")
    print(f"transformers: largest difference of the logits {(model(ids).logits - want).abs().max().item():.1e}")


def sdpa(device, dtype):
    """torch's own call on the library. Only CUDA tensors reach it."""
    if device == "cpu" or not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        print("skipped: register_sdpa needs a GPU and torch 2.11")
        return
    q = torch.randn(2, 4, 256, 64, device=device, dtype=dtype)
    handle = hopper_attention.register_sdpa()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        handle.remove()
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    print(f"SDPA: largest difference to torch's own kernel {(o - want).abs().max().item():.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    on_gpu = torch.cuda.is_available() and hopper_attention.device_count() > 0
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    print(f"hopper_attention {hopper_attention.version()} on {device}, {dtype}")
    first, last = train(device, dtype, steps)
    error = fp8(device, dtype)
    transformers_model()
    sdpa(device, dtype)
    return 0 if last < 0.8 * first and error < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
