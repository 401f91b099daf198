// What a backward of class Blocks has beside the others: tiles of keys with lists of the blocks of queries that visit
// them (common/blocks.hpp).
//
// A tile's steps are the entries of its list in each query head of its group, one head after the other. Every thread
// looks a step up when its operands are loaded. A tile of 64 keys is half of a block of the lists, and reads its list.
// A tile without entries has no steps: the kernel before writes zeros as its dK and dV.
#pragma once

#include "common/blocks.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"

namespace hattn::sm80 {

// What the two blocks in shared memory are. An index is a stage.
struct StagedSteps {
  ListedStep step[2];
  int turn[2];   // how many tiles come to the block before this one, where they come in order
  int place[2];  // in the head's list
  int left[2];   // steps of that list, from this one on
  // While dQ of the block is still to be made: the same as `turn`, and the block of sums.
  int turn_of_sums[2];
  int block[2];
};

template <class Traits>
struct ListedSteps {
  static constexpr int kTilesOfBlock = kListedBlock / Traits::kTileN;

  BwdParams const& params;
  Tile tile;
  StagedSteps& staged;

  CUTE_DEVICE int block() const { return tile.block / kTilesOfBlock; }
  CUTE_DEVICE int count(int head) const { return key_count(params.blocks, tile.batch, head, block()); }
  // Of query heads [begin, end) together.
  CUTE_DEVICE int count(int begin, int end) const {
    int steps = 0;
    for (int head = begin; head < end; ++head) {
      steps += count(head);
    }
    return steps;
  }

  // The first step of head `head`, or of the next one that has any: it goes to `stage`. `head` becomes its head.
  // Returns its block of queries. A tile begins further on in its lists than the tile before it: at the same place, all
  // would add to dQ of the same queries at a time. (Not where tiles take turns.)
  CUTE_DEVICE int first(int stage, int& head) const {
    int steps = count(head);
    while (steps == 0) {
      steps = count(++head);
    }
    int const n_tiles = params.blocks.k_blocks * kTilesOfBlock;
    return look_up(stage, head, params.ordered ? 0 : steps * tile.block / n_tiles, steps);
  }
  // The step after the one in `stage`: it goes to the other stage. There is one.
  CUTE_DEVICE int next(int stage, int& head) const {
    int const left = staged.left[stage] - 1;
    if (left == 0) {
      return first(stage ^ 1, ++head);
    }
    int const place = staged.place[stage] + 1;
    return look_up(stage ^ 1, head, place < count(head) ? place : 0, left);
  }

  // How many tiles come to the block in `stage` before this one.
  CUTE_DEVICE static int tiles_before(StagedSteps const& staged, int n_tile, int stage) {
    return staged.turn_of_sums[stage] * kTilesOfBlock + n_tile % kTilesOfBlock;
  }

 private:
  // (By every thread the same.)
  CUTE_DEVICE int look_up(int stage, int head, int place, int left) const {
    QueryEntry const entry = key_entries(params.blocks, tile.batch, head, block())[place];
    staged.step[stage] =
        listed_step<Traits::kTileM, Traits::kTileN>(params.blocks, tile.batch, head, tile.block, entry);
    staged.turn[stage] = entry.turn();
    staged.place[stage] = place;
    staged.left[stage] = left;
    return entry.block();
  }
};

}  // namespace hattn::sm80
