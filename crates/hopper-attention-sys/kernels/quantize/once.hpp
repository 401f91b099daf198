// Quantises a 16-bit tensor to e4m3 where several tiles share a descale factor. Reads every value once.
//
// A tile is kTileRows rows of one head. To measure a tile is to find its largest magnitude. A shared factor is made of
// the largest magnitude of all its tiles, which several CTAs measure. So a CTA measures a tile, keeps it in registers,
// measures kTiles - 1 more, and then converts the first. Meanwhile the other CTAs have measured theirs. Registers hold
// a tile as it came (pairs of 16-bit values), or as f32 where rows are rotated.
//
// No deadlock. All CTAs run at once (launch.hpp), and a CTA publishes what it has measured before it waits. When a CTA
// waits, it has measured kTiles tiles: the tile that it waits to convert, and those after it. Take the lowest tile that
// is waited for. All tiles of its factor have been measured by then, if the factor has at most kTiles tiles for each
// CTA. So this wait ends.
//
// Roles. The warps copy, measure and convert alike: each one copies its own rows with cp.async and stores them itself.
// A lane has 64 values of one row. In addition
// - thread 0 makes the Work (schedule.hpp) of the tile two ahead;
// - the last warp publishes the tile's largest magnitude, and waits for the factor of the tile that is converted next.
//
// Shared memory, for each warp: 4 KB for the copy of its rows of the next tile, 2 KB for e4m3 bytes on their way out.
// One copy is in flight. It starts when the tile before it has come into registers. (With more copies in flight every
// load only takes longer.) For all warps: a ring of Work with each tile's factor, and each warp's largest magnitude.
//
// Barriers:
// - The named barrier kMeasuredBarrier: all warps have measured a tile. The last warp waits at it, the others only
//   arrive.
// - Then __syncthreads: the Work and the factor of the tile that is converted next are there. No fence is needed. (A
//   fence would wait for copies too.)
#pragma once

#include "common/barrier.hpp"
#include "quantize/tile.hpp"

namespace hattn::quantize {

constexpr int kMeasuredBarrier = 1;

template <int kHeadDim, Rotation kRotation>
struct OnceTraits {
  static constexpr bool kPacked = kRotation == Rotation::None;
  static constexpr int kTiles = kPacked ? 3 : 2;                  // that a CTA holds in registers
  static constexpr int kWords = kPacked ? kValues / 2 : kValues;  // registers of one lane for one tile
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

// The Work of tile number `tile`, or Job::None past the last tile.
CUTE_DEVICE Work work_once(Params const& params, unsigned tile) {
  Work work{};
  work.job = Job::None;
  if (tile < params.tiles) {
    work = work_at(params, tile);
    work.job = Job::Both;
  }
  return work;
}

// Publishes a tile's largest magnitude, given by its bits, for all CTAs.
CUTE_DEVICE void tell(Params const& params, unsigned slot, unsigned largest) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(params.shared.largest + slot), "r"(largest | kMeasured)
               : "memory");
}

// Words of Shared::largest for kAnswer tiles of a factor, from tile `from` on. A lane has every 32nd word.
constexpr unsigned kAnswer = 128;
struct Answer {
  unsigned words[kAnswer / 32];
};

// Reads those words. A word past the factor's last tile counts as measured, with a magnitude of 0.
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

// Waits until all tiles of a factor were measured, and returns their largest magnitude. By a whole warp.
//
// kAsked: the warp has asked for the first kAnswer tiles already, and `first` has their words. Each word says itself
// whether its tile was measured (kMeasured), so that no other memory order is needed.
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

// One thread of the kernel: where it is, and what it does. All functions are inlined into the kernel.
//
// Tiles are counted from 0 as the CTA takes them: `n` below is such a number. Work and factors of tile n lie in place
// n % kPlaces of the rings.
template <DType kSource, int kHeadDim, Rotation kRotation>
struct Once {
  using Traits = OnceTraits<kHeadDim, kRotation>;
  using WarpTile = WarpTile<kHeadDim>;
  using Storage = typename Traits::Storage;
  using Words = std::uint32_t[Traits::kWords];  // a lane's values of a tile: pairs of the source, or the bits of f32
  static constexpr unsigned kPlaces = Traits::kPlaces;
  static constexpr unsigned kBehind = Traits::kTiles - 1;  // a tile is converted so many tiles after it is measured
  // Whether the factor is asked for before a tile is measured. Where more than one tile lies between, the answer is
  // likely to be there already, and the time that it takes is hidden.
  static constexpr bool kAsksAhead = kBehind > 1;

