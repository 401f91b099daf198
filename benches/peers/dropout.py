"""Dropout of points: the pairs that ours keeps, and what can be said of peers that keep others.

Ours and shared objects keep the pairs of docs/numerics.md, and their outputs are held against the definition with these.
A package in Python draws pairs of its own, which nobody can see from outside. Its outputs are linear in the kept pairs. So their
mean over all draws is the output without dropout, and their variance is known as well. `check` holds many rows against both."""

WORD, ROUNDS = 0xFFFFFFFF, 7
# The seed and the offset of all points: benches/src/point/dropout.rs has the same.
SEED, OFFSET = 42, 7
# How far the factor of the mean may be from 1, at least, and the bounds of the variance over the expected one. Without the
# factor 1 / (1 - p) the first is off by p; with half or twice the probability the second is.
MEAN, SPREAD = 0.02, (0.55, 1.8)


def probability(p):
    """The probability in force at a point: a multiple of 1/32768. 0 without dropout."""
    return round(p.get("dropout", 0) / 100 * 32768) / 32768


def is_own(p, x):
    """Whether a library's pairs at a point are drawn by itself."""
    return bool(p.get("dropout")) and not hasattr(x, "library")


def state(p, torch, device="cuda"):
    """The words of the seed and the offset, i32 [4]. None without dropout."""
    if not p.get("dropout"):
        return None
    words = [SEED & WORD, SEED >> 32, OFFSET & WORD, OFFSET >> 32]
    return torch.tensor(words, dtype=torch.int32, device=device)


def product(a, b):
    """The high and the low word of a product of two words, b of them a tensor of int64: neither half overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def kept(p, batch, head, queries, keys, torch):
    """What weights are multiplied by, in f64: 0 or 1 / (1 - p). `batch`, `queries` and `keys` are tensors of int64 that broadcast,
    or a number; queries and keys count from the first of a sequence, whose number is `batch`. 1.0 without dropout."""
    if not p.get("dropout"):
        return 1.0
    zero = (queries + keys + batch) * 0
    a, b = (keys // 32 * 8 + keys % 8 + zero) & WORD, (queries // 16 * 8 + queries % 8 + zero) & WORD
    c, d = (batch * p["heads_q"] + head + zero) & WORD, zero + (OFFSET & WORD)
    low, high = SEED & WORD, (SEED >> 32) ^ (OFFSET >> 32)
    for _ in range(ROUNDS):
        (first, first_low), (second, second_low) = product(0xD2511F53, a), product(0xCD9E8D57, c)
        a, b, c, d = second ^ b ^ low, second_low, first ^ d ^ high, first_low
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    number = keys // 8 % 4 + zero
    word = torch.where(number < 2, torch.where(number == 0, a, b), torch.where(number == 2, c, d))
    bits = torch.where(queries // 8 % 2 + zero == 0, word, word >> 16) & 0x7FFF
    chance = probability(p)
    return (bits >= round(chance * 32768)).double() / (1 - chance)


def kept_rows(p, batch, head, rows, numbers, starts, torch):
    """`kept` of these rows and all keys of a tensor. Of packed sequences `numbers` are the sequences of all rows, and `starts` the
    first row of each sequence; None where nothing is packed."""
    rows, keys = rows[:, None], torch.arange(p["seqlen"], device=rows.device)[None, :]
    if numbers is None:
        return kept(p, batch, head, rows, keys, torch)
    number = numbers[rows]
    # Keys before the first are other sequences', which the row does not see.
    return kept(p, number, head, rows - starts[number], (keys - starts[number]).clamp_min(0), torch)


def check(p, pairs, tensors, torch):
    """Errors of outputs of pairs that a library drew itself. `pairs`: what it wrote, the mean over all draws and the variance, each
    of some rows. `tensors`: all that it wrote. Returns (numbers, complaint or None)."""
    numbers = {"unwritten": sum(int(torch.isnan(x).sum() + torch.isinf(x).sum()) for x in tensors)}
    products = squares = misses = count = 0.0
    for got, mean, variance in pairs:
        # Where only rounding is expected, as of a key that nobody sees, there is nothing to compare.
        there = variance > 1e-12
        size = variance[there].sqrt()
        got, mean = got[there].double() / size, mean[there] / size
        products, squares = products + float((got * mean).sum()), squares + float(mean.square().sum())
        misses, count = misses + float((got - mean).square().sum()), count + got.numel()
    numbers["mean"] = products / squares if squares else float("nan")
    numbers["spread"] = misses / count if count else float("nan")
    wrong, allowed = [], max(probability(p) / 2, MEAN)
    if not abs(numbers["mean"] - 1) <= allowed:
        wrong.append(f"mean {numbers['mean']:.3g} of that without dropout; allowed: 1 +- {allowed:.2g}")
    if not SPREAD[0] <= numbers["spread"] <= SPREAD[1]:
        wrong.append(f"variance {numbers['spread']:.3g} of that of dropout; allowed: {SPREAD[0]} to {SPREAD[1]}")
    if numbers["unwritten"]:
        wrong.append(f"{numbers['unwritten']} elements are NaN or infinite")
    # JSON has no NaN.
    return {key: x if abs(x) < float("inf") else str(x) for key, x in numbers.items()}, "; ".join(wrong) or None


def variance_of_o(p, weights, values):
    """Of O, whose terms are `weights * values`, over all draws."""
    chance = probability(p)
    return chance / (1 - chance) * weights.square() @ values.square()


def gradients(p, weights, d_p, keys, queries, d_o):
    """The variances of dQ, dK and dV of one query head over all draws. With a kept factor m for each pair, dS is
    P (m dP - sum of P m dP over the row): linear in the factors, each of which is in dQ once and in all of a row's dS."""
    chance, square = probability(p), weights.square()
    ratio, terms = chance / (1 - chance), square * d_p.square()
    mean_key = weights @ keys
    # sum of terms * (k - mean)^2, without a tensor of pairs and dims
    d_q = terms @ keys.square() - 2 * mean_key * (terms @ keys) + mean_key.square() * terms.sum(-1, keepdim=True)
    of_pair = square * (d_p.square() * (1 - 2 * weights) + terms.sum(-1, keepdim=True))
    return ratio * d_q, ratio * of_pair.T @ queries.square(), ratio * square.T @ d_o.square()
