// A 16-bit tensor to e4m3 whose tiles share factors, with one reading: the kernel.
//
// A tile is converted some tiles later than it is measured: by then other CTAs have measured theirs, of which the
// factor is made. In between it stays in registers, as it came where it is not rotated, else as f32. All CTAs run at
// once (launch.hpp), and none waits before what it has measured is known to all. So a CTA measures kTiles tiles from
// the lowest that waits on, and that one never waits for a tile that is not measured, if its factor has no more than
// kTiles for each CTA.
//
// A CTA walks tiles of kTileRows rows of one head. As in kernel.hpp a lane has 64 elements of one row, and each warp
// copies its own rows with cp.async and stores them itself. The next tile's copy starts when a tile has come into
// registers, so that one stage is enough; more of them would only make every answer of the memory later.
//
// Shared memory, of each warp: 4 KB where its rows of the next tile arrive, 2 KB for e4m3 bytes on their way out. Of
// all: a ring of Work, which thread 0 makes two tiles ahead, with the factor of each; each warp's largest magnitude of
// a tile.
//
// Barriers: one that the last warp waits at until all have measured a tile, to tell all CTAs and await an earlier
// tile's factor; then one of all warps, ahead of converting that one. No fence is needed, which would wait for copies
// too.
#pragma once

#include "common/barrier.hpp"
#include "quantize/tile.hpp"

namespace hattn::quantize {

constexpr int kMeasuredBarrier = 1;

template <int kHeadDim, Rotation kRotation>
struct OnceTraits {
  static constexpr bool kPacked = kRotation == Rotation::None;
  static constexpr int kTiles = kPacked ? 3 : 2;                  // in registers: the last one measured and before
  static constexpr int kWords = kPacked ? kValues / 2 : kValues;  // of a tile, a lane
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileRows = kWarps * WarpTile<kHeadDim>::kRows;
  static constexpr int kCtas = 3;    // a multiprocessor
  static constexpr int kPlaces = 8;  // five would do: the numbers wrap by themselves

