// Quantises a 16-bit tensor to e4m3, in one of three cases:
// - each tile has a descale factor to itself;
// - the caller gives the factors;
// - more tiles share a factor than all CTAs together can hold in registers. Each tile is then read twice.
//
// Where fewer tiles share a factor, the kernel of once.hpp is used. schedule.hpp says which tile a CTA takes next, and
// what the CTA does with it. A tile with what is done with it is a Work. Where the device knows the lengths of
// sequences, packed.hpp says it.
//
// The kernel is bound by memory. So everything serves to keep loads in flight.
//
// A tile is up to kTileRows = 128 rows of one head. Each warp copies its own rows of a tile to shared memory with
// cp.async, kStages tiles ahead, and stores them itself (tile.hpp). So no barrier stands between a copy and its use. A
// lane has 64 elements of one row, in registers. It rotates them (rotate.hpp). It measures them: it finds their largest
// magnitude. It converts them to e4m3.
//
// Roles. All warps do the same. Thread 0 also
// - makes the Work of a tile kStages tiles ahead;
// - waits for factors that tiles share;
// - publishes in the workspace what the CTA has measured.
//
// Shared memory:
// - kStages tiles, 4 KB for each warp. On their way out, the e4m3 bytes of a row take the place of its values.
// - A ring of kPlaces places. A place has a tile's Work, its largest magnitude, and a factor that was waited for.
// - Packed: which tiles the CTA takes. (In registers there is no room for them.)
//
// Barriers: one __syncthreads for each tile, between measuring and converting.
// - Before it, every warp has added its largest magnitude to the tile's place. Thread 0 has made a later tile's Work
//   and, where tiles share a factor, has waited for it.
// - After it, thread 0 zeroes the largest magnitude of the tile before, which all warps have read. The next tile that
//   uses that place is two barriers away, since there are two places more than stages.
#pragma once

#include "quantize/packed.hpp"
#include "quantize/tile.hpp"

namespace hattn::quantize {

template <int kHeadDim>
struct Traits {
  static constexpr int kThreads = kTileRows / WarpTile<kHeadDim>::kRows * 32;
  static constexpr int kCtas = 512 / kThreads;  // a multiprocessor
  static constexpr int kStages = 2;             // three keep no more loads in flight than the memory takes
  static constexpr int kPlaces = kStages + 2;

  struct Storage {
    alignas(256) char tiles[kStages][kThreads / 32][WarpTile<kHeadDim>::kBytes];
    Work work[kPlaces];
    unsigned largest[kPlaces];
    float awaited[kPlaces];
    CtaTiles own;  // with PackedParams
  };
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kCtas * (kSmemBytes + 1024) <= 228 * 1024, "so many CTAs share a multiprocessor");
};

