"""The backends of PyTorch's scaled_dot_product_attention as peers, and which head dims peers take."""

import additive
import dropout
import entry

# Head dims that a peer takes where that of V is another than that of Q and K, and the largest that it takes where both are equal. A
# call with others may fail in the middle of a kernel, or be given to another kernel without a word.
PAIRS = {"cudnn": {(192, 128)}, "fa2": set(), "fa3": {(192, 128)}, "fa4": {(192, 128)}, "efficient": {(192, 128)}}
LARGEST = 256


def refuse_dims(name, p):
    """Raises a RuntimeError where a peer has no kernel for the point's head dims."""
    dims = p["head_dim"], entry.values(p)
    if dims[0] != dims[1] and dims not in PAIRS.get(name, set()):
        raise RuntimeError(f"{entry.STATUS[2]}: {name} is not asked for head dims {dims[0]} and {dims[1]}")
    if max(dims) > LARGEST:
        raise RuntimeError(f"{entry.STATUS[2]}: {name} takes head dims up to {LARGEST}")


# What the backends do not have, in the words of a point.
NOT_IN_BACKENDS = ("softcap", "alibi", "blocks")


def refuse_options(name, p, options):
    """Raises a RuntimeError where a peer is asked for one of these options, which it does not have."""
    for what in options:
        if p.get(what):
            raise RuntimeError(f"{entry.STATUS[2]}: {name} has no {what}")


class Sdpa:
    """One backend of PyTorch's scaled_dot_product_attention. It allocates its output, which so cannot be poisoned."""

    role = "peer"
    lse = None
    # Whether it takes an attn_mask, as which it gets a bias.
    masks = True

    def __init__(self, name, backend, torch):
        self.name, self.backend, self.torch = name, backend, torch
        self.version = torch.__version__
        self.sdpa_kernel = torch.nn.attention.sdpa_kernel
        self.attend = torch.nn.functional.scaled_dot_product_attention

    def origin(self):
        return {"file": "torch", "version": self.version}

    def leaf(self, p, bias, q):
        """What the gradient of the bias is asked of."""
        return additive.leaf(p, bias, q, self.torch)

    def prepare(self, p, q, k, v, bias=None):
        refuse_options("this backend", p, NOT_IN_BACKENDS)
        if not self.masks:
            additive.refuse("this backend", p)
        if entry.lengths(p) is not None:
            raise RuntimeError(f"{entry.STATUS[2]}: the sweep gives this backend no packed sequences")
        # The mask of a bias also has what the point's mask hides.
        if p.get("window") is not None and bias is None:
            raise RuntimeError(f"{entry.STATUS[2]}: this backend has no window")
        if p["causal"] and bias is None and entry.queries(p) != p["seqlen"]:
            raise RuntimeError(f"{entry.STATUS[2]}: this backend's causal mask lies at the other corner")
        refuse_dims(self.name, p)
        # Views: SDPA's logical order is BHSD, and both backends take any strides with a unit inner one.
        self.qkv = tuple(x.transpose(1, 2) for x in (q, k, v))
        self.keywords = {"is_causal": p["causal"]}
        if bias is not None:
            mine = bias if bias.requires_grad else self.leaf(p, bias, q)
            self.keywords = {"attn_mask": additive.attn_mask(p, mine, self.torch)}
        self.keywords.update(entry.keywords_of_scale(p, "scale"))
        if p["heads_q"] != p["heads_kv"]:
            self.keywords["enable_gqa"] = True
        if p.get("dropout"):
            self.keywords["dropout_p"] = dropout.probability(p)

    def context(self):
        return self.sdpa_kernel(self.backend)

    def call(self):
        return self.attend(*self.qkv, **self.keywords).transpose(1, 2)


class SdpaFlash(Sdpa):
    """PyTorch's FlashAttention-2. Packed sequences go to the operator itself, which gradients can be asked of, too."""

    masks = False

    def __init__(self, torch):
        super().__init__("fa2", torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch)

    def prepare(self, p, q, k, v, bias=None):
        refuse_options("this backend", p, NOT_IN_BACKENDS)
        refuse_dims(self.name, p)
        self.packed = entry.lengths(p) is not None
        if not self.packed:
            return super().prepare(p, q, k, v, bias)
        offsets, longest = entry.offsets(p, self.torch), max(entry.lengths(p))
        window = p.get("window")
        self.qkv = tuple(x.squeeze(0) for x in (q, k, v))
        # The ends and the longest of queries and of keys, dropout, causal, and no mask for a debugger.
        self.lengths = (offsets, offsets, longest, longest, dropout.probability(p), p["causal"] and window is None, False)
        self.keywords = {} if window is None else {"window_size_left": window, "window_size_right": 0}

    def call(self):
        if not self.packed:
            return super().call()
        return self.torch.ops.aten._flash_attention_forward(*self.qkv, *self.lengths, **self.keywords)[0].unsqueeze(0)
