// Everything that a row of fp8.def fixes: tiles, register budget and the shared-memory plan.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "common/barrier.hpp"
#include "common/row.hpp"
#include "common/scalars.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"
#include "sm90/cluster.hpp"
#include "sm90/fp8/softcap.hpp"
#include "sm90/listed.hpp"
#include "sm90/table.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

// No number in either half.
constexpr std::uint32_t kNoPair = 0x7fff7fffU;

// What the factors of a block of keys come to for a warpgroup's queries, once for all its threads.
struct alignas(16) BlockFactors {
  float unit;               // what a product of stored values is multiplied by to be a score, in powers of two
  std::uint32_t unit_pair;  // the same as a pair of f16, kNoPair where f16 does not go so far
  float ratio_v;            // descale_v / the largest descale_v of the head
  float unused;
};

// What a CTA computes of a tile: all of it, or one of two pieces (split.hpp).
struct alignas(8) Piece {
  // 0: all key blocks. Above 0: the blocks from `cut` on. Below 0: the blocks before -cut.
  int cut;
  // 0: the CTA computes all of the tile. Above 0: the CTA adds the partial sums in slot `partial - 1`. Below 0: the CTA
  // writes its partial sums to slot `-1 - partial`.
  int partial;

  // Of a tile with a list it is how many entries there are: masked ones, and all.
  CUTE_DEVICE static Piece of_list(ListedTile const& tile) { return {tile.masked, tile.total}; }
  CUTE_DEVICE int masked() const { return cut; }
  CUTE_DEVICE int total() const { return partial; }
};

// A tile in a warp's rows of which something may have leaked (leak.hpp).
template <class TileRecord>
struct alignas(16) Fp8Leak {
  TileRecord tile;
  signed char rows[16];  // of each row, what its sum of weights is: 0, 1 for another number, -1 for NaN
  int noted;             // whether there is one
};

// What is left of the run of key blocks that a CTA has drawn of the split tiles (split.hpp).
struct Segment {
  std::uint32_t position;  // units before the segment's next one, from the first split tile on
  std::uint32_t left;      // units. 0: the CTA draws anew
  int slot;                // of the workspace, for partial sums: how many segments were drawn before
};

using Fp8Scheduler = TileScheduler<false>;

// What the kernel reads, in a fixed order as in common/scalars.hpp. Here the operands' places are part of it, too: read
// from FwdParams itself, they make ptxas serialise the products of some rows.
struct Fp8KernelParams {
  TensorDesc o;
  DType output;          // of O
  float const* scale_o;  // what O is multiplied by before it is rounded, or null
  unsigned* amax;        // the bits of the largest magnitude of O, or null
  float* lse;            // or null
  std::int64_t lse_stride_batch;
  std::int64_t lse_stride_head;
  TensorDesc descale_q;
  TensorDesc descale_k;
  TensorDesc descale_v;
  int descale_q_group;
  int batch;
  int heads_q;
  int heads_per_kv_head;
  int seqlen_q;
  int seqlen_kv;
  int head_dim_vo;
  int left_offset;
  int right_offset;
  int heads_per_group;
  int groups;
  int* tile_counter;
  RangeCheck* range_check;  // or null
  int range_grid;
  int split_tiles;      // tiles at the end of the tile order that are split over CTAs (split.hpp); 0: none
  int segment_units;    // units of each CTA's segment of them, at least
  int longer_segments;  // so many of the first segments have one unit more
  float scale_log2;     // softmax_scale * log2(e)
  // Read by leak.hpp alone.
  TensorDesc q;
  TensorDesc k;
  TensorDesc v;
  int head_dim_qk;
  TensorDesc sinks;  // or without an address
  DType sinks_dtype;
  MaskEdges edges;
};

// The same where the device knows the lengths of sequences.
struct PackedFp8KernelParams : Fp8KernelParams {
  SequenceTable table;
  int table_bytes;
  // Rows from a batch entry to the next, of each operand: 0 where it is packed.
  int rows_apart_q;
  int rows_apart_k;
  int rows_apart_v;
  // Between the factors per block of two packed sequences there is room for so many rows: kScaleBlock - 1, so that no
  // block has rows of both. 0 where the operand is not packed.
  int factors_apart_q;
  int factors_apart_kv;
  // Of a tile's band.
  int diagonal_offset;
  int window_left;
  int window_right;
  Sequences sequences;
};

// The same of a row of class Blocks.
struct ListedFp8KernelParams : Fp8KernelParams {
  BlockLists lists;
};

// The same of a row for modified scores.
template <class Base>
struct CappedParams : Base {
  Fp8Cap cap;
};
CUTE_HOST_DEVICE Fp8NoCap cap_of(Fp8KernelParams const&) { return {}; }
template <class Base>
CUTE_HOST_DEVICE Fp8Cap cap_of(CappedParams<Base> const& params) {
  return params.cap;
}

