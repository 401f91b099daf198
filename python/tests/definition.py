"""Attention by its definition, in torch's own operations. It must be imported where torch is there."""

import torch


def reference(q, k, v, keep, slopes=None, cap=None, sinks=None, scale=None, bias=None, factors=None):
    """O, the log-sum-exp and the maximum logits by torch's own operations, of [batch, seqlen, heads, head_dim].

    The cap comes before the biases, and these before the mask. `bias` broadcasts to the scores. `factors` are what dropout
    multiplies the weights by.
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if slopes is not None:
        rows, columns = scores.shape[-2:]
        own = torch.arange(rows, device=q.device) + columns - rows
        distances = (own[:, None] - torch.arange(columns, device=q.device)).abs()
        scores = scores - slopes.to(scores.dtype).reshape(-1, q.shape[1], 1, 1) * distances
    scores = scores.masked_fill(~keep, -torch.inf)
    max_logits = scores.detach().amax((0, 2, 3))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None].clamp(min=-1e30))[..., : k.shape[2]]
    if factors is not None:
        weights = weights * factors
    return (weights @ v).transpose(1, 2), lse, max_logits


def causal_keep(seqlen_q, seqlen_kv, device="cpu"):
    return torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=device).tril(seqlen_kv - seqlen_q)