// KernelParams: Params or PackedParams.
template <DType kSource, int kHeadDim, Rotation kRotation, class KernelParams>
__global__ void __launch_bounds__(Traits<kHeadDim>::kThreads, Traits<kHeadDim>::kCtas)
    quantize_kernel(__grid_constant__ KernelParams const params, __grid_constant__ Norms const norms,
                    __grid_constant__ Signs const signs) {
  using Traits = Traits<kHeadDim>;
  using WarpTile = WarpTile<kHeadDim>;
  constexpr int kStages = Traits::kStages;
  extern __shared__ char memory[];
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(memory);
  int const chunks = static_cast<int>(params.chunks);
  auto const tile_address = [&](int stage, int warp) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(storage.tiles[stage][warp]));
  };

  // The next job: every gridDim-th, or the next of the counter. The counter is asked one tile before the answer is
  // needed. Packed: the next of the CTA's own tiles.
  bool const drawn = !KernelParams::kPacked && params.jobs != params.tiles;
  unsigned next = 0;
  auto const draw = [&] {
    unsigned const number = next;
    if constexpr (KernelParams::kPacked) {
      return next_work(params, storage.own);
    } else {
      next = drawn ? atomicAdd(params.shared.counter, 1U) : next + gridDim.x;
      return work_of(params, number);
    }
  };
  auto const begin_copy = [&](Work const& work, int stage) {
    int const thread = thread_index();
    WarpTile::copy(tile_address(stage, thread / 32), params, work, thread);
  };

  int const thread = thread_index();
  if (thread == 0) {
    if constexpr (KernelParams::kPacked) {
      storage.own = tiles_of_cta(params);
    }
    unsigned const first = drawn ? atomicAdd(params.shared.counter, kStages + 1U) : blockIdx.x;
    unsigned const step = drawn ? 1 : gridDim.x;
    CUTE_NO_UNROLL
    for (int i = 0; i < kStages; ++i) {
      if constexpr (KernelParams::kPacked) {
        storage.work[i] = next_work(params, storage.own);
      } else {
        storage.work[i] = work_of(params, first + i * step);
      }
    }
    next = first + kStages * step;
    for (unsigned& largest : storage.largest) {
      largest = 0;
    }
  }
  LaneSigns const lane_signs = signs_of<kHeadDim>(signs, thread);
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < kStages; ++i) {
    begin_copy(storage.work[i], i);
  }

  // Of thread 0: what it has measured and not published, and the factor that it waited for last. (To publish is slow:
  // it waits for all that the thread has asked of the memory.)
  constexpr unsigned kNoFactor = 0xffffffffU;
  Measured measured{kNoFactor, 0, 0};
  unsigned awaited = kNoFactor;
  float largest_awaited = 0;

  unsigned saturated = 0;
  unsigned not_finite = 0;
  int stage = 0;
  int place = 0;
  while (true) {
    Job const job = storage.work[place].job;
    if (job == Job::None) {
      break;
    }
    int const later = place + kStages < Traits::kPlaces ? place + kStages : place - 2;
    int const before = thread_index();
    if (before == 0) {
      storage.work[later] = draw();
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
    float x[kValues];
    WarpTile::template read<kSource, kRotation != Rotation::None>(x, tile_address(stage, before / 32), lane_signs,
                                                                  before % 32);
    float largest;
    int const row_lane = before % kLanes<kHeadDim>;  // among those of a row
    if constexpr (kRotation != Rotation::None) {
      rotate_within<kHeadDim, kRotation>(x, row_lane, chunks);
    }
    if (!KernelParams::kPacked && kRotation == Rotation::Whole && job == Job::Measure) {
      // Not packed, where the compiler would keep more than the registers hold.
      // All elements have the same norm, which rounds no two values out of their order: the product of the largest will
      // do for what is measured alone.
      if constexpr (kCrosses<kHeadDim, kRotation>) {
        largest = largest_across(x, row_lane);
        if (__any_sync(0xffffffffU, is_infinite(largest))) {
          rotate_across<kHeadDim, kRotation>(x, row_lane);
          largest = largest_magnitude(x);
        }
      } else {
        rotate_across<kHeadDim, kRotation>(x, row_lane);
        largest = largest_magnitude(x);
      }
      largest = multiply(largest, norms.of_chunk[0]);
    } else {
      if constexpr (kRotation != Rotation::None) {
        rotate_across<kHeadDim, kRotation>(x, row_lane);
        normalize<kHeadDim, kRotation>(x, row_lane, norms);
      }
      largest = largest_magnitude(x);
    }
    if (job == Job::Both || job == Job::Measure) {
      // Magnitudes compare as their bits do.
      unsigned const of_warp = __reduce_max_sync(0xffffffffU, __float_as_uint(largest));
      if (before % 32 == 0) {
        atomicMax(&storage.largest[place], of_warp);
      }
    } else if (!KernelParams::kPacked && job == Job::Await && before == 0) {
      unsigned const shared = storage.work[place].shared;
      if (shared != awaited) {
        publish(params, measured);
        awaited = shared;
        largest_awaited = await(params, shared);
      }
      storage.awaited[place] = largest_awaited;
    }
    __syncthreads();

    int const after = thread_index();
    int const warp = after / 32;
    int const lane = after % 32;
    Work const& work = storage.work[place];
    if (after == 0) {
      storage.largest[place == 0 ? Traits::kPlaces - 1 : place - 1] = 0;
    }
    if (job == Job::Measure) {
      if (after == 0) {
        if (work.shared != measured.shared) {
          publish(params, measured);
          measured.shared = work.shared;
        }
        measured.largest = max(measured.largest, storage.largest[place]);
        ++measured.tiles;
        if (!KernelParams::kPacked && params.ahead < params.tiles) {
          publish(params, measured);  // others may wait for it soon
        }
      }
    } else {
      float factor = work.factor;
      if (job != Job::Convert) {
        float const descale = descale_of(
            job == Job::Both ? __uint_as_float(storage.largest[place]) : storage.awaited[place], params.most);
        factor = reciprocal(descale);
        if (after == 0 && (job == Job::Both || work.first)) {
          *work.descale = descale;
        }
      }
      int const rows = work.rows - warp * WarpTile::kRows;
      std::uint32_t const first_unit = WarpTile::template first_unit<kRotation>(tile_address(stage, warp), lane);
      if (params.counts != nullptr) {
        CUTE_UNROLL
        for (int u = 0; u < kUnitsALane; ++u) {
          if (WarpTile::template has<kRotation>(u, rows, chunks, lane)) {
            CUTE_UNROLL
            for (int i = 0; i < kUnit; ++i) {
              float const one = x[u * kUnit + i];
              bool const number = !is_nan(one);
              not_finite += number ? 0 : 1;
              // More than half a step beyond the most; a NaN that the product made is none of either.
              unsigned const bits = __float_as_uint(multiply(one, factor)) & kMagnitude;
              saturated += number && bits > __float_as_uint(params.rounds_to_most) && bits <= kInfinity ? 1 : 0;
            }
          }
        }
      }
      // Factors of their own leave no value beyond the most, and the conversion ends at 448 by itself.
      bool const clamps = job == Job::Convert && params.most < kLargestE4m3;
      CUTE_UNROLL
      for (int u = 0; u < kUnitsALane; ++u) {
        float scaled[kUnit];
        CUTE_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          scaled[i] = multiply(x[u * kUnit + i], factor);
        }
        if (clamps) {
          CUTE_UNROLL
          for (int i = 0; i < kUnit; ++i) {
            scaled[i] = clamp(scaled[i], params.most);
          }
        }
        store_chunk(first_unit ^ unit_of<kHeadDim, kRotation>(0, u) * 16, pack_unit(scaled));
      }
      __syncwarp();
      std::uint64_t const row_bytes = params.stored.stride_row;
      unsigned const first = warp * WarpTile::kRows;
      WarpTile::store(tile_address(stage, warp), work.stored + first * row_bytes, row_bytes, rows, chunks, lane);
      __syncwarp();
    }
    begin_copy(storage.work[later], stage);
    stage = stage + 1 < kStages ? stage + 1 : 0;
    place = place + 1 < Traits::kPlaces ? place + 1 : 0;
  }
  if (thread == 0) {
    publish(params, measured);
  }
  if constexpr (KernelParams::kPacked) {
    write_factors(params);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (params.counts != nullptr) {
    saturated = __reduce_add_sync(0xffffffffU, saturated);
    not_finite = __reduce_add_sync(0xffffffffU, not_finite);
    if (thread % 32 == 0) {
      atomicAdd(&params.counts[0], static_cast<unsigned long long>(saturated));
      atomicAdd(&params.counts[1], static_cast<unsigned long long>(not_finite));
    }
  }
}

}  // namespace hattn::quantize
