// The order in which a persistent grid walks the (m_block, head, batch) tiles. Static: a CTA's tiles follow from its
// index, so there is no counter to reset and nothing to allocate.
//
// Tiles are listed group by group, a group being `heads_per_group` (batch, head) pairs whose K and V are meant to stay
// in L2 together; inside a group the tiles with the most keys come first. Round by round the grid takes the next `grid`
// tiles, in alternating direction, so that a CTA that had a long tile in one round has a short one in the next.
#pragma once

#include <cute/tensor.hpp>

#include "kernels.hpp"

namespace hattn {

struct Tile {
  int m_block;
  int head;
  int batch;
};

template <MaskClass kMask>
struct TileScheduler {
  int m_blocks;
  int heads;
  int batch;
  int heads_per_group;

  // How many tiles this CTA takes.
  CUTE_DEVICE int count() const {
    int const total = m_blocks * heads * batch;
    int const grid = static_cast<int>(gridDim.x);
    int const rounds = total / grid;
    return rounds + (slot(rounds) < total - rounds * grid ? 1 : 0);
  }

  CUTE_DEVICE Tile tile(int round) const {
    int const index = round * static_cast<int>(gridDim.x) + slot(round);
    int const group_tiles = heads_per_group * m_blocks;
    int const group = index / group_tiles;
    int const within = index - group * group_tiles;
    int const group_heads = cute::min(heads_per_group, heads * batch - group * heads_per_group);
    int const rank = within / group_heads;
    int const batch_head = group * heads_per_group + (within - rank * group_heads);
    Tile tile;
    tile.m_block = kMask == MaskClass::Full ? rank : m_blocks - 1 - rank;
    tile.batch = batch_head / heads;
    tile.head = batch_head - tile.batch * heads;
    return tile;
  }

 private:
  CUTE_DEVICE static int slot(int round) {
    int const cta = static_cast<int>(blockIdx.x);
    return round % 2 == 0 ? cta : static_cast<int>(gridDim.x) - 1 - cta;
  }
};

}  // namespace hattn