  Params const& params;
  Norms const& norms;
  Storage& storage;
  int const chunks;
  LaneSigns lane_signs{};
  unsigned not_finite = 0;  // values of this thread that were no numbers

  CUTE_DEVICE Once(Params const& given_params, Norms const& given_norms, Storage& given_storage)
      : params{given_params},
        norms{given_norms},
        storage{given_storage},
        chunks{static_cast<int>(given_params.chunks)} {}

  CUTE_DEVICE void run(Signs const& signs) {
    if (thread_index() == 0) {
      make_work(0);
      make_work(1);
    }
    lane_signs = signs_of<kHeadDim>(signs, thread_index());
    __syncthreads();
    begin_copy(0);

    Words tiles[Traits::kTiles] = {};
    bool more = true;
    CUTE_NO_UNROLL
    for (unsigned n = 0; more; n += Traits::kTiles) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kTiles; ++i) {
        more = more && step(n + i, tiles[i], tiles[(i + 1) % Traits::kTiles]);
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    add_counts();
  }

 private:
  // Measures tile n, if there is one, into `words`. Then converts tile n - kBehind, if there is one, of which `kept`
  // are the words. Returns whether there is one to convert after that.
  CUTE_DEVICE bool step(unsigned n, Words& words, Words const& kept) {
    unsigned const place = n % kPlaces;
    unsigned const before = (n - kBehind) % kPlaces;
    bool const there = storage.work[place].job != Job::None;
    bool const converts = n >= kBehind;
    bool const asks = converts && is_last_warp();
    Answer answer;
    if (kAsksAhead && asks) {
      answer = ask(params, storage.work[before].shared, 0, thread_index() % 32);
    }
    if (there) {
      float const largest = measure(n, words);
      publish_largest(n, largest);
    }
    if (thread_index() == 0) {
      make_work(n + 2);
    }
    if (asks) {
      make_factor(before, answer);
    }
    __syncthreads();
    if (converts) {
      convert(before, kept);
    }
    return n + 1 < kBehind || storage.work[(before + 1) % kPlaces].job != Job::None;
  }

