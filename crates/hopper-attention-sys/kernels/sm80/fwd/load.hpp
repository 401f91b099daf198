// What a CTA copies to shared memory: Q once, K and V block by block. Every thread copies its share.
#pragma once

#include "common/copy.hpp"
#include "common/scalars.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Load {
  using Storage = typename Traits::SharedStorage;

  FwdParams const& params;
  FwdScalars const& scalars;
  Storage& storage;
  // Where the tile's head of K and V begins.
  std::uint64_t k_head;
  std::uint64_t v_head;

  template <class TileRecord>
  CUTE_DEVICE Load(FwdParams const& launch_params, FwdScalars const& launch_scalars, Storage& shared,
                   TileRecord const& tile)
      : params(launch_params),
        scalars(launch_scalars),
        storage(shared),
        k_head(keys_address(params.k, tile, tile.head / scalars.heads_per_kv_head)),
        v_head(keys_address(params.v, tile, tile.head / scalars.heads_per_kv_head)) {
    storage.k_head = k_head;  // by every thread the same
    storage.v_head = v_head;
  }

  // Q, and the keys and values of the first visit, whose block alone may be ragged. These are two groups of copies; V
  // is the second.
  template <class TileRecord>
  CUTE_DEVICE void first(TileRecord const& tile, KeyVisits const& visits) const {
    copy_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kThreads, true>(
        Traits::queries_at(storage, visits.first()), queries_address(params.q, tile, tile.head),
        2 * params.q.stride_row, tile.block * Traits::kTileM, queries_of(scalars, tile), params.head_dim_qk,
        Traits::thread_index());
    keys<true>(k_head, visits, visits.first());
    commit_copies();
    values<true>(v_head, visits, visits.first());
    commit_copies();
  }

  // The keys of a later visit, or their values, into their stage. A barrier has passed since `first`. (In a list the
  // ragged block may come at any place.)
  CUTE_DEVICE void next_keys(KeyVisits const& visits, int visit) const {
    keys<Traits::kIsListed>(Traits::kRegistersShort ? storage.k_head : k_head, visits, visit);
  }
  CUTE_DEVICE void next_values(KeyVisits const& visits, int visit) const {
    values<Traits::kIsListed>(Traits::kRegistersShort ? storage.v_head : v_head, visits, visit);
  }

  // The block of keys of a visit.
  CUTE_DEVICE int block_of(KeyVisits const& visits, int visit) const {
    if constexpr (Traits::kIsListed) {
      return storage.listed.block(visit);
    } else {
      return visits.block(visit);
    }
  }

 private:
  template <bool kRagged>
  CUTE_DEVICE void keys(std::uint64_t head, KeyVisits const& visits, int visit) const {
    copy_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kThreads, kRagged>(
        Traits::keys_at(storage, visit), head, 2 * params.k.stride_row, block_of(visits, visit) * Traits::kTileN,
        keys_of(scalars, storage.tile), params.head_dim_qk, Traits::thread_index());
  }
  template <bool kRagged>
  CUTE_DEVICE void values(std::uint64_t head, KeyVisits const& visits, int visit) const {
    copy_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kThreads, kRagged>(
        Traits::values_at(storage, visit), head, 2 * params.v.stride_row, block_of(visits, visit) * Traits::kTileN,
        keys_of(scalars, storage.tile), params.head_dim_vo, Traits::thread_index());
  }
};

}  // namespace hattn::sm80
