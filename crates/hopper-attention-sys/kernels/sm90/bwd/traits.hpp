// Everything that a row of bwd.def fixes: types, tiles, register budget and the shared-memory plan.
#pragma once

#include <cuda.h>

#include <cute/arch/cluster_sm90.hpp>
#include <type_traits>

#include "common/around.hpp"
#include "common/barrier.hpp"
#include "common/blocks.hpp"
#include "common/row.hpp"
#include "common/scalars.hpp"
#include "common/slab.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"
#include "sm90/bwd/alibi.hpp"
#include "sm90/bwd/listed.hpp"
#include "sm90/bwd/share.hpp"
#include "sm90/element.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

// x as a sum of three terms, each half an ulp of the one before at most: 24 bits. The terms of an infinity are finite,
// and their sum is infinite. Those of a NaN are, too.
CUTE_DEVICE void split(float x, cutlass::bfloat16_t (&terms)[3]) {
  constexpr float kMost = 3.38e38F;
  bool const finite = fabsf(x) < kMost;
  float const whole = finite ? x : x < 0.0F ? -kMost : kMost;
  float rest = whole;
  CUTE_UNROLL
  for (cutlass::bfloat16_t& term : terms) {
    term = cutlass::bfloat16_t{finite ? rest : whole};
    rest -= static_cast<float>(term);
  }
}

// What the kernel keeps of a query. S and dP begin with these numbers in place of 0, so that no thread has to subtract
// them: S with -LSE divided by the scale, dP with -delta. The tensor cores add them, as one more k-step of the product,
// whose operands have 16 bits. So each number is a sum of three terms, 24 bits (SmemOnes below). A query without keys
// gets a number so low that its P is 0: not -inf, which would make NaN of the zeros that it meets. A delta that is no
// number would do the same to S. It becomes infinite in dP, which is enough for the kernel after this one to see it,
// and `nan_delta` tells that it was NaN (common/leak_bwd.hpp).
//
// Where scores are modified, tanh must see the product of Q and K alone (common/softcap.hpp), and a bias is exact in
// f32 alone. Then S begins with 0, and threads subtract the LSE: -LSE in powers of two is there as the bits of an f32,
// the higher half in the first place and a byte in each of the two others. So no place is NaN or infinity beside the
// zeros that dP has for it. With ALiBi alone S begins with the query's part of the bias, too (alibi.hpp).
struct alignas(16) Statistics {
  cutlass::bfloat16_t minus_lse[3];
  cutlass::bfloat16_t minus_delta[3];
  cutlass::bfloat16_t nan_delta;  // 0 or 1. The products multiply it with 0.
  cutlass::bfloat16_t zero;

  // `start_bias`: what S begins with beside -LSE (0 where scores are modified).
  CUTE_DEVICE static Statistics of(float lse, float d_lse, float delta, float softmax_scale, bool modified,
                                   float start_bias) {
    constexpr float kFar = -3e38F;
    Statistics statistics{};
    float start = kFar;
    if (lse != -INFINITY) {
      start = modified ? -lse * kLog2E : __fdiv_rn(-lse, exponent_scale(softmax_scale)) + start_bias;
      start = start < kFar ? kFar : start;  // which keeps a NaN
      split(d_lse - delta, statistics.minus_delta);
      statistics.nan_delta = cutlass::bfloat16_t{isnan(d_lse - delta) ? 1.0F : 0.0F};
    }
    if (modified) {
      std::uint32_t const bits = __float_as_uint(start > -kFar ? -kFar : start);
      statistics.minus_lse[0] = cutlass::bfloat16_t::bitcast(static_cast<std::uint16_t>(bits >> 16));
      statistics.minus_lse[1] = cutlass::bfloat16_t::bitcast(static_cast<std::uint16_t>(bits >> 8 & 0xff));
      statistics.minus_lse[2] = cutlass::bfloat16_t::bitcast(static_cast<std::uint16_t>(bits & 0xff));
    } else {
      split(start, statistics.minus_lse);
    }
    if (isnan(start)) {
      statistics.minus_lse[0] = cutlass::bfloat16_t{start};
    }
    return statistics;
  }