  struct Storage {
    alignas(256) char tiles[kWarps][WarpTile<kHeadDim>::kBytes];
    alignas(256) char stored[kWarps][WarpTile<kHeadDim>::kBytes / 2];
    Work work[kPlaces];
    unsigned largest[2][kWarps];
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

// What was told of so many tiles of a factor, from a number on: a lane has every 32nd.
constexpr unsigned kAnswer = 128;
struct Answer {
  unsigned words[kAnswer / 32];
};

CUTE_DEVICE Answer ask(Params const& params, unsigned shared, unsigned from, int lane) {
  Answer answer;
  CUTE_UNROLL
  for (unsigned i = 0; i < kAnswer / 32; ++i) {
    unsigned const tile = from + lane + 32 * i;
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "setp.lt.u32 there, %2, %3;\n"
        "mov.b32 %0, %4;\n"
        "@there ld.relaxed.gpu.global.u32 %0, [%1];\n"
        "}\n"
        : "=&r"(answer.words[i])
        : "l"(params.shared.largest + shared * params.tiles_a_factor + tile), "r"(tile), "r"(params.tiles_a_factor),
          "n"(kMeasured)
        : "memory");
  }
  return answer;
}

// Waits until all tiles of a factor were measured, and returns the largest magnitude. A whole warp asks, or has asked
// for the first ones already: each word says itself whether it is there, so that no other order is needed.
template <bool kAsked>
CUTE_DEVICE float await_all(Params const& params, unsigned shared, int lane, Answer const& first) {
  unsigned largest = 0;
  unsigned all = kMeasured;
  auto const take = [&](Answer const& answer) {
    CUTE_UNROLL
    for (unsigned const word : answer.words) {
      largest = max(largest, word);
      all &= word;
    }
  };
  unsigned from = 0;
  if (kAsked) {
    take(first);
    from = kAnswer;
  }
  while (true) {
    CUTE_NO_UNROLL
    for (; from < params.tiles_a_factor; from += kAnswer) {
      take(ask(params, shared, from, lane));
    }
    if (__all_sync(0xffffffffU, all != 0)) {
      return __uint_as_float(__reduce_max_sync(0xffffffffU, largest) & kMagnitude);
    }
    __nanosleep(64);
    largest = 0;
    all = kMeasured;
    from = 0;
  }
}

template <DType kSource, int kHeadDim, Rotation kRotation>
__global__ void __launch_bounds__(OnceTraits<kHeadDim, kRotation>::kThreads, OnceTraits<kHeadDim, kRotation>::kCtas)
    quantize_once_kernel(__grid_constant__ Params const params, __grid_constant__ Norms const norms,
                         __grid_constant__ Signs const signs) {
  using Traits = OnceTraits<kHeadDim, kRotation>;
  using WarpTile = WarpTile<kHeadDim>;
  constexpr unsigned kPlaces = Traits::kPlaces;
  constexpr unsigned kBehind = Traits::kTiles - 1;
  extern __shared__ char memory[];
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(memory);
  int const chunks = static_cast<int>(params.chunks);
  auto const address_of = [](char const* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  };
  auto const begin_copy = [&](unsigned n) {
    int const thread = thread_index();
    WarpTile::copy(address_of(storage.tiles[thread / 32]), params, storage.work[n % kPlaces], thread);
  };
  auto const make_work = [&](unsigned n) { storage.work[n % kPlaces] = work_once(params, blockIdx.x + n * gridDim.x); };

  if (thread_index() == 0) {
    make_work(0);
    make_work(1);
  }
  LaneSigns const lane_signs = signs_of<kHeadDim>(signs, thread_index());
  __syncthreads();
  begin_copy(0);

  unsigned not_finite = 0;
  // Measures tile n, if there is one, and converts the one kBehind before, which is `kept`. Returns whether there is
  // one to convert after that.
  auto const step = [&](unsigned n, std::uint32_t(&words)[Traits::kWords], std::uint32_t const(&kept)[Traits::kWords]) {
    unsigned const place = n % kPlaces;
    unsigned const before = (n - kBehind) % kPlaces;
    bool const there = storage.work[place].job != Job::None;
    bool const converts = n >= kBehind;
    bool const asks = converts && thread_index() / 32 == Traits::kWarps - 1;
    Answer answer;
    // Where more than one tile lies between, the answer is likely to be yes; that it takes long is hidden then.
    constexpr bool kAsksAhead = kBehind > 1;
    if (kAsksAhead && asks) {
      answer = ask(params, storage.work[before].shared, 0, thread_index() % 32);
    }
    if (there) {
      int const thread = thread_index();
      int const warp = thread / 32;
      int const lane = thread % 32;
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
      float largest;
      if constexpr (Traits::kPacked) {
        WarpTile::read(words, address_of(storage.tiles[warp]), lane);
        __syncwarp();
        begin_copy(n + 1);
        largest = largest_magnitude<kSource>(words);
      } else {
        float x[kValues];
        WarpTile::template read<kSource, true>(x, address_of(storage.tiles[warp]), lane_signs, lane);
        __syncwarp();
        begin_copy(n + 1);
        int const row_lane = thread_index() % kLanes<kHeadDim>;  // among those of a row
        rotate<kHeadDim, kRotation>(x, row_lane, chunks);
        normalize<kHeadDim, kRotation>(x, row_lane, norms);
        largest = largest_magnitude(x);
        CUTE_UNROLL
        for (int i = 0; i < kValues; ++i) {
          words[i] = __float_as_uint(x[i]);
        }
      }
      // Magnitudes compare as their bits do.
      unsigned const of_warp = __reduce_max_sync(0xffffffffU, __float_as_uint(largest));
      if (thread_index() % 32 == 0) {
        storage.largest[n % 2][thread_index() / 32] = of_warp;
      }
      if (thread_index() / 32 != Traits::kWarps - 1) {
        named_barrier_arrive(kMeasuredBarrier, Traits::kThreads);
      } else {
        named_barrier_sync(kMeasuredBarrier, Traits::kThreads);
        unsigned of_tile = 0;
        CUTE_UNROLL
        for (unsigned const one : storage.largest[n % 2]) {
          of_tile = max(of_tile, one);
        }
        if (thread_index() % 32 == 0) {
          tell(params, storage.work[place].slot, of_tile);
        }
      }
    }
    if (thread_index() == 0) {
      make_work(n + 2);
    }
    if (asks) {
      int const lane = thread_index() % 32;
      Work const& work = storage.work[before];
      float const amax = await_all<kAsksAhead>(params, work.shared, lane, answer);
      float const descale = descale_of(amax, params.most);
      if (lane == 0) {
        storage.factor[before] = reciprocal(descale);
        if (work.first) {
          *work.descale = descale;
        }
      }
    }
    __syncthreads();

    if (converts) {
      int const warp = thread_index() / 32;
      int const lane = thread_index() % 32;
      Work const& work = storage.work[before];
      float const factor = storage.factor[before];
      int const rows = work.rows - warp * WarpTile::kRows;
      std::uint32_t const stored = address_of(storage.stored[warp]);
      std::uint32_t const first_unit = WarpTile::template first_unit<kRotation>(stored, lane);
      auto const unit = [&](int u, float(&x)[kUnit]) {
        CUTE_UNROLL
        for (int i = 0; i < kUnit; i += 2) {
          if constexpr (Traits::kPacked) {
            unpack<kSource>(kept[(u * kUnit + i) / 2], x[i], x[i + 1]);
          } else {
            x[i] = __uint_as_float(kept[u * kUnit + i]);
            x[i + 1] = __uint_as_float(kept[u * kUnit + i + 1]);
          }
        }
      };
      CUTE_UNROLL
      for (int u = 0; u < kUnitsALane; ++u) {
        float x[kUnit];
        unit(u, x);
        CUTE_UNROLL
        for (float& one : x) {
          one = multiply(one, factor);
        }
        write_shared(first_unit ^ unit_of<kHeadDim, kRotation>(0, u) * 16, pack_unit(x));
      }
      if (params.counts != nullptr) {
        CUTE_UNROLL
        for (int u = 0; u < kUnitsALane; ++u) {
          if (WarpTile::template has<kRotation>(u, rows, chunks, lane)) {
            float x[kUnit];
            unit(u, x);
            CUTE_UNROLL
            for (float const one : x) {
              not_finite += is_nan(one) ? 1 : 0;
            }
          }
        }
      }
      __syncwarp();
      std::uint64_t const row_bytes = params.stored.stride_row;
      unsigned const first = warp * WarpTile::kRows;
      WarpTile::store(stored, work.stored + first * row_bytes, row_bytes, rows, chunks, lane);
      __syncwarp();
    }
    return n + 1 < kBehind || storage.work[(before + 1) % kPlaces].job != Job::None;
  };
  std::uint32_t tiles[Traits::kTiles][Traits::kWords] = {};
  bool more = true;
  CUTE_NO_UNROLL
  for (unsigned n = 0; more; n += Traits::kTiles) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kTiles; ++i) {
      more = more && step(n + i, tiles[i], tiles[(i + 1) % Traits::kTiles]);
    }
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