  CUTE_DEVICE static bool is_last_warp() { return thread_index() / 32 == Traits::kWarps - 1; }
  CUTE_DEVICE static std::uint32_t address_of(char const* shared) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  }

  // By thread 0, before the barrier that stands ahead of the work's first use.
  CUTE_DEVICE void make_work(unsigned n) { storage.work[n % kPlaces] = work_once(params, blockIdx.x + n * gridDim.x); }

  // Starts the copy of the warp's rows of tile n to shared memory. All lanes must have read the rows of the tile
  // before.
  CUTE_DEVICE void begin_copy(unsigned n) {
    int const thread = thread_index();
    WarpTile::copy(address_of(storage.tiles[thread / 32]), params, storage.work[n % kPlaces], thread);
  }

  // Waits for the warp's rows of tile n, takes them into `words` (rotated, where they are) and starts the next copy.
  // Returns the largest finite magnitude of the lane's values. Infinities become NaN.
  CUTE_DEVICE float measure(unsigned n, Words& words) {
    int const thread = thread_index();
    int const warp = thread / 32;
    int const lane = thread % 32;
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    if constexpr (Traits::kPacked) {
      WarpTile::read(words, address_of(storage.tiles[warp]), lane);
      __syncwarp();
      begin_copy(n + 1);
      return largest_magnitude<kSource>(words);
    } else {
      float x[kValues];
      WarpTile::template read<kSource, true>(x, address_of(storage.tiles[warp]), lane_signs, lane);
      __syncwarp();
      begin_copy(n + 1);
      int const row_lane = thread_index() % kLanes<kHeadDim>;  // among those of a row
      rotate<kHeadDim, kRotation>(x, row_lane, chunks);
      normalize<kHeadDim, kRotation>(x, row_lane, norms);
      float const largest = largest_magnitude(x);
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) {
        words[i] = __float_as_uint(x[i]);
      }
      return largest;
    }
  }

  // Reduces a tile's largest magnitude over the CTA, and tells it to all CTAs. Magnitudes compare as their bits do.
  CUTE_DEVICE void publish_largest(unsigned n, float largest) {
    unsigned const of_warp = __reduce_max_sync(0xffffffffU, __float_as_uint(largest));
    if (thread_index() % 32 == 0) {
      storage.largest[n % 2][thread_index() / 32] = of_warp;
    }
    if (!is_last_warp()) {
      named_barrier_arrive(kMeasuredBarrier, Traits::kThreads);
    } else {
      named_barrier_sync(kMeasuredBarrier, Traits::kThreads);
      unsigned of_tile = 0;
      CUTE_UNROLL
      for (unsigned const one : storage.largest[n % 2]) {
        of_tile = max(of_tile, one);
      }
      if (thread_index() % 32 == 0) {
        tell(params, storage.work[n % kPlaces].slot, of_tile);
      }
    }
  }

  // By the last warp: waits until all tiles of a factor were measured, and makes the factor of the tile in `place`. The
  // first tile of a factor also writes the descale factor. `answer` is what was asked ahead, if it was.
  CUTE_DEVICE void make_factor(unsigned place, Answer const& answer) {
    int const lane = thread_index() % 32;
    Work const& work = storage.work[place];
    float const amax = await_all<kAsksAhead>(params, work.shared, lane, answer);
    float const descale = descale_of(amax, params.most);
    if (lane == 0) {
      storage.factor[place] = reciprocal(descale);
      if (work.first) {
        *work.descale = descale;
      }
    }
  }

  // The values of unit u of a lane, as f32.
  CUTE_DEVICE static void read_unit(Words const& words, int u, float (&x)[kUnit]) {
    CUTE_UNROLL
    for (int i = 0; i < kUnit; i += 2) {
      if constexpr (Traits::kPacked) {
        unpack<kSource>(words[(u * kUnit + i) / 2], x[i], x[i + 1]);
      } else {
        x[i] = __uint_as_float(words[u * kUnit + i]);
        x[i + 1] = __uint_as_float(words[u * kUnit + i + 1]);
      }
    }
  }

  // Multiplies the tile in `place` by its factor and stores it as e4m3, by way of shared memory. Counts what is no
  // number, if that is asked for.
  CUTE_DEVICE void convert(unsigned place, Words const& words) {
    int const warp = thread_index() / 32;
    int const lane = thread_index() % 32;
    Work const& work = storage.work[place];
    float const factor = storage.factor[place];
    int const rows = work.rows - warp * WarpTile::kRows;
    std::uint32_t const stored = address_of(storage.stored[warp]);
    std::uint32_t const first_unit = WarpTile::template first_unit<kRotation>(stored, lane);
    CUTE_UNROLL
    for (int u = 0; u < kUnitsALane; ++u) {
      float x[kUnit];
      read_unit(words, u, x);
      CUTE_UNROLL
      for (float& one : x) {
        one = multiply(one, factor);
      }
      store_chunk(first_unit ^ unit_of<kHeadDim, kRotation>(0, u) * 16, pack_unit(x));
    }
    if (params.counts != nullptr) {
      count_not_finite(words, rows, lane);
    }
    __syncwarp();
    std::uint64_t const row_bytes = params.stored.stride_row;
    unsigned const first = warp * WarpTile::kRows;
    WarpTile::store(stored, work.stored + first * row_bytes, row_bytes, rows, chunks, lane);
    __syncwarp();
  }

  // `rows`: how many of the warp's rows there are in the tensor.
  CUTE_DEVICE void count_not_finite(Words const& words, int rows, int lane) {
    CUTE_UNROLL
    for (int u = 0; u < kUnitsALane; ++u) {
      if (WarpTile::template has<kRotation>(u, rows, chunks, lane)) {
        if constexpr (Traits::kPacked) {
          CUTE_UNROLL
          for (int i = 0; i < kUnit / 2; ++i) {
            not_finite += nans_of_pair<kSource>(words[u * kUnit / 2 + i]);
          }
        } else {
          CUTE_UNROLL
          for (int i = 0; i < kUnit; ++i) {
            not_finite += is_nan(__uint_as_float(words[u * kUnit + i])) ? 1 : 0;
          }
        }
      }
    }
  }

  // Adds what was counted to the tensor's counts. No value was saturated: the factor takes the largest magnitude to the
  // largest that is stored, but for rounding.
  CUTE_DEVICE void add_counts() {
    if (params.counts != nullptr) {
      not_finite = __reduce_add_sync(0xffffffffU, not_finite);
      if (thread_index() % 32 == 0) {
        atomicAdd(&params.counts[1], static_cast<unsigned long long>(not_finite));
      }
    }
  }
};

template <DType kSource, int kHeadDim, Rotation kRotation>
__global__ void __launch_bounds__(OnceTraits<kHeadDim, kRotation>::kThreads, OnceTraits<kHeadDim, kRotation>::kCtas)
    quantize_once_kernel(__grid_constant__ Params const params, __grid_constant__ Norms const norms,
                         __grid_constant__ Signs const signs) {
  using Once = Once<kSource, kHeadDim, kRotation>;
  extern __shared__ char memory[];
  Once{params, norms, *reinterpret_cast<typename Once::Storage*>(memory)}.run(signs);
}

}  // namespace hattn::quantize
