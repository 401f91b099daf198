// The end of a tile, for one consumer warpgroup.
//
// - The log-sum-exp goes straight to memory.
// - O / row_sum, in the output type, goes to the warpgroup's rows of the buffer of Q, whose Q is no longer needed.
//   Warp 1 of the producers stores it from there. Above head dim 128, and where a CTA has one tile, it goes straight to
//   memory, too.
//
// A warp in whose rows something has leaked or overflowed (common/leak.hpp) puts them right before it hands them over.
#pragma once

#include "common/dropout.hpp"
#include "common/leak.hpp"
#include "common/leak_blocks.hpp"
#include "common/mask.hpp"
#include "common/overflow.hpp"
#include "common/shared.hpp"
#include "common/sinks.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fwd/rotation.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  // Whether consumers write O to memory, from registers.
  static constexpr bool kWritesRows = Traits::kWritesOutput || Traits::kShares;

  // Without a branch, so that the two rows' long chains of dependent instructions run side by side.
  CUTE_DEVICE static void store_if(bool condition, float* address, float value) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(address), "f"(value),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }

  // Writes the tile's log-sum-exp and gives what its O must be multiplied by. (`sums` and `divisors`: softmax.hpp.)
  CUTE_DEVICE static void finish_rows(FwdParams const& params, typename Traits::Scalars const& scalars,
                                      Storage const& storage, int buffer, int consumer, float const (&reference)[2],
                                      float const (&sums)[2], float const (&divisors)[2], float (&inverse)[2]) {
    auto const tile = storage.tile[buffer];
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const first_query = tile.block * Traits::kTileM + consumer * 64 + (thread / 32 % 4) * 16 + lane / 4;
    float const sink = sink_of_head(params, tile.head);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowEnd const end = RowEnd::of(sink, reference[r], sums[r], divisors[r]);
      inverse[r] = end.inverse;
      if constexpr (Traits::kDrops) {
        inverse[r] = with_factor(end.inverse, dropout_factor(params));
      }
      int const query = first_query + 8 * r;
      store_if(scalars.lse != nullptr && lane % 4 == 0 && query < queries_of(scalars, tile),
               scalars.lse + lse_place(params.lse, tile, query), end.lse);
    }
  }

  // Puts O, multiplied by `inverse`, where the storing warp takes it from. The result has looked at it, if the kernel
  // does.
  template <class Output>
  CUTE_DEVICE static OutputLooks<Traits> stage_output(FwdParams const& params, typename Traits::Scalars const& scalars,
                                                      Storage& storage, int buffer, int consumer, Output const& output,
                                                      float const (&inverse)[2]) {
    int const thread = Traits::thread_index();
    OutputLooks<Traits> looks;
    store_accumulator<Traits::kTileM, Traits::kHeadDimVO, Traits::kSlabRowBytes>(
        storage.q[buffer], consumer * 64 + (thread / 32 % 4) * 16, thread % 32, output, inverse,
        [&](int row, std::uint32_t a, std::uint32_t b) {
          if constexpr (kLooksAtOutput<Traits>) {
            looks.see(row, a, b);
          }
        },
        rotation_of_output<Traits>(params, scalars, storage.tile[buffer]));
    if constexpr (Traits::kMask != MaskClass::Full) {
      looks.template see_sums<Element>(inverse);
    }
    return looks;
  }

  // Writes the warp's rows of O, multiplied by `inverse`, to memory, and puts them right where something has leaked.
  template <class Output>
  CUTE_DEVICE static void write_output(FwdParams const& params, typename Traits::Scalars const& scalars,
                                       Storage& storage, int buffer, int consumer, Output const& output,
                                       float const (&inverse)[2]) {
    auto const tile = storage.tile[buffer];
    int const thread = Traits::thread_index();
    auto const o = rows_of_output(params, tile);
    OutputLooks<Traits> looks;
    write_pairs<Traits::kHeadDimVO>(
        o.address, o.row_bytes, tile.block * Traits::kTileM + consumer * 64 + (thread / 32 % 4) * 16,
        queries_of(scalars, tile), params.head_dim_vo, thread % 32, [&](int i, int j) {
          int const at = 8 * i + 2 * j;
          std::uint32_t const word = pack_pair<Element>(output(at) * inverse[j % 2], output(at + 1) * inverse[j % 2]);
          if constexpr (kLooksAtOutput<Traits>) {
            looks.of[j % 2].see(word);
          }
          return word;
        });
    if constexpr (Traits::kMask != MaskClass::Full) {
      looks.template see_sums<Element>(inverse);
    }
    if constexpr (kLooksAtOutput<Traits>) {
      if (looks.found()) {
        repair(params, storage, buffer, 0, looks, inverse[0], inverse[1]);  // it knows its rows, to save a register
      }
    }
  }

  // Hands the warp's rows of O to the storing warp, or stores them (stores_own_rows).
  CUTE_DEVICE static void hand_over(FwdParams const& params, typename Traits::Scalars const& scalars, Storage& storage,
                                    int buffer, int consumer) {
    fence_proxy_async();
    __syncwarp();
    if (stores_own_rows<Traits>(params)) {
      store_staged(params, scalars, storage, buffer, consumer);
      __syncwarp();
    }
    if (Traits::thread_index() % 32 == 0) {
      storage.o_full[buffer][consumer].arrive();
    }
  }

  // Puts right the warp's rows of O, which are not handed over yet, where looks have found something. (A call: in the
  // middle of the kernel this code would stand between what a tile needs, and be fetched with it.)
  __device__ __noinline__ static void repair(FwdParams const& params, Storage& storage, int buffer, int consumer,
                                             OutputLooks<Traits> looks, float first_sum, float second_sum) {
    float const sums[2] = {first_sum, second_sum};
    if (!looks.leaked(sums)) {
      return;
    }
    auto const tile = storage.tile[buffer];
    int const row = kWritesRows ? thread_index_anew() / 32 * 16 - 64  // warpgroup 0 loads
                                : consumer * 64 + thread_index_anew() / 32 % 4 * 16;
    auto const operands = OperandsOf<Traits>::of(params, tile);
    __syncwarp();
    using Repair = RepairOf<Traits>;
    int const first_row = tile.block * Traits::kTileM + row;
    auto const sound = SoundRows::of_inverses<Traits>(sums);
    if constexpr (Traits::kIsListed && kWritesRows) {
      auto const owned = [](int) { return true; };
      BlockLeaks<Traits>::repair(params.blocks, tile, operands, band_of_launch(params), first_row, sound,
                                 GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{
                                     rows_of_output(params, tile), first_row, params.head_dim_vo, owned});
    } else if constexpr (Traits::kIsListed) {
      BlockLeaks<Traits>::repair(params.blocks, tile, operands, band_of_launch(params), first_row, sound,
                                 StagedWords{cute::cast_smem_ptr_to_uint(storage.q[buffer]), row});
    } else if constexpr (kWritesRows) {
      auto const owned = [](int) { return true; };
      Repair::repair(operands, band_of_tile(params, tile), first_row, sound,
                     GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{rows_of_output(params, tile), first_row,
                                                                               params.head_dim_vo, owned});
    } else {
      Repair::repair(operands, band_of_tile(params, tile), first_row, sound,
                     StagedWords{cute::cast_smem_ptr_to_uint(storage.q[buffer]), row});
    }
    __syncwarp();
  }

 private:
  template <class TileRecord>
  CUTE_DEVICE static HeadRows<Element> rows_of_output(FwdParams const& params, TileRecord const& tile) {
    auto rows = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    rows.skip(first_row_of(tile));
    return rows;
  }

  // Stores the warp's rows of O from the buffer of Q to memory: two rows at a time, 16 bytes a lane.
  CUTE_DEVICE static void store_staged(FwdParams const& params, typename Traits::Scalars const& scalars,
                                       Storage const& storage, int buffer, int consumer) {
    auto const tile = storage.tile[buffer];
    int const thread = thread_index_anew();
    int const chunk = thread % 16;
    int const row = consumer * 64 + thread / 32 % 4 * 16 + thread / 16 % 2;
    int const query = tile.block * Traits::kTileM + row;
    int const queries = chunk < params.head_dim_vo / 8 ? queries_of(scalars, tile) : 0;
    auto const o = rows_of_output(params, tile);
    constexpr int kChunks = Traits::kSlabColumns / 8;  // of a slab
    std::uint32_t const slab =
        cute::cast_smem_ptr_to_uint(storage.q[buffer]) + chunk / kChunks * (Traits::kTileM * Traits::kSlabRowBytes);
    CUTE_UNROLL
    for (int i = 0; i < 16; i += 2) {
      if (query + i < queries) {
        *reinterpret_cast<uint4*>(o.at(query + i, 8 * chunk)) =
            load_chunk(slab_address<Traits::kSlabRowBytes>(slab, row + i, chunk % kChunks));
      }
    }
  }

  // Rows of O in the buffer of Q, as Leaks takes them.
  struct StagedWords {
    using Pairs = LanePairs<Traits::kHeadDimVO>;
    std::uint32_t tile;
    int first_row;

    // Whether the buffer has this lane's pair: at head dim 96 some lanes have one pair alone.
    CUTE_DEVICE static bool has(int pair) {
      return Traits::kHeadDimVO % 64 == 0 || Pairs::column(thread_index_anew() % 32, pair) < Traits::kHeadDimVO;
    }
    CUTE_DEVICE std::uint32_t at(int row, int pair) const {
      constexpr int kLanes = Traits::kSlabColumns / 2;  // with pairs of the same slab
      int const lane = thread_index_anew() % 32;
      int const slab = pair * (32 / kLanes) + lane / kLanes;
      return slab_address<Traits::kSlabRowBytes>(tile + slab * (Traits::kTileM * Traits::kSlabRowBytes),
                                                 first_row + row, lane % kLanes / 4) +
             lane % 4 * 4;
    }
    CUTE_DEVICE float2 load(int row, int pair) const {
      if (!has(pair)) {
        return {0.0F, 0.0F};
      }
      std::uint32_t word;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at(row, pair)) : "memory");
      return unpack_pair<Element>(word);
    }
    CUTE_DEVICE void store(int row, int pair, int which, float value) const {
      auto const bits = static_cast<std::uint16_t>(pack_pair<Element>(value, 0.0F));
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(at(row, pair) + 2 * which), "h"(bits) : "memory");
    }
  };
};

}  // namespace hattn::sm90