// What only a packed kernel has in shared memory.
template <bool kPacked, int kWarps>
struct Fp8PackedStorage {};
template <int kWarps>
struct Fp8PackedStorage<true, kWarps> : TableStorage<kMostTableBytes> {
  PackedTile finished[kWarps];  // of each consumer warp, the tile whose O it is about to write
};

// kPacked: of a row's kernel for sequences whose lengths the device knows (common/sequences.hpp). kModified: of a row
// for modified scores (fp8.def): they have a cap.
template <MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages, Scores kScores,
          bool kModified, bool kPacked = false>
struct Fp8Traits : RowTraits<Arch::Sm90, DType::E4M3, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, kScores> {
  using Element = cutlass::float_e4m3_t;

  static constexpr int kConsumers = kTileM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kConsumers == 2 || kConsumers == 3);
  static_assert(kHeadDimQK % 64 == 0 && kHeadDimVO % 64 == 0, "tiles are made of slabs");

  // Bytes of a slab's row (common/slab.hpp), of Q and K and of V. A head dim that is no multiple of 128 has slabs
  // of 64.
  static constexpr int kSlabQK = kHeadDimQK % 128 == 0 ? 128 : 64;
  static constexpr int kSlabVO = kHeadDimVO % 128 == 0 ? 128 : 64;

  static constexpr int kScaleBlock = 128;  // rows that share a factor where factors are of blocks
  static_assert(kTileN == 128 || kTileN == 64, "a block of keys has one factor, and a row of V^T is a slab's");
  // Keys of a stage of V as it is loaded. Where blocks are large, half of one: there is no room for more.
  static constexpr int kKeysRaw = kTileN * kHeadDimVO > 128 * 128 ? kTileN / 2 : kTileN;

  // V^T has eight more rows, of ones: their products are the sums of the rounded weights.
  static constexpr int kRowsVt = kHeadDimVO + 8;
  // Measured (benches/LOG.md, 23).
  // - kTurns: consumers take turns at issuing products. Good where all tiles are of one length.
  // - kColumnsAhead: columns, in eights, by which multiply-adds may run ahead of exponentials (weights.hpp). 0: ptxas
  //   decides.
  // - kTransposeBatch: loads of V before the first store of V^T.
  static constexpr bool kTurns =
      kMask == MaskClass::Full && kConsumers == 2 && !(kPacked && kHeadDimVO == 128) && kHeadDimVO <= 128;
  static constexpr int kColumnsAhead = kHeadDimQK >= 128 ? 2 : 0;
  static constexpr int kTransposeBatch = kHeadDimQK >= 128 && kConsumers == 2 && !kTurns ? 2 : 1;
  // Of so many times 8 columns the last 8 are exponentiated by a polynomial (weights.hpp), 0: none. The exponentials'
  // unit is what limits three consumers at head dim 64, and no others (benches/LOG.md, 27).
  static constexpr int kPolynomialEvery = kHeadDimQK == 64 && kConsumers == 3 ? 4 : 0;

  // How many tanh ptxas may begin with, and whether a warp looks for scores that are all near. (Otherwise it would
  // serialise the products of one kernel or another.)
  static constexpr int kCapsAtATime = kHeadDimVO > 128 ? 8 : 4;
  static constexpr bool kLooksForNear = !(kPacked && kHeadDimQK == 192 && kMask == MaskClass::Window);
  using Cap = cute::conditional_t<kModified, Fp8Cap, Fp8NoCap>;
  static constexpr Modifiers kModifiers = kModified ? Modifiers::Always : Modifiers::Never;
  static_assert(!kModified || (kScores == Scores::F32 && kMask != MaskClass::Full), "see softcap.hpp");

  // Whether plans may split the last tiles (split.hpp): where a tile takes long beside what a split costs, in rows that
  // plans choose for long sequences. Three consumers at head dim 192/128 would spill, and ptxas would serialise the
  // products of a row of head dim 256.
  static constexpr bool kSplits = !kPacked && kMask == MaskClass::Full && kHeadDimVO == 128 &&
                                  (kConsumers == 3 ? kHeadDimQK == 128 : kScores == Scores::F32);

  // Whether the next tile's scores have to wait until O is written: partial sums, or all of a wide O, pass through more
  // registers than are left beside them. (So do a packed tile's lengths under a mask at head dim 192/128.)
  static constexpr bool kScoresWait = kSplits || kHeadDimVO > 128 ||
                                      (kPacked && kHeadDimQK > 128 && kMask != MaskClass::Full);

  // Whether lists in memory say which blocks a tile visits (sm90/listed.hpp).
  static constexpr bool kIsListed = kMask == MaskClass::Blocks;
  static_assert(!kIsListed || (kTileM == kListedBlock && kScores == Scores::F32), "the lists are of such blocks");
  // Whether this is the kernel for sequences whose lengths the device knows, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  // Packed sequences with a cap take the rows of class Window: ptxas would serialise the products of another one. And
  // full masks at head dim 192/128 take those of class Causal. A packed kernel of class Full cannot look first there
  // (kLooksFirst), as the dense one does, and its bits would be others.
  static constexpr bool kPacks = kConsumers == 2 && kScores == Scores::F32 && !kIsListed &&
                                 !(kModified && kMask != MaskClass::Window) &&
                                 !(kMask == MaskClass::Full && kHeadDimQK == 192);
  using Packed = Fp8Traits<kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, kScores, kModified, true>;
  using PlainParams = cute::conditional_t<kPacked, PackedFp8KernelParams,
                                          cute::conditional_t<kIsListed, ListedFp8KernelParams, Fp8KernelParams>>;
  using Params = cute::conditional_t<kModified, CappedParams<PlainParams>, PlainParams>;
  using PlainTile = cute::conditional_t<kPacked, PackedTile, Tile>;
  using TileRecord = cute::conditional_t<kIsListed, ListedTile, PlainTile>;
  using Scheduler = cute::conditional_t<kPacked, PackedScheduler, Fp8Scheduler>;
  using Leak = Fp8Leak<PlainTile>;
  using TileBand = cute::conditional_t<kPacked, Band, Band const&>;  // the launch's, or a copy that changes by tile

  // Whether this kernel's CTAs share tiles, and the most CTAs that may share one: 8 is the largest cluster that a
  // kernel may have without asking for more. A row has a second kernel for that (shares.hpp).
  //
  // That is for launches of few tiles. They are short, so that checking the range of scores in f16, and the launch
  // behind, cost more than f16 brings: only rows with scores in f32 have it.
  static constexpr bool kShares = false;
  static constexpr int kMostShares =
      !kPacked && !kModified && !kIsListed && kScores == Scores::F32 && kMask != MaskClass::Window && kHeadDimQK <= 128
          ? 8
          : 1;

  // Whether a warp whose references have moved looks at the maximum of each later block first (softmax.hpp). Where
  // scores are far apart that is 2 to 4 times as fast. In the other rows it costs other inputs 4 to 17%: its branch
  // keeps exponentials from starting between the waits for the two products (benches/LOG.md, 37).
  static constexpr bool kLooksFirst = kMask == MaskClass::Full && kHeadDimVO >= 128;
  // Whether it goes on looking where the sum of its first row is NaN. Above head dim 128 that takes a register more,
  // for which ptxas serialises the products.
  static constexpr bool kNanLooks = kLooksFirst && kHeadDimVO <= 128;

  static constexpr int kBuffersQ = 2;
  static constexpr int kStagesRaw = 2;    // of V as it is loaded: kKeysRaw keys each
  static constexpr int kTransposers = 2;  // warps

  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));

  // The key blocks that a CTA visits of a tile.
  CUTE_DEVICE static KeyVisits visits_of(Band const& band, int m_block, Piece const& piece) {
    if constexpr (kIsListed) {
      return visits_of_list<kTileN>(piece.masked(), piece.total());
    }
    KeyVisits visits = KeyVisits::of<kMask, kTileM, kTileN>(band, m_block);
    if constexpr (kSplits) {
      visits.keep_piece(piece.cut);
    }
    if constexpr (kPacked) {
      visits.keep_one();
    }
    return visits;
  }

  // The band of a tile. `launch`: that of the launch.
  CUTE_DEVICE static TileBand tile_band(Params const& params, Band const& launch, PlainTile const& tile) {
    if constexpr (kPacked) {
      return band_of_tile(params, tile);
    } else {
      return launch;
    }
  }

  // This thread's number in its warpgroup, and among all consumers. Read anew at each call: registers are short.
  CUTE_DEVICE static int thread_index() { return thread_index_anew() % 128; }
  CUTE_DEVICE static int consumer_thread_index() { return thread_index_anew() - 128; }

  using Score = cute::conditional_t<kScores == Scores::F16, cutlass::half_t, float>;
  using MmaQK = Wgmma<Element, Score, kTileN>;
  // P V is computed in kParts parts of columns, one after the other, in the same registers: three consumers have 160
  // each. (A packed kernel has a tile's lengths in registers, and would spill.) The last part has the rows of ones.
  // Above head dim 128 it has nothing else: beside O and a block's scores there is no room for more.
  static constexpr bool kOnesAlone = kHeadDimVO > 128;
  static constexpr int kParts = kOnesAlone         ? kHeadDimVO / 64 + 1
                                : kHeadDimVO == 64 ? 1
                                : kConsumers == 3  ? 3
                                : kPacked          ? 2
                                                   : 1;
  static constexpr int kPartColumns = kOnesAlone ? 64 : (kHeadDimVO / kParts + 15) / 16 * 16;
  // Whether O is to lie where it was before, as the loop over key blocks begins. (In the one row where it is not, ptxas
  // moves nothing, and would serialise the products otherwise.)
  static constexpr bool kPinsOutput =
      kParts > 1 && !(kOnesAlone && kMask == MaskClass::Causal && kScores == Scores::F16);
  template <int kPart>
  static constexpr int kPartRows = kPart == kParts - 1 ? kRowsVt - kPart* kPartColumns : kPartColumns;
  static constexpr int kElementsPart = cute::max(kPartRows<0>, kPartRows<kParts - 1>) / 2;
  template <int kPart>
  using MmaPV = Wgmma<Element, float, kPartRows<kPart>>;
  using SmemQ = SmemOperand<KMajorTile<Element, kTileM, kHeadDimQK, kSlabQK>>;
  using SmemK = SmemOperand<KMajorTile<Element, kTileN, kHeadDimQK, kSlabQK>>;
  using SmemVt = SmemOperand<KMajorTile<Element, kRowsVt, kTileN, kTileN>>;

  static constexpr std::uint32_t kBytesQ = kTileM * kHeadDimQK;
  static constexpr std::uint32_t kBytesK = kTileN * kHeadDimQK;
  static constexpr std::uint32_t kBytesV = kKeysRaw * kHeadDimVO;  // of a stage as it is loaded
  static constexpr std::uint32_t kBytesVt = kTileN * kRowsVt;

  struct SharedStorage : Fp8PackedStorage<kPacked, 4 * kConsumers>, EntryStorage<kIsListed ? kStages : 0, kTileN> {
    alignas(1024) Element q[kBuffersQ][kBytesQ];
    alignas(1024) Element k[kStages][kBytesK];
    alignas(1024) Element vt[kStages][kBytesVt];
    alignas(1024) Element v[kStagesRaw][kBytesV];
    TileRecord tile[kBuffersQ];
    Piece piece[kBuffersQ];                     // of that tile
    Segment segment;                            // of warp 1 alone
    BlockFactors factors[kStages][kConsumers];  // with K
    float largest_v[kBuffersQ];                 // factor of V of the tile's head
    Leak leak[4 * kConsumers];                  // of each warp
    Mbarrier tile_full[kBuffersQ];
    Mbarrier tile_empty[kBuffersQ];
    Mbarrier q_full[kBuffersQ];
    Mbarrier k_full[kStages];
    Mbarrier k_empty[kStages];
    Mbarrier v_full[kStagesRaw];
    Mbarrier v_empty[kStagesRaw];
    Mbarrier vt_full[kStages];
    Mbarrier vt_empty[kStages];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448);
};