  CUTE_DEVICE static float sum(cutlass::bfloat16_t const (&terms)[3]) {
    return static_cast<float>(terms[0]) + static_cast<float>(terms[1]) + static_cast<float>(terms[2]);
  }
  // -LSE in powers of two, where scores are modified: of the first four places.
  CUTE_DEVICE static float joined(std::uint32_t first_two, std::uint32_t other_two) {
    return __uint_as_float(__byte_perm(first_two, other_two, 0x1024));
  }
  // P of a pair, from the product of Q and K, or from what modifiers make of it.
  CUTE_DEVICE float weight(float s, float scale_log2, bool modified) const {
    if (modified) {
      auto const* const words = reinterpret_cast<std::uint32_t const*>(minus_lse);
      return exp2_approx(fmaf(s, scale_log2, joined(words[0], words[1])));
    }
    return exp2_approx((s + sum(minus_lse)) * scale_log2);
  }
  CUTE_DEVICE float negative_delta() const { return sum(minus_delta); }
  // delta of the statistics at an address of shared memory.
  CUTE_DEVICE static float read_delta(std::uint32_t address) {
    std::uint32_t first;  // the first term is its higher half
    std::uint32_t others;
    asm volatile("ld.shared.b32 %0, [%1 + 4];" : "=r"(first) : "r"(address) : "memory");
    asm volatile("ld.shared.b32 %0, [%1 + 8];" : "=r"(others) : "r"(address) : "memory");
    return -(__uint_as_float(first & 0xffff0000U) + __uint_as_float(others << 16) +
             __uint_as_float(others & 0xffff0000U));
  }
  // Whether the LSE is -inf (or inf): no weights.
  CUTE_DEVICE bool is_empty() const { return static_cast<float>(minus_lse[0]) <= -2.9e38F; }
  CUTE_DEVICE bool has_nan_lse() const { return isnan(static_cast<float>(minus_lse[0])); }
  CUTE_DEVICE bool has_nan() const { return has_nan_lse() || static_cast<float>(nan_delta) != 0.0F; }
};

// Of a backward whose sequences have lengths that the device knows.
struct PackedBwdScalars : BwdScalars {
  SequenceTable table;
  int sum_blocks;  // of one head, that have sums of dQ
  // Rows from a batch entry to the next, of each operand: 0 where it is packed.
  int rows_apart_q;
  int rows_apart_k;
  int rows_apart_v;
  int rows_apart_d_o;
  int rows_apart_statistics;
  // Of the statistics, which are rows of 16 bytes.
  CUtensorMap map_statistics;
};

template <class Traits>
PackedBwdScalars packed_bwd_scalars(BwdParams const& params) noexcept {
  PackedBwdScalars scalars{};  // the map is made by the launch
  static_cast<BwdScalars&>(scalars) = bwd_scalars<Traits>(params);
  scalars.table = {params.sequences.table, params.batch};
  scalars.tile_counter = &scalars.table.header()->counter;
  scalars.sum_blocks = params.sequences.sum_blocks;
  scalars.rows_apart_q = rows_apart(params.q);
  scalars.rows_apart_k = rows_apart(params.k);
  scalars.rows_apart_v = rows_apart(params.v);
  scalars.rows_apart_d_o = rows_apart(params.d_o);
  scalars.rows_apart_statistics = statistics_rows_apart(params);
  return scalars;
}

// How far the sums of dQ of a block are, as a count. The kernel before writes what it begins with (BwdTraits::fresh),
// the tiles what follows.
// - Unordered: the tiles that have come to the block, and kStored more once the first of them has stored its dQ.
// - Ordered: the number of the tile that may add next, and kFresh more until the first tile has stored its dQ.
// - kUnvisited: no tile visits the block.
using Progress = int;
constexpr Progress kStored = 1 << 30;
constexpr Progress kFresh = 1 << 30;
static_assert(kUnvisited == -kFresh);

// A block of queries and a tile of keys, in a query head.
struct alignas(16) DrawnBlock {
  int m_block;
  int n_block;  // below 0: there are no more
  int head;     // of all batch entries
};

// kPacked: of a row's kernel for sequences whose lengths the device knows (common/sequences.hpp). kModified: of a row
// for modified scores.
template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages,
          bool kPacked = false, bool kModified = false>
