// Everything that a row of fp8.def fixes: tiles, register budget and the shared-memory plan.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "common/barrier.hpp"
#include "common/mask.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

// Four f32 to e4m3, the first lowest.
CUTE_DEVICE std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  std::uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// No number in either half.
constexpr std::uint32_t kNoPair = 0x7fff7fffU;

// What the factors of a block of keys come to for a warpgroup's queries, once for all its threads.
struct alignas(16) BlockFactors {
  float unit;               // what a product of stored values is multiplied by to be a score, in powers of two
  std::uint32_t unit_pair;  // the same as a pair of f16, kNoPair where f16 does not go so far
  float ratio_v;            // descale_v / the largest descale_v of the head
  float unused;
};

// What a CTA computes of a tile (share.hpp).
struct alignas(8) Part {
  int cut;   // 0: all keys; above 0: those from that block on; below 0: those before block -cut
  int sums;  // 0: nobody has others; 1 + the slot where those below are found; -1 - the slot where they are left
};

// What a CTA has still to compute of the tiles that are shared out.
struct Stretch {
  std::uint32_t position;  // in units, from the first of those tiles
  std::uint32_t left;
  int slot;
};

template <MaskClass kMaskClass, int kDimQK, int kDimVO, int kRows, int kColumns, int kStageCount, Scores kScoresType>
struct Fp8Traits {
  static constexpr MaskClass kMask = kMaskClass;
  static constexpr Scores kScores = kScoresType;
  static constexpr int kHeadDimQK = kDimQK;
  static constexpr int kHeadDimVO = kDimVO;
  static constexpr int kTileM = kRows;
  static constexpr int kTileN = kColumns;
  static constexpr int kStages = kStageCount;
  using Element = cutlass::float_e4m3_t;

  static constexpr int kConsumers = kTileM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kConsumers == 2 || kConsumers == 3);
  static_assert(kDimQK == kDimVO && (kDimQK == 64 || kDimQK == 128), "rows of 64 or 128 bytes");

  static constexpr int kScaleBlock = 128;  // rows that share a factor where factors are of blocks
  static_assert(kTileN == kScaleBlock, "a block of keys has one factor, and a row of V^T is 128 bytes");

  // V^T has eight more rows, of ones: their products are the sums of the rounded weights.
  static constexpr int kRowsVt = kDimVO + 8;
  // Measured (benches/LOG.md, 23): turns at issuing products, where all tiles are of one length; exponentials of so
  // many 8 columns ahead of their multiply-adds (weights.hpp), 0 leaves it to ptxas; loads of V before the first store
  // of V^T.
  static constexpr bool kTurns = kMask == MaskClass::Full && kConsumers == 2;
  static constexpr int kColumnsAhead = kDimQK == 128 ? 2 : 0;
  static constexpr int kTransposeBatch = kDimQK == 128 && kConsumers == 2 && !kTurns ? 2 : 1;
  // Of so many times 8 columns the last 8 are exponentiated by a polynomial (weights.hpp), 0: none. The exponentials'
  // unit is what limits three consumers at head dim 64, and no others (benches/LOG.md, 27).
  static constexpr int kPolynomialEvery = kDimQK == 64 && kConsumers == 3 ? 4 : 0;

  // Whether the last tiles are shared out (share.hpp): where a tile takes long beside what that costs, in rows that
  // plans choose for long sequences.
  static constexpr bool kShares =
      kMask == MaskClass::Full && kDimVO == 128 && (kConsumers == 3 || kScores == Scores::F32);

  static constexpr int kBuffersQ = 2;
  static constexpr int kStagesRaw = 2;    // of V as it is loaded
  static constexpr int kTransposers = 2;  // warps

  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));

  // The key blocks of a part of a tile.
  CUTE_DEVICE static BlockRange blocks_of(Band const& band, int m_block, Part const& part) {
    BlockRange range = block_range<kMask, kTileM, kTileN>(band, m_block);
    if constexpr (kShares) {
      range.begin = cute::max(part.cut, 0);
      range.end = part.cut < 0 ? -part.cut : range.end;
    }
    return range;
  }

  // This thread's place in its warpgroup, read anew at each call: what depends on it is needed seldom, and registers
  // are short in between.
  CUTE_DEVICE static int thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
  }
  // Likewise among all consumers.
  CUTE_DEVICE static int consumer_thread_index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - 128;
  }

  using Score = cute::conditional_t<kScores == Scores::F16, cutlass::half_t, float>;
  using MmaQK = Wgmma<Element, Score, kTileN>;
  // P V in so many parts of columns, one after the other, whose sums share registers: three consumers have 160 each.
  // The last part has the rows of ones.
  static constexpr int kParts = kConsumers == 3 && kDimVO == 128 ? 3 : 1;
  static constexpr int kPartColumns = (kDimVO / kParts + 15) / 16 * 16;
  template <int kPart>
  static constexpr int kPartRows = kPart == kParts - 1 ? kRowsVt - kPart* kPartColumns : kPartColumns;
  static constexpr int kElementsPart = cute::max(kPartRows<0>, kPartRows<kParts - 1>) / 2;
  template <int kPart>
  using MmaPV = Wgmma<Element, float, kPartRows<kPart>>;
  using SmemQ = SmemOperand<KMajorTile<Element, kTileM, kHeadDimQK, kHeadDimQK>>;
  using SmemK = SmemOperand<KMajorTile<Element, kTileN, kHeadDimQK, kHeadDimQK>>;
  using SmemVt = SmemOperand<KMajorTile<Element, kRowsVt, kTileN>>;

  static constexpr std::uint32_t kBytesQ = kTileM * kHeadDimQK;
  static constexpr std::uint32_t kBytesK = kTileN * kHeadDimQK;
  static constexpr std::uint32_t kBytesV = kTileN * kHeadDimVO;
  static constexpr std::uint32_t kBytesVt = kTileN * kRowsVt;

  struct SharedStorage {
    alignas(1024) Element q[kBuffersQ][kBytesQ];
    alignas(1024) Element k[kStages][kBytesK];
    alignas(1024) Element vt[kStages][kBytesVt];
    alignas(1024) Element v[kStagesRaw][kBytesV];
    Tile tile[kBuffersQ];
    Part part[kBuffersQ];                       // of that tile
    Stretch stretch;                            // warp 1's alone
    BlockFactors factors[kStages][kConsumers];  // with K
    float largest_v[kBuffersQ];                 // factor of V of the tile's head
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

using Fp8Scheduler = TileScheduler<false>;

// What the kernel reads: maps for the copy engine and the plain numbers.
struct Fp8KernelParams {
  TensorDesc o;
  DType output;          // of O
  float const* scale_o;  // what O is multiplied by before it is rounded, or null
  unsigned* amax;        // the bits of the largest magnitude of O, or null
  float* lse;
  std::int64_t lse_stride_batch;
  std::int64_t lse_stride_head;
  FactorsDesc descale_q;
  FactorsDesc descale_k;
  FactorsDesc descale_v;
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
  int shared_tiles;   // at the end of the list, which CTAs share out (share.hpp); 0: none
  int shared_units;   // that each takes of them
  int shared_longer;  // so many of the first stretches are of one unit more
  float scale_log2;   // softmax_scale * log2(e)
};

CUTE_DEVICE float const& factor(FactorsDesc const& factors, int batch, int head, int block) {
  return reinterpret_cast<float const*>(
      factors.address)[batch * factors.stride_batch + head * factors.stride_head + block * factors.stride_block];
}

}  // namespace hattn::sm90