// The traits of a row's kernel in which the CTAs of a cluster share a tile's keys (shares.hpp).
template <class Row>
struct Fp8SharedTraits : SharedTraits<Row> {
  static constexpr bool kSplits = false;
  static_assert(Row::kScores == Scores::F32 && !Row::kIsPacked && Row::kParts == 1);

  // The key blocks that this CTA visits of a tile. There may be none.
  CUTE_DEVICE static KeyVisits visits_of(Band const& band, int m_block, Piece const&) {
    KeyVisits visits = KeyVisits::of<Row::kMask, Row::kTileM, Row::kTileN>(band, m_block);
    visits.keep_share(cluster_share(), cluster_shares());
    return visits;
  }
};

CUTE_DEVICE float const& factor(TensorDesc const& factors, int batch, int head, int block) {
  return reinterpret_cast<float const*>(
      factors.address)[batch * factors.stride_batch + head * factors.stride_head + block * factors.stride_row];
}

// The index of a sequence's first factor per block, of Q and of K and V. (Where factors are not per block, strides are
// 0.)
CUTE_DEVICE int first_factor_q(Fp8KernelParams const&, Tile const&) { return 0; }
CUTE_DEVICE int first_factor_kv(Fp8KernelParams const&, Tile const&) { return 0; }
CUTE_DEVICE int first_factor_of(int begin, int apart, int sequence) {
  return static_cast<int>((static_cast<unsigned>(begin) + std::uint64_t{static_cast<unsigned>(apart)} * sequence) /
                          128);
}
CUTE_DEVICE int first_factor_q(PackedFp8KernelParams const& params, PackedTile const& tile) {
  return first_factor_of(tile.q_begin, params.factors_apart_q, tile.batch);
}
CUTE_DEVICE int first_factor_kv(PackedFp8KernelParams const& params, PackedTile const& tile) {
  return first_factor_of(tile.kv_begin, params.factors_apart_kv, tile.batch);
}

}  // namespace hattn::sm90