struct BwdTraits : RowTraits<Arch::Sm90, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;
  // Whether lists in memory say which blocks a tile visits (listed.hpp).
  static constexpr bool kIsListed = kMask == MaskClass::Blocks;
  static_assert(!kIsListed || (kTileN == kListedBlock && kListedBlock % kTileM == 0), "the lists are of such blocks");
  // What does not depend on the mask is taken of these. (Lists are a mask of which it depends.)
  static constexpr MaskClass kUnmasked = kIsListed ? MaskClass::Blocks : MaskClass::Full;
  using Unmasked = BwdTraits<kDType, kUnmasked, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, kPacked>;
  // What the kernels around do not depend on, either.
  using Plain = BwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, kPacked>;
  using Statistics = sm90::Statistics;
  static constexpr Modifiers kModifiers = kModified ? Modifiers::Always : Modifiers::Never;
  static constexpr bool kTakesDropout = kModified;
  static constexpr bool kDrops = kModified;
  // Whether the row, or the row with modified scores beside it, has a kernel in which a warpgroup draws dropout's
  // numbers (DrawingTraits), whether these are its traits, and whether it computes a problem.
  static constexpr bool kMayDraw = !kIsListed && !kPacked && kHeadDimQK > 64;
  static constexpr bool kDraws = false;
  CUTE_HOST_DEVICE static bool is_drawn(BwdParams const& params) {
    return kMayDraw && has_dropout(params) && params.softcap == 0.0F && params.alibi.address == 0 &&
           !has_bias(params) && params.cluster <= 1;
  }
  // The same of a kernel for ALiBi alone (AlibiTraits).
  static constexpr bool kMayBeAlibi = !kIsListed;
  static constexpr bool kIsAlibi = false;
  CUTE_HOST_DEVICE static bool is_alibi(BwdParams const& params) {
    return kMayBeAlibi && has_alibi_alone(params) && params.cluster <= 1;
  }
  // In that kernel S of a query begins with the bias of so many keys, beside -LSE. `query` may be past the end. The
  // sequence has `keys`, and its query 0 stands at `diagonal`.
  CUTE_DEVICE static int start_distance(BwdParams const& params, int batch, int head, int query, int diagonal,
                                        int keys) {
    if (!is_alibi(params) || !alibi_falls_apart_by_query(alibi_slope_log2(params.alibi, batch, head))) {
      return 0;
    }
    return query % kTileM + alibi_gap<kTileM>(query / kTileM * kTileM + diagonal, keys);
  }
  // Whether S begins with 0 (Statistics).
  CUTE_HOST_DEVICE static bool modifies_scores(BwdParams const& params) {
    return has_modifiers(params) && !is_drawn(params) && !is_alibi(params);
  }
  static constexpr bool kMayTakeBias = !kIsListed || kHeadDimQK == 128;
  // With any mask. With lists that of head dim 64 would spill; that of 128 takes its problems.
  static constexpr bool kTakesBias = kMayTakeBias && kModified && (kMask == MaskClass::Window || kIsListed);
  static constexpr int kBiasAtATime = 4;  // columns of a bias that are read at a time

  // Whether this is that kernel, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  static constexpr bool kPacks = !kIsListed;
  using Packed = BwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, true, kModified>;
  using Scalars = std::conditional_t<kPacked, PackedBwdScalars, BwdScalars>;
  using TileRecord = std::conditional_t<kPacked, PackedShare, TileShare>;
  using TileBand = std::conditional_t<kPacked, Band, Band const&>;  // the launch's, or a copy that changes by tile

  // The first tile stores its dQ over what is there, and does not add.
  static constexpr bool kAddsToZeros = false;
  static constexpr bool kWritesQueries = true;
  static constexpr bool kTakesShares = true;
  static constexpr bool kOverlaps = true;
  // Whether the CTAs of a cluster share a tile, and the most that may. A row has a second kernel for that (share.hpp).
  // 8 is the largest cluster that a kernel may have without asking for more.
  static constexpr bool kShares = false;
  static constexpr int kMostShares = kIsListed ? 1 : 8;
  CUTE_DEVICE static void write_shares(BwdParams const& params, Band const& band, int thread, int threads) {
    if constexpr (kPacked) {
      write_packed_shares<BwdTraits>(params, thread, threads);
    } else if constexpr (kIsListed) {
      write_listed_shares<BwdTraits>(params, thread, threads);
    } else {
      sm90::write_shares<BwdTraits>(params, band, thread, threads);
    }
  }
  CUTE_DEVICE static Progress fresh(bool ordered, int first_tile) { return ordered ? kFresh + first_tile : 0; }

  // A consumer warpgroup owns 64 keys of the tile; one more warpgroup feeds them.
  static constexpr int kConsumers = kTileN / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kWarps = 4 * kConsumers;
  static_assert(kConsumers == 2, "the reduction of dQ is split in two");
  static_assert(kTileM == 64 || kTileM == 128, "dQ is split by columns or by rows");
  static_assert(kHeadDimQK % kSlabColumns == 0 && kHeadDimVO % kSlabColumns == 0, "tiles are made of slabs");

  // K of a tile and of the next one; V is read for the last time early in a tile's last block.
  static constexpr int kBuffersK = 2;
  // Of dQ: a half of each consumer warpgroup.
  static constexpr int kSlotsQ = 2;

  static constexpr int kProducerRegisters = kIsListed ? 40 : 24;
  static constexpr int kConsumerRegisters = kIsListed ? 232 : 240;
  // A CTA is never granted more registers than it was launched with.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));

  // S^T and dP^T: a warpgroup's keys by all queries of the block.
  using MmaScores = Wgmma<Element, float, kTileM>;
  // What S and dP begin with: -LSE and -delta of each query, in three bf16 terms each, times ones. The 16 columns of
  // this product are the 8 terms of a query, twice over, of which the ones pick three.
  using MmaStatistics = Wgmma<cutlass::bfloat16_t, float, kTileM>;
  // Blocks of 8 x 8 terms are 128 bytes. Both halves of K are the same blocks.
  using SmemStatistics = SmemOperand<UnswizzledBlocks<0, 8, kTileM>>;
  // All 64 rows are the same eight, so that two blocks of 8 x 8 are the whole operand; and one is shared by both
  // products.
  using SmemOnes = SmemOperand<UnswizzledBlocks<8, 0, 8>>;
  // dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers.
  template <int kHeadDim>
  using MmaKeys = Wgmma<Element, float, kHeadDim>;
  // dQ of the block, dS K over the keys of both warpgroups: each makes half of it.
  static constexpr bool kSplitsColumns = kTileM == 64;
  static constexpr int kColumnsQ = kSplitsColumns ? kHeadDimQK / 2 : kHeadDimQK;
  using MmaQueries = Wgmma<Element, float, kColumnsQ>;

  // A tile as it is loaded, [row][column] in slabs of 64 columns, and the same memory read as [column][row].
  template <int kCount, int kHeadDim>
  using SmemRows = SmemOperand<KMajorTile<Element, kCount, kHeadDim>>;
  template <int kCount, int kHeadDim, int kRead = kHeadDim>
  using SmemColumns = SmemOperand<MnMajorTile<Element, kCount, kHeadDim, kRead>>;

  static constexpr int kElementsQ = kTileM * kHeadDimQK;
  static constexpr int kElementsO = kTileM * kHeadDimVO;
  static constexpr int kElementsK = kTileN * kHeadDimQK;
  static constexpr int kElementsV = kTileN * kHeadDimVO;
  static constexpr int kElementsS = kTileM * kTileN;
  static constexpr std::uint32_t kBytesStatistics = kTileM * sizeof(Statistics);
  static constexpr std::uint32_t kBytesQ = kElementsQ * sizeof(Element) + kBytesStatistics;
  static constexpr std::uint32_t kBytesO = kElementsO * sizeof(Element);
  static constexpr std::uint32_t kBytesK = kElementsK * sizeof(Element);
  static constexpr std::uint32_t kBytesV = kElementsV * sizeof(Element);

  // What a thread has of a block's sums, as the thread of the consumers had it.
  struct ThreadSums {
    static constexpr int kThreads = 256;
    static constexpr int kStrips = 1;
    static constexpr int kWidth = kColumnsQ;
    float4 fours[kElementsQ / 256 / 4];

    CUTE_DEVICE static int consumer() { return static_cast<int>(threadIdx.x) / 128; }
    CUTE_DEVICE static int row() {
      return (kSplitsColumns ? 0 : consumer() * 64) + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
    }
    CUTE_DEVICE static int column() { return kSplitsColumns ? consumer() * kColumnsQ : 0; }
    CUTE_DEVICE void load(float const* sums, std::int64_t block) {
      CUTE_UNROLL
      for (int i = 0; i < kElementsQ / 256 / 4; ++i) {
        fours[i] = reinterpret_cast<float4 const*>(
            sums)[block * (kElementsQ / 4) + consumer() * (kElementsQ / 8) + i * 128 + threadIdx.x % 128];
      }
    }
    CUTE_DEVICE float2 pair(int, int i, int j) const {
      float4 const four = fours[2 * i + j / 2];
      return j % 2 == 0 ? float2{four.x, four.y} : float2{four.z, four.w};
    }
  };

  // The sums of a tile's dV, and after them those of its dK, where its work has shares. Each lie as they lay in the
  // accumulators of the consumers: fours of neighbouring values, of each thread.
  struct KeySums {
    static constexpr int kThreads = 128 * kConsumers;
    static constexpr int kElements = kElementsV + kElementsK;
    CUTE_DEVICE static int offset(int four, int thread) { return 4 * (four * kThreads + thread); }
    CUTE_DEVICE static int row(int thread) { return thread / 32 * 16; }
  };

  struct Nothing {};
  // Of rows for modified scores.
  struct OfModifiers {
    std::uint32_t slope_or_head[kStages];  // packed: the slope of each block's query head; else that head
    int head[kPacked ? kStages : 1];       // packed: that head
  };
  // Of kernels in which a warpgroup draws. (It takes no more shared memory: there were bytes left.)
  struct OfDrawing {
    DrawnBlock block[kStages];  // what numbers are drawn for
    Mbarrier wanted[kStages];
    Mbarrier full[kStages];
  };
  // Of kernels for ALiBi alone.
  struct OfAlibi {
    int head[kStages];  // each block's query head
  };
  struct CommonStorage {
    alignas(1024) Element k[kBuffersK][kElementsK];
    alignas(1024) Element v[kElementsV];
    alignas(1024) Element q[kStages][kElementsQ];
    alignas(1024) Element d_o[kStages][kElementsO];
    alignas(1024) Element d_s[2][kElementsS];
    // Operands with strides of zero. memcheck takes them for as long as their shape says, so that more must follow.
    alignas(128) Statistics statistics[kStages][kTileM];
    alignas(128) cutlass::bfloat16_t ones[3][64];
    alignas(128) float d_q[kSlotsQ][kElementsQ / 2];
    TileRecord tile[kBuffersK];  // whose K is in each buffer
    TileRecord kept;             // packed: a copy of the tile whose dQ is being added
    Mbarrier tile_full[kBuffersK];
    Mbarrier next_wanted;
    Mbarrier k_full[kBuffersK];
    Mbarrier k_empty[kBuffersK];
    Mbarrier v_full;
    Mbarrier v_empty;
    Mbarrier q_full[kStages];
    Mbarrier block_empty[kStages];
    Mbarrier d_o_full[kStages];
    Mbarrier d_q_full[kSlotsQ];
    Mbarrier d_q_empty[kSlotsQ];
    Mbarrier sent_full[2];
    Mbarrier sent_empty[2];
    int sent_step[2];  // what is added to the progress of a block whose dQ was sent
    std::conditional_t<kModified, OfModifiers, Nothing> modifiers;
    std::conditional_t<kMayDraw && !kModified, OfDrawing, Nothing> drawing;
    std::conditional_t<kMayBeAlibi && !kModified, OfAlibi, Nothing> alibi;
  };
  struct ListedStorage : CommonStorage {
    ListedStep step[kStages];  // of the block whose Q is in each buffer
  };
  using SharedStorage = std::conditional_t<kIsListed, ListedStorage, CommonStorage>;
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "more shared memory than a CTA can have on sm_90");
};

