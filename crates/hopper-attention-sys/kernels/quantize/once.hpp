// A 16-bit tensor to e4m3 whose tiles share factors, with one reading: the kernel.
//
// A tile is converted as late as its CTA has measured its next one: by then the others have measured theirs, of which
// the factor is made. In between it stays in shared memory as f32, rotated. All CTAs run at once (launch.hpp), and
// none waits before what it has measured is known to all, so that the tile of the lowest number that is kept never
// waits for one that is not measured: no more lie between those of a factor than there are CTAs.
//
// As in kernel.hpp a CTA walks tiles of up to 128 rows of one head, a lane has 64 elements of one row, and each warp
// copies its own rows with cp.async and stores them itself. The next tile's copy starts when a tile has come into
// registers, so that one stage is enough.
//
// Shared memory, of each warp: 4 KB where its rows of the next tile arrive; 8 KB where those of the kept one are, each
// lane's in a place of its own, of which the first 2 KB serve the e4m3 bytes on their way out. Of all: the signs as
// masks; a ring of Work, which thread 0 makes two tiles ahead, with places for a tile's largest magnitude, for how
// many warps have added theirs, and for its factor.
//
// One barrier a tile, between measuring and converting the one before. Ahead of it each warp has added its largest
// magnitude, the last to do so telling all CTAs, and one warp has then awaited the factor of the tile before.
#pragma once

#include "quantize/tile.hpp"

namespace hattn::quantize {

template <int kHeadDim>
struct OnceTraits {
  static constexpr int kThreads = kTileRows / WarpTile<kHeadDim>::kRows * 32;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtas = 512 / kThreads;  // a multiprocessor
  static constexpr int kPlaces = 8;             // five would do: the numbers wrap by themselves

  struct Storage {
    alignas(256) char tiles[kWarps][WarpTile<kHeadDim>::kBytes];
    alignas(256) char kept[kWarps][2 * WarpTile<kHeadDim>::kBytes];
    uint4 masks[16];
    Work work[kPlaces];
    unsigned largest[kPlaces];
    unsigned warps[kPlaces];
    float factor[kPlaces];
  };
  static constexpr int kSmemBytes = sizeof(Storage);
  static_assert(kCtas * (kSmemBytes + 1024) <= 228 * 1024, "so many CTAs share a multiprocessor");
};

CUTE_DEVICE Work work_once(Params const& params, unsigned tile) {
  Work work{};
  work.job = Job::None;
  if (tile < params.tiles) {
    work = work_at(params, tile);
    work.job = Job::Both;
  }
  return work;
}

// Tells every CTA a tile's largest magnitude.
CUTE_DEVICE void tell(Params const& params, unsigned slot, unsigned largest) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(params.shared.largest + slot), "r"(largest | kMeasured)
               : "memory");
}

// Waits until all tiles of a factor were measured, and returns the largest magnitude. A whole warp asks: each word says
// itself whether it is there, so that no other order is needed.
CUTE_DEVICE float await_all(Params const& params, unsigned shared, int lane) {
  unsigned const* const first = params.shared.largest + shared * params.tiles_a_factor;
  while (true) {
    unsigned largest = 0;
    unsigned all = kMeasured;
    CUTE_NO_UNROLL
    for (unsigned from = lane; from < params.tiles_a_factor + lane; from += 128) {
      unsigned some[4];
      CUTE_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        asm volatile(
            "{\n"
            ".reg .pred there;\n"
            "setp.lt.u32 there, %2, %3;\n"
            "mov.b32 %0, %4;\n"
            "@there ld.relaxed.gpu.global.u32 %0, [%1];\n"
            "}\n"
            : "=r"(some[i])
            : "l"(first + from + 32 * i), "r"(from + 32 * i), "r"(params.tiles_a_factor), "n"(kMeasured)
            : "memory");
      }
      CUTE_UNROLL
      for (unsigned const one : some) {
        largest = max(largest, one);
        all &= one;
      }
    }
    if (__all_sync(0xffffffffU, all != 0)) {
      return __uint_as_float(__reduce_max_sync(0xffffffffU, largest) & kMagnitude);
    }
    __nanosleep(64);
  }
}

