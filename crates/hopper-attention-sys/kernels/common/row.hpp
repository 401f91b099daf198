// One line of a list of kernels (*.def): the row that it becomes, and the words for what kernels work on.
//
// A row has one function, which describes it. The row's own translation unit (a *unit*) defines the function
// (HATTN_INSTANCE in launch.hpp). The launch table calls it (table.cc).
//
// Each of these words means one thing in all kernels:
//
// - *row*: one compiled kernel, a row of a launch table. Also a row of a tensor or a matrix: a query, or a key.
// - *column*: of a list, such as `dtype` or `tile_m`. Also a column of a matrix.
// - *CTA*: a thread block.
// - *tile*: what a CTA computes at a time. Forward: tile_m queries of a query head. Backward: tile_n keys of a key
//   head.
// - *block*: what a tile visits, one after the other (visits.hpp). Forward: tile_n keys. Backward: tile_m queries.
// - *chunk*: some of a block's rows, where a warp takes a block in several steps.
// - *step*: one visit of a block (backward), in one query head.
// - *share*: some of a tile's work, where several CTAs work on it, or two warpgroups (sm90/fwd/shares.hpp,
//   sm90/fp8/shares.hpp, sm90/bwd/share.hpp).
// - *way*: which of two warpgroups that share a tile's keys (sm90/fwd).
// - *strip*: 16 rows of a warp, the height of an mma.sync product.
// - *part*: some of the columns of a product, where registers do not hold all of them (sm90/fp8).
// - *stage*: a buffer of a ring through which blocks pass.
// - *turn*: the right to issue products, which warpgroups pass around (sm90/turns.hpp). Nothing else is a turn.
// - *ordered*: said of a backward in which tiles add to dQ in the order of their numbers (deterministic).
// - *statistics*: what the kernel before the backward kernel makes of a query's LSE and delta.
// - *prepare*: load kernels ahead of their first launch.
// - *issue*: start an asynchronous product of a warpgroup.
// - *multiply*: run all instructions of a product.
#pragma once

#include "kernels.hpp"

// The name of a row's function. `list` is ARCH_PASS. (Rows of fp8.def have more columns, and a macro of their own.)
#define HATTN_ROW(list, dtype, mask, dqk, dvo, tile_m, tile_n, stages, ...) \
  row_##list##_##dtype##_##mask##_##dqk##_##dvo##_##tile_m##_##tile_n##_##stages##_##__VA_ARGS__

namespace hattn {

// The columns of a line, as the base of a kernel's traits.
//
// A traits template names its own parameters like these constants. Inside it the parameters are found, outside
// (Traits::kTileM) the constants.
template <Arch kArchOfRow, DType kDTypeOfRow, MaskClass kMaskOfRow, int kDimQK, int kDimVO, int kRows, int kColumns,
          int kStageCount, Scores kScoresOfRow = Scores::F32>
struct RowTraits {
  static constexpr Arch kArch = kArchOfRow;
  static constexpr DType kDType = kDTypeOfRow;
  static constexpr MaskClass kMask = kMaskOfRow;
  static constexpr int kHeadDimQK = kDimQK;
  static constexpr int kHeadDimVO = kDimVO;
  static constexpr int kTileM = kRows;     // queries of a tile (forward) or of a block (backward)
  static constexpr int kTileN = kColumns;  // keys of a block (forward) or of a tile (backward)
  static constexpr int kStages = kStageCount;
  static constexpr Scores kScores = kScoresOfRow;
  static constexpr int kMostShares = 1;     // CTAs of a cluster that may share a tile (sm90)
  static constexpr bool kIsPacked = false;  // whether these are the traits of that kernel
  static constexpr bool kPacks = false;     // whether the row has a kernel for sequences whose lengths the device knows
  static constexpr Modifiers kModifiers = Modifiers::Never;
  static constexpr bool kTakesDropout = false;  // whether the row takes dropout
  static constexpr bool kDrops = false;         // whether these are the traits of a kernel that does
  // Whether the row takes an additive bias, for which it has a kernel of its own, and whether these are its traits.
  static constexpr bool kTakesBias = false;
  static constexpr bool kAddsBias = false;
};

// Of a row's kernel for problems with an additive bias. They may have dropout, too.
template <class Traits>
struct BiasTraits : Traits {
  static constexpr bool kAddsBias = true;
  static constexpr bool kDrops = Traits::kTakesDropout;
};

// A row's description, from its traits.
template <class Traits>
constexpr RowInfo row_info() noexcept {
  RowInfo info{};
  info.arch = Traits::kArch;
  info.dtype = Traits::kDType;
  info.mask = Traits::kMask;
  info.head_dim_qk = Traits::kHeadDimQK;
  info.head_dim_vo = Traits::kHeadDimVO;
  info.tile_m = Traits::kTileM;
  info.tile_n = Traits::kTileN;
  info.stages = Traits::kStages;
  info.threads = Traits::kThreads;
  info.smem_bytes = Traits::kSmemBytes;
  info.scores = Traits::kScores;
  info.most_shares = Traits::kMostShares;
  info.packs = Traits::kPacks;
  info.modifiers = Traits::kModifiers;
  info.drops = Traits::kTakesDropout;
  info.adds_bias = Traits::kTakesBias;
  if constexpr (Traits::kPacks && Traits::kTakesDropout) {
    info.drops_packed = Traits::Packed::kTakesDropout;
  }
  if constexpr (Traits::kPacks && Traits::kTakesBias) {
    info.adds_bias_packed = Traits::Packed::kTakesBias;
  }
  return info;
}

}  // namespace hattn
