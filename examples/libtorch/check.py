"""Loads the op and holds it against torch's own attention: python check.py build/libattention.so"""

import sys

import torch

torch.ops.load_library(sys.argv[1])
attention = torch.ops.hattn_example.attention


@torch.library.register_fake("hattn_example::attention")
def fake(q, k, v, causal):
    """Type and shape of the result, which is all that torch.compile asks for."""
    return q.new_empty((*q.shape[:3], v.shape[3]))


def check(device, dtype, allowed):
    torch.manual_seed(0)
    q = torch.randn(2, 100, 4, 64, dtype=dtype, device=device)
    # As many keys as queries: torch's causal mask begins at the first key, the library's ends at the last one.
    k, v = (torch.randn(2, 100, 2, 64, dtype=dtype, device=device) for _ in range(2))
    for causal in (False, True):
        heads_first = [t.float().transpose(1, 2) for t in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        error = (attention(q, k, v, causal).float() - want.transpose(1, 2)).abs().max().item()
        print(f"{device}, {dtype}, causal {causal}: largest error {error:.1e}, allowed {allowed:.0e}")
        if not error <= allowed:
            sys.exit("wrong")


check("cpu", torch.float32, 1e-5)
if torch.cuda.is_available():
    check("cuda", torch.bfloat16, 2e-2)
else:
    print("skipped: torch shows no GPU")
try:
    attention(*(torch.randn(1, 4, 1, 8, dtype=torch.float64) for _ in range(3)), False)
    sys.exit("float64 was not refused")
except RuntimeError as error:
    print(f"refused: {str(error).splitlines()[0]}")