// Of a kernel for dropout alone, in which a warpgroup draws the numbers (draw.hpp). Its scores are not modified. It is
// made of the traits of such a row. Consumers draw where they would have too few registers beside that warpgroup (at
// head dim 64, and of packed sequences), where scores are modified, where lists or a bias lie in the place of the
// numbers, and where the CTAs of a cluster share a tile.
template <class Traits>
struct DrawingTraits : Traits {
  static_assert(Traits::kMayDraw && Traits::kModifiers == Modifiers::Never);
  static constexpr bool kDrops = true;
  static constexpr bool kDraws = true;
  static constexpr int kThreads = 128 * (Traits::kConsumers + 2);
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kDrawerRegisters = 24;
  static_assert(Traits::kProducerRegisters + Traits::kConsumers * kConsumerRegisters + kDrawerRegisters <=
                65536 / kThreads / 8 * 8 * (Traits::kConsumers + 2));
};

// Of a kernel for ALiBi alone (alibi.hpp). It is made of the traits of a row whose scores are not modified, and begins
// S with more than -LSE.
template <class Traits>
struct AlibiTraits : Traits {
  static_assert(Traits::kMayBeAlibi && Traits::kModifiers == Modifiers::Never);
  static constexpr bool kIsAlibi = true;
};

}  // namespace hattn::sm90
