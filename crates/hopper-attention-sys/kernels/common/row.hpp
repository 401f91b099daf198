// What one line of a list of kernels fixes, and how a launch table describes it.
#pragma once

#include "kernels.hpp"

namespace hattn {

// The columns of a line, as the base of a kernel's traits.
//
// A scalars template names its own parameters like these constants. Inside it the parameters are found, outside
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
  return info;
}

}  // namespace hattn
