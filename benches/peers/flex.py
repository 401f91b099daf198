"""PyTorch's FlexAttention as a peer."""

import contextlib
import importlib

import entry


class Flex:
    """PyTorch's FlexAttention, compiled, with the cap and the biases of the scores as its score_mod, and lists of blocks as its
    block_mask. It is asked at points with one of these. The score_mod reads an additive bias in the bias's own type."""

    name, role, lse = "flex", "peer", None

    def __init__(self, torch):
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        self.torch, self.block_mask = torch, flex.create_block_mask
        self.attend = torch.compile(flex.flex_attention, dynamic=False)

    def origin(self):
        return {"file": "torch.nn.attention.flex_attention", "version": self.torch.__version__}

    def prepare(self, p, q, k, v, bias=None):
        if entry.lengths(p) is not None:
            raise RuntimeError(f"{entry.STATUS[2]}: the sweep gives FlexAttention no packed sequences")
        if p.get("dropout"):
            raise RuntimeError(f"{entry.STATUS[2]}: FlexAttention has no dropout")
        queries, keys = entry.queries(p), p["seqlen"]
        # Views, as SDPA's.
        self.qkv = tuple(x.transpose(1, 2) for x in (q, k, v))
        score = self.score(float(p.get("softcap", 0)), entry.slopes(p, self.torch, q.device), keys - queries, bias)
        self.keywords = {"score_mod": score, "enable_gqa": p["heads_q"] != p["heads_kv"]}
        self.keywords.update(entry.keywords_of_scale(p, "scale"))
        if p["causal"]:
            kept = self.kept(keys - queries, p.get("window"))
            self.keywords["block_mask"] = self.block_mask(kept, None, None, queries, keys, device=q.device)
        if p.get("blocks"):
            listed = self.listed(entry.table(p, self.torch, q.device))
            self.keywords["block_mask"] = self.block_mask(listed, None, None, queries, keys, device=q.device)

    def score(self, cap, slopes=None, shift=0, bias=None):
        tanh = self.torch.tanh
        own = () if bias is None else tuple(size > 1 for size in bias.shape[:3])

        def modified(score, batch, head, query, key):
            score = cap * tanh(score / cap) if cap else score
            if bias is not None:
                place = (at if has else 0 for has, at in zip(own, (batch, head, query)))
                score = score + bias[(*place, key)]
            return score if slopes is None else score - slopes[head] * (query + shift - key).abs()

        return modified

    @staticmethod
    def listed(table):
        """Whole blocks of 128, which FlexAttention's lists then have as full ones."""
        return lambda batch, head, query, key: table[query // entry.BLOCK, key // entry.BLOCK]

    @staticmethod
    def kept(shift, window):
        """The last query sees the last key."""
        if window is None:
            return lambda batch, head, query, key: query + shift >= key
        return lambda batch, head, query, key: (query + shift >= key) & (query + shift - key <= window)

    def context(self):
        return contextlib.nullcontext()

    def call(self):
        return self.attend(*self.qkv, **self.keywords).transpose(1, 2)
