"""Lists of blocks of slices, documents, prefixes and spans: read by their definition, and compared with dense masks."""

import random
import unittest

import hopper_attention
from hopper_attention import Chunked, Prefix

try:
    import numpy
except ImportError as error:
    NO_NUMPY = str(error)
else:
    NO_NUMPY = None
try:
    import torch
except ImportError as error:
    NO_TORCH = str(error)
else:
    NO_TORCH = None
NO_ARRAYS = NO_NUMPY and NO_TORCH


def read(lists):
    """For each batch entry: rows of blocks, each None, "full" or the bits of its pairs. By the definition of the lists."""
    counts, indices, bits, full_counts, full_indices = (one.tolist() for one in lists)
    made = []
    for b in range(len(counts)):
        rows = []
        for row in range(len(counts[b][0])):
            blocks = [None] * len(indices[b][0][row])
            for at in full_indices[b][0][row][: full_counts[b][0][row]]:
                assert blocks[at] is None
                blocks[at] = "full"
            for n, at in enumerate(indices[b][0][row][: counts[b][0][row]]):
                assert blocks[at] is None
                blocks[at] = bits[b][0][row][n * 512 : (n + 1) * 512]
            rows.append(blocks)
        made.append(rows)
    return made


def of_dense(keep, seqlen_q, seqlen_kv):
    """What lists must say of keep(q, k)."""
    rows = []
    for first in range(0, seqlen_q, 128):
        row = []
        for begin in range(0, seqlen_kv, 128):
            words, kept, pairs = [0] * 512, 0, 0
            for i in range(first, min(first + 128, seqlen_q)):
                for j in range(begin, min(begin + 128, seqlen_kv)):
                    pairs += 1
                    if keep(i, j):
                        kept += 1
                        words[(i - first) * 4 + (j - begin) // 32] |= 1 << ((j - begin) % 32)
            signed = [word - 2**32 if word >= 2**31 else word for word in words]
            row.append(None if not kept else "full" if kept == pairs else signed)
        rows.append(row)
    return rows


def of_mask(causal, window, seqlen_q, seqlen_kv, top_left=False):
    """The masks of `attention`, pair by pair."""

    def keep(i, j):
        own = i if top_left else i + seqlen_kv - seqlen_q
        if isinstance(window, Chunked):
            return j <= own and j // window.keys == own // window.keys
        if isinstance(window, Prefix):
            return j < window.keys or j <= own
        left, right = window or (None, None)
        return (
            (not causal or j <= own) and (left is None or j >= own - left) and (right is None or j <= own + right)
        )

    return keep


def in_slice(i, j, queries, keys, kind):
    """MagiAttention's definition of a slice, counted in its own matrix."""
    row, column = i - queries[0], j - keys[0]
    rows, columns = queries[1] - queries[0], keys[1] - keys[0]
    bottom_right, top_left = column <= row + columns - rows, column >= row
    inside = 0 <= row < rows and 0 <= column < columns
    return inside and (True, bottom_right, top_left, bottom_right and top_left)[kind]


WINDOWS = (
    (True, None),
    (False, None),
    (True, (50, None)),
    (False, (10, 140)),
    (False, Chunked(60)),
    (False, Prefix(70)),
)
SIZES = ((200, 200), (150, 300), (300, 130), (1, 129))


class Made(unittest.TestCase):
    @unittest.skipIf(NO_ARRAYS, NO_ARRAYS)
    def test_slices(self):
        m, n = 300, 420
        shared = ((10, 250), (10, 250), (10, 250), (250, 300), (7, 7))
        keys = ((0, 240), (1, 241), (241, 400), (5, 420), (3, 50))
        kinds = (1, 2, 0, 3, 0)
        lists = hopper_attention.block_lists_from_slices(shared, keys, kinds, m, n)
        got = read(lists)
        want = of_dense(lambda i, j: any(in_slice(i, j, *of) for of in zip(shared, keys, kinds)), m, n)
        self.assertEqual(got, [want])
        self.assertIn("full", want[0] + want[1])

    @unittest.skipIf(NO_ARRAYS, NO_ARRAYS)
    def test_random_slices_are_right_or_have_a_pair_in_common(self):
        draw = random.Random(1)
        refused = 0
        for _ in range(30):
            m, n = draw.choice(SIZES)

            def ranges(size):
                return sorted(min(size, draw.choice((0, 128, size, draw.randrange(size + 1)))) for _ in range(2))

            count = draw.randrange(3)
            q, k = ([ranges(size) for _ in range(count)] for size in (m, n))
            kinds = [draw.randrange(4) for _ in range(count)]
            kept = {
                (i, j): sum(in_slice(i, j, *of) for of in zip(q, k, kinds)) for i in range(m) for j in range(n)
            }
            with self.subTest(q=q, k=k, kinds=kinds, sizes=(m, n)):
                if max(kept.values()) > 1:
                    refused += 1
                    with self.assertRaisesRegex(ValueError, "slices 0 and 1 both keep query"):
                        hopper_attention.block_lists_from_slices(q, k, kinds, m, n)
                else:
                    got = read(hopper_attention.block_lists_from_slices(q, k, kinds, m, n))
                    self.assertEqual(got, [of_dense(lambda i, j: kept[i, j], m, n)])
        self.assertTrue(0 < refused < 30)

    def test_wrong_slices_are_refused_by_name(self):
        def refused(text, *args, error=ValueError):
            with self.assertRaisesRegex(error, text):
                hopper_attention.block_lists_from_slices(*args)

        refused("q_ranges: 5 to 3 at 0; allowed: 0 to 9", [[5, 3]], [[0, 9]], [0], 9)
        refused("k_ranges: 0 to 10 at 1; allowed: 0 to 9", [[0, 1]] * 2, [[0, 9], [0, 10]], [0, 0], 9)
        refused("k_ranges: -1 to 2 at 0", [[0, 1]], [[-1, 2]], [0], 9)
        refused("types: 4 at 0; allowed: 0 .full., 1", [[0, 1]], [[0, 9]], [4], 9)
        refused("1 and 2 ranges, and 1 types", [[0, 1]], [[0, 9]] * 2, [0], 9)
        refused(r"q_ranges: \[1\] at 0; allowed: \[n, 2\]", [[1]], [[0, 9]], [0], 9)
        refused("q_ranges: .*float.*; allowed: whole numbers", [[0.5, 1]], [[0, 9]], [0], 9, error=TypeError)
        refused("seqlen_q: -1; allowed: 0 to", [], [], [], -1)
        refused("slices 0 and 2 both keep query 8 and key 8", [[0, 9], [0, 0], [8, 9]], [[0, 9]] * 2 + [[8, 9]], [1, 0, 0], 9)

    @unittest.skipIf(NO_ARRAYS, NO_ARRAYS)
    def test_documents(self):
        def number(b, token):
            return -1 if b and token <= 30 else 7 if 200 <= token <= 240 else token // (90 + 40 * b)

        ids = [[[number(b, token) for token in range(size)] for b in range(2)] for size in (290, 400)]
        got = read(hopper_attention.block_lists_from_documents(*ids))
        for b in range(2):
            keep = lambda i, j: number(b, i) == number(b, j) >= 0  # noqa: E731
            self.assertEqual(got[b], of_dense(keep, 290, 400))
        got = read(hopper_attention.block_lists_from_documents([[i % 3 for i in range(130)]]))
        self.assertEqual(got, [of_dense(lambda i, j: i % 3 == j % 3, 130, 130)])
        for text, *wrong in (("q_ids: not of two", [1, 2]), ("kv_ids: 2 batch entries; allowed: 1", [[1]], [[1], [2]])):
            with self.assertRaisesRegex(ValueError, text):
                hopper_attention.block_lists_from_documents(*wrong)

    @unittest.skipIf(NO_ARRAYS, NO_ARRAYS)
    def test_prefixes(self):
        for (m, n), (causal, window), top_left in zip(SIZES * 3, WINDOWS * 2, (False, True) * 6):
            prefixes = [0, n // 3, n]
            with self.subTest(sizes=(m, n), causal=causal, window=window, top_left=top_left):
                got = read(hopper_attention.block_lists_from_prefixes(prefixes, m, n, causal, window, top_left))
                keep = of_mask(causal, window, m, n, top_left)
                for b, prefix in enumerate(prefixes):
                    self.assertEqual(got[b], of_dense(lambda i, j: j < prefix or keep(i, j), m, n))
        with self.assertRaisesRegex(ValueError, "prefixes: 10 of batch entry 1; allowed: 0 to 9"):
            hopper_attention.block_lists_from_prefixes([9, 10], 5, 9)

    @unittest.skipIf(NO_ARRAYS, NO_ARRAYS)
    def test_spans(self):
        withins = (None, (40, None), (60, 60), Chunked(100))
        for at, ((causal, window), within) in enumerate((w, i) for w in WINDOWS for i in withins):
            (m, n), top_left = SIZES[at % 3], at % 2 == 1
            spans = [[[0, 10], [90, 129]], [[50, 120], [100, 130], [60, 60]]]
            with self.subTest(sizes=(m, n), causal=causal, window=window, within=within, top_left=top_left):
                got = read(
                    hopper_attention.block_lists_from_spans(spans, m, n, causal, window, top_left, within=within)
                )
                keep, inside = (of_mask(c, w, m, n, top_left) for c, w in ((causal, window), (False, within)))

                def kept(i, j, its):
                    own = i if top_left else i + n - m
                    both = any(first <= own < end and first <= j < end for first, end in its)
                    return (keep(i, j) or both) and inside(i, j)

                for b, its in enumerate(spans):
                    self.assertEqual(got[b], of_dense(lambda i, j: kept(i, j, its), m, n))
        with self.assertRaisesRegex(ValueError, "spans: 4 to 2 at 0 of batch entry 1; allowed: 0 to 9"):
            hopper_attention.block_lists_from_spans([[], [[4, 2]]], 5, 9)
        with self.assertRaisesRegex(ValueError, r"spans: 1 at 0 of batch entry 0; allowed: \[n, 2\]"):
            hopper_attention.block_lists_from_spans([[1, 2]], 5, 9)

    @unittest.skipIf(NO_NUMPY, NO_NUMPY)
    def test_numpy(self):
        ids = numpy.repeat([0, 1, 2], 70)[None].astype("int32")
        lists = hopper_attention.block_lists_from_documents(ids)
        self.assertTrue(all(isinstance(one, numpy.ndarray) and one.dtype == numpy.int32 for one in lists))
        dense = ids[0][:, None] == ids[0][None]
        rng = numpy.random.default_rng(1)
        q, k, v = (rng.standard_normal((1, 210, 2, 16), dtype="float32") for _ in range(3))
        got = hopper_attention.attention(q, k, v, causal=True, block_mask=lists)
        numpy.testing.assert_array_equal(got, hopper_attention.attention(q, k, v, causal=True, attn_mask=dense))
        # Sequences without tokens have lists without blocks.
        empty = hopper_attention.block_lists_from_prefixes(numpy.zeros(2, "int32"), 0, 300)
        self.assertEqual([one.shape for one in empty], [(2, 1, 0), (2, 1, 0, 3), (2, 1, 0, 0), (2, 1, 0), (2, 1, 0, 3)])

    @unittest.skipIf(NO_NUMPY, NO_NUMPY)
    def test_documents_are_packed_sequences(self):
        lengths = [1, 16, 3, 0, 9, 130, 1, 7] * 3
        cu = numpy.cumsum([0, *lengths]).astype("int32")
        lists = hopper_attention.block_lists_from_documents(numpy.repeat(range(len(lengths)), lengths)[None])
        rng = numpy.random.default_rng(1)
        q, k, v, d_o = (rng.standard_normal((sum(lengths), heads, 16), dtype="float32") for heads in (4, 2, 2, 4))
        for causal in (False, True):
            o, lse = hopper_attention.attention_varlen(q, k, v, cu, causal=causal, return_lse=True)
            packed = hopper_attention.attention_varlen_backward(q, k, v, o, lse, d_o, cu, causal=causal)
            one = dict(causal=causal, block_mask=lists)
            o_of_one, lse_of_one = hopper_attention.attention(q[None], k[None], v[None], return_lse=True, **one)
            of_one = (q, k, v, o_of_one[0], lse_of_one[0], d_o)
            gradients = hopper_attention.attention_backward(*(tensor[None] for tensor in of_one), **one)
            numpy.testing.assert_allclose(o_of_one[0], o, rtol=1e-5, atol=1e-6)
            numpy.testing.assert_allclose(lse_of_one[0], lse, rtol=1e-5, atol=1e-6)
            for got, wanted in zip(gradients, packed):
                numpy.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-5)

    @unittest.skipIf(NO_TORCH, NO_TORCH)
    def test_torch(self):
        image = torch.tensor([[[30, 170]], [[0, 10]]], dtype=torch.int32)
        lists = hopper_attention.block_lists_from_spans(image, 300, within=(60, None))
        self.assertTrue(all(isinstance(one, torch.Tensor) and one.dtype == torch.int32 for one in lists))
        i, j = torch.arange(300)[:, None], torch.arange(300)[None]
        both = ((image[:, :, :1, None] <= i) & (i < image[:, :, 1:, None])) & (
            (image[:, :, :1, None] <= j) & (j < image[:, :, 1:, None])
        )
        dense = ((j <= i) | both) & (j >= i - 60)
        q, k, v = (torch.randn(2, 300, 2, 16, generator=torch.Generator().manual_seed(1)) for _ in range(3))
        got = hopper_attention.attention(q, k, v, block_mask=lists)
        torch.testing.assert_close(got, hopper_attention.attention(q, k, v, attn_mask=dense), atol=0, rtol=0)
        plain = hopper_attention.block_lists_from_documents([[1] * 5], device="cpu")
        self.assertIsInstance(plain.counts, torch.Tensor)


if __name__ == "__main__":
    unittest.main()