template <DType kSource, int kHeadDim, Rotation kRotation>
__global__ void __launch_bounds__(OnceTraits<kHeadDim>::kThreads, OnceTraits<kHeadDim>::kCtas)
    quantize_once_kernel(__grid_constant__ Params const params, __grid_constant__ Norms const norms,
                         __grid_constant__ Signs const signs) {
  using Traits = OnceTraits<kHeadDim>;
  using WarpTile = WarpTile<kHeadDim>;
  constexpr unsigned kPlaces = Traits::kPlaces;
  constexpr int kUnit = WarpTile::kUnit;
  extern __shared__ char memory[];
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(memory);
  int const chunks = static_cast<int>(params.chunks);
  auto const address_of = [](char const* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  };
  auto const begin_copy = [&](Work const& work) {
    int const thread = thread_index();
    WarpTile::copy(address_of(storage.tiles[thread / 32]), params, work, thread);
  };

  {
    int const thread = thread_index();
    if (thread == 0) {
      // Before the first there is one without rows.
      storage.work[kPlaces - 1] = Work{};
      storage.factor[kPlaces - 1] = 0;
      for (unsigned i = 0; i < 2; ++i) {
        storage.work[i] = work_once(params, blockIdx.x + i * gridDim.x);
        storage.largest[i] = 0;
        storage.warps[i] = 0;
      }
    }
    if (kRotation != Rotation::None) {
      write_masks(storage.masks, signs, thread);
    }
  }
  __syncthreads();
  begin_copy(storage.work[0]);

  unsigned not_finite = 0;
  CUTE_NO_UNROLL
  for (unsigned n = 0;; ++n) {
    unsigned const place = n % kPlaces;
    unsigned const before = (n - 1) % kPlaces;
    bool const there = storage.work[place].job != Job::None;
    float x[kValues];
    if (there) {
      int const thread = thread_index();
      int const warp = thread / 32;
      int const lane = thread % 32;
      if (thread == 0) {
        unsigned const later = (n + 2) % kPlaces;
        storage.work[later] = work_once(params, blockIdx.x + (n + 2) * gridDim.x);
        storage.largest[later] = 0;
        storage.warps[later] = 0;
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
      WarpTile::template read<kSource, kRotation != Rotation::None>(x, address_of(storage.tiles[warp]), storage.masks,
                                                                    lane);
      __syncwarp();
      begin_copy(storage.work[(n + 1) % kPlaces]);
      if constexpr (kRotation != Rotation::None) {
        int const row_lane = thread_index() % kLanes<kHeadDim>;  // among those of a row
        rotate<kHeadDim, kRotation>(x, row_lane, chunks);
        normalize<kHeadDim, kRotation>(x, row_lane, norms);
      }
      // Magnitudes compare as their bits do.
      unsigned const of_warp = __reduce_max_sync(0xffffffffU, __float_as_uint(largest_magnitude(x)));
      if (thread_index() % 32 == 0) {
        atomicMax(&storage.largest[place], of_warp);
        __threadfence_block();
        if (atomicAdd(&storage.warps[place], 1U) == Traits::kWarps - 1) {
          __threadfence_block();
          tell(params, storage.work[place].slot, atomicMax(&storage.largest[place], 0U));
        }
      }
    } else {
      CUTE_UNROLL
      for (float& one : x) {
        one = 0;
      }
    }
    if (n > 0 && thread_index() / 32 == Traits::kWarps - 1) {
      int const lane = thread_index() % 32;
      Work const& work = storage.work[before];
      float const descale = descale_of(await_all(params, work.shared, lane), params.most);
      if (lane == 0) {
        storage.factor[before] = reciprocal(descale);
        if (work.first) {
          *work.descale = descale;
        }
      }
    }
    __syncthreads();

    int const warp = thread_index() / 32;
    int const lane = thread_index() % 32;
    Work const& work = storage.work[before];
    float const factor = storage.factor[before];
    int const rows = work.rows - warp * WarpTile::kRows;
    std::uint32_t const kept = address_of(storage.kept[warp]);
    std::uint32_t const first_unit = WarpTile::first_unit(kept, lane);
    // Of a unit the part of 4 elements that a lane keeps.
    auto const part = [&](int u, int i) { return kept + lane * 16 + (u * 4 + i) * 512; };
    auto const keep = [&](int u) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float const(&from)[4] = reinterpret_cast<float const(&)[4]>(x[u * kUnit + 4 * i]);
        write_shared(part(u, i), {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                                  __float_as_uint(from[3])});
      }
    };
    CUTE_UNROLL
    for (int u = 0; u < WarpTile::kUnitsALane; ++u) {
      float old[kUnit];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint4 const four = read_shared(part(u, i));
        old[4 * i] = __uint_as_float(four.x);
        old[4 * i + 1] = __uint_as_float(four.y);
        old[4 * i + 2] = __uint_as_float(four.z);
        old[4 * i + 3] = __uint_as_float(four.w);
      }
      if (u == 0) {
        __syncwarp();  // from here on the bytes are where the first unit was
      } else {
        keep(u);
      }
      float scaled[kUnit];
      CUTE_UNROLL
      for (int i = 0; i < kUnit; ++i) {
        scaled[i] = multiply(old[i], factor);
      }
      write_shared(first_unit ^ u * 16, pack_e4m3(scaled));
      if (params.counts != nullptr) {
        int const row = thread_index() % 32 / kLanes<kHeadDim>;
        int const chunk = thread_index() % kLanes<kHeadDim> * kChunksALane + 2 * u;
        if (row < rows && chunk < chunks) {
          CUTE_UNROLL
          for (int i = 0; i < kUnit; ++i) {
            not_finite += is_nan(old[i]) ? 1 : 0;
          }
        }
      }
    }
    __syncwarp();
    std::uint64_t const row_bytes = params.stored.stride_seqlen;
    unsigned const first = warp * WarpTile::kRows;
    WarpTile::store(kept, work.stored + first * row_bytes, row_bytes, rows, chunks, lane);
    if (!there) {
      break;
    }
    __syncwarp();
    keep(0);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  // None was saturated: the factor takes the largest to the most, but for rounding.
  if (params.counts != nullptr) {
    not_finite = __reduce_add_sync(0xffffffffU, not_finite);
    if (thread_index() % 32 == 0) {
      atomicAdd(&params.counts[1], static_cast<unsigned long long>(not_finite));
    }
  }
}

}  // namespace hattn::quantize
