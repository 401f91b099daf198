// What leaks from under a mask into O (common/leak.hpp), where operands are e4m3.
//
// Beside V of a masked key, the factors of its block leak. Each block's factor of V is divided by the largest of the
// head, so that one bad factor reaches all blocks. A factor of K leaks because masked scores are multiplied by it.
// Under a mask,
// - a factor of V that is negative or not finite makes NaN of the O of its head;
// - a product of factors of K and Q that is negative or not finite counts as 1, and makes NaN of the O of rows that
//   visit its block.
// Rows that keep a key of such a block have NaN by right, and get a NaN for their LSE here if the factor is of K or Q.
//
// A warp notes the tile (Fp8Leak), as it is in the middle of its stream, and puts its rows right when no product is
// under way. Until then, amax does not count elements that are NaN in rows whose sum is not.
#pragma once

#include "common/e4m3.hpp"
#include "common/leak.hpp"
#include "common/leak_blocks.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Cap>
struct Fp8Operands {
  static constexpr bool kDrops = false;
  static constexpr bool kHides = false;
  using Element = cutlass::float_e4m3_t;
  HeadRows<Element> q;
  HeadRows<Element> k;
  HeadRows<Element> v;
  int head_dim_qk;
  int head_dim_vo;
  float scale_log2;
  // Of the head's first block, and elements from one block to the next.
  float const* factors_q;
  float const* factors_k;
  float const* factors_v;
  std::int64_t next_q;
  std::int64_t next_k;
  std::int64_t next_v;
  Cap cap;

  template <class Params>
  CUTE_DEVICE static Fp8Operands of(Params const& params, int batch, int head) {
    int const kv_head = head / params.heads_per_kv_head;
    return {HeadRows<Element>::of(params.q, batch, head),
            HeadRows<Element>::of(params.k, batch, kv_head),
            HeadRows<Element>::of(params.v, batch, kv_head),
            params.head_dim_qk,
            params.head_dim_vo,
            params.scale_log2,
            &factor(params.descale_q, batch, head / params.descale_q_group, 0),
            &factor(params.descale_k, batch, kv_head, 0),
            &factor(params.descale_v, batch, kv_head, 0),
            params.descale_q.stride_row,
            params.descale_k.stride_row,
            params.descale_v.stride_row,
            cap_of(params)};
  }
  template <class Params>
  CUTE_DEVICE static Fp8Operands of(Params const& params, Tile const& tile) {
    return of(params, tile.batch, tile.head);
  }
  template <class Params>
  CUTE_DEVICE static Fp8Operands of(Params const& params, PackedTile const& tile) {
    Fp8Operands operands = of(params, tile.batch, tile.head);
    operands.q.skip(tile.q_begin);
    operands.k.skip(tile.kv_begin);
    operands.v.skip(tile.kv_begin);
    operands.factors_q += first_factor_q(params, tile) * operands.next_q;
    operands.factors_k += first_factor_kv(params, tile) * operands.next_k;
    operands.factors_v += first_factor_kv(params, tile) * operands.next_v;
    return operands;
  }
  static constexpr int kScaleBlock = 128;
  // Of a block of keys, in the order in which the producer multiplies (load.hpp).
  CUTE_DEVICE float unit_of_block(int row, int block) const {
    return factors_k[block * next_k] * (factors_q[row / kScaleBlock * next_q] * scale_log2);
  }
  // (-0 is 0.)
  CUTE_DEVICE bool is_bad(int row, int block) const {
    float const unit = unit_of_block(row, block);
    return !(unit >= 0.0F && unit < INFINITY);
  }
  // Whether a factor of V is.
  CUTE_DEVICE static bool is_bad(float factor) { return !(factor >= 0.0F && factor < INFINITY); }
  CUTE_DEVICE float score(float product, int row, int key) const {
    int const block = cute::max(key, 0) / kScaleBlock;
    return cap.score(product, is_bad(row, block) ? NAN : unit_of_block(row, block));
  }
  CUTE_DEVICE static float output_factor() { return 1.0F; }
  CUTE_DEVICE float value_factor(int key) const {
    float const factor = factors_v[key / kScaleBlock * next_v];
    return is_bad(factor) ? NAN : factor;
  }
  // Read where it is needed: registers are short.
  template <class Words>
  CUTE_DEVICE float sink(Words const& words) const {
    return sink_of_head(words.params, words.tile.head);
  }
  // Whether such rows may have met a factor that is not finite, or negative. The whole warp looks.
  CUTE_DEVICE bool has_garbage_factor(int row, int seqlen_kv, int lane) const {
    bool found = false;
    for (int block = lane; block * kScaleBlock < seqlen_kv; block += 32) {
      found = found || is_bad(row, block) || is_bad(factors_v[block * next_v]);
    }
    return __any_sync(0xffffffffU, found);
  }
};

// O in global memory, of any of the output's types.
template <class Traits>
struct Fp8Words {
  Fp8KernelParams const& params;
  // (In memory where it is long: registers are short.)
  cute::conditional_t<Traits::kIsPacked, PackedTile const&, Tile> tile;
  int first_row;

  CUTE_DEVICE static int column(int pair) {
    return LanePairs<Traits::kHeadDimVO>::column(thread_index_anew() % 32, pair);
  }
  template <class Element>
  CUTE_DEVICE HeadRows<Element> rows() const {
    auto rows = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    if constexpr (Traits::kIsPacked) {
      rows.skip(tile.q_begin);
    }
    return rows;
  }
  // Calls `use` with an element of the output's type.
  template <class Use>
  CUTE_DEVICE void with_type(Use const& use) const {
    if (params.output == DType::E4M3) {
      use(cutlass::float_e4m3_t{});
    } else if (params.output == DType::F16) {
      use(cutlass::half_t{});
    } else {
      use(cutlass::bfloat16_t{});
    }
  }
  CUTE_DEVICE float2 load(int row, int pair) const {
    float2 values{0.0F, 0.0F};
    if (column(pair) < params.head_dim_vo) {
      with_type([&](auto element) { values = rows<decltype(element)>().pair(first_row + row, column(pair)); });
    }
    return values;
  }
  CUTE_DEVICE void store(int row, int pair, int which, float value) const {
    if (params.amax != nullptr) {
      atomicMax(params.amax, __float_as_uint(value) & 0x7fffffffU);
    }
    with_type([&](auto element) {
      using Element = decltype(element);
      std::uint64_t const address = rows<Element>().at(first_row + row, column(pair) + which);
      if constexpr (sizeof(Element) == 1) {
        *reinterpret_cast<std::uint8_t*>(address) =
            static_cast<std::uint8_t>(pack_e4m3(value * *params.scale_o, 0.0F, 0.0F, 0.0F));
      } else {
        *reinterpret_cast<Element*>(address) = Element{value};
      }
    });
  }
};

// Notes the tile. `sums`: of this lane's two rows.
template <class TileRecord>
CUTE_DEVICE void note_leak(Fp8Leak<TileRecord>& leak, TileRecord const& tile, float const (&sums)[2]) {
  int const lane = thread_index_anew() % 32;
  if (lane % 4 == 0) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      leak.rows[lane / 4 + 8 * r] = static_cast<signed char>(isnan(sums[r]) ? -1 : sums[r] == 0.0F ? 0 : 1);
    }
  }
  leak.tile = tile;  // by every lane the same
  leak.noted = 1;
  __syncwarp();
}

// Puts right a warp's rows of the tile that it has noted. (A call, as in sm90/fwd/epilogue.hpp.)
template <class Traits>
__device__ __noinline__ void repair_rows(typename Traits::Params const& params, typename Traits::Leak& leak, int row) {
  Fp8Words<Traits> const words{params, leak.tile, leak.tile.block * Traits::kTileM + row};
  float sums[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const of_row = leak.rows[thread_index_anew() % 32 / 4 + 8 * r];
    sums[r] = of_row < 0 ? NAN : static_cast<float>(of_row);
  }
  __syncwarp();
  using Operands = Fp8Operands<typename Traits::Cap>;
  if constexpr (Traits::kIsListed) {
    BlockLeaks<Traits, Operands>::repair(params.lists, leak.tile, Operands::of(params, leak.tile), band_of(params),
                                         words.first_row, SoundRows::with(sums), words);
  } else {
    Leaks<Traits, Operands>::repair(Operands::of(params, leak.tile),
                                    Traits::tile_band(params, band_of(params), leak.tile), words.first_row,
                                    SoundRows::with(sums), words);
  }
  // Rows that keep a key of a block whose factor is not finite: their LSE was made with 1 in its place.
  Band const band = Traits::tile_band(params, band_of(params), leak.tile);
  int const query = words.first_row + static_cast<int>(thread_index_anew()) % 32;
  if (params.lse != nullptr && query < cute::min(words.first_row + 16, queries_of(params, leak.tile))) {
    Operands const operands = Operands::of(params, leak.tile);
    bool bad = false;
    if constexpr (Traits::kIsListed) {
      int const row = row_of_lists(params.lists, leak.tile.batch, leak.tile.head, query / kListedBlock);
      std::uint64_t const bits = given_bits(params.lists, leak.tile.batch, leak.tile.head, query / kListedBlock);
      int const entries = counts_of_row(params.lists, row).y;
      for (int i = 0; i < entries; ++i) {
        BlockEntry const entry{entries_of_row(params.lists, row)[i]};
        static_assert(Operands::kScaleBlock == kListedBlock, "a block of the lists has one factor");
        bad = bad || (kept_keys(entry, bits + query % kListedBlock * 16, band, query).count() > 0 &&
                      operands.is_bad(query, entry.block()));
      }
    } else {
      int const begin = band.first_key<Traits::kMask>(query);
      int const end = cute::min(band.seqlen_kv, band.last_key<Traits::kMask>(query) + 1);
      for (int key = begin; key < end; key = (key / Operands::kScaleBlock + 1) * Operands::kScaleBlock) {
        bad = bad || operands.is_bad(query, key / Operands::kScaleBlock);
      }
    }
    if (bad) {
      params.lse[leak.tile.batch * params.lse_stride_batch + leak.tile.head * params.lse_stride_head +
                 first_row_of(leak.tile) + query] = NAN;
    }
  }
  if (params.amax != nullptr) {
    // NaN that is left belongs there.
    bool left = false;
    CUTE_NO_UNROLL
    for (int r = 0; r < 16; ++r) {
      if (words.first_row + r < queries_of(params, leak.tile)) {
        CUTE_UNROLL
        for (int pair = 0; pair < LanePairs<Traits::kHeadDimVO>::kCount; ++pair) {
          float2 const values = words.load(r, pair);
          left = left || isnan(values.x) || isnan(values.y);
        }
      }
    }
    if (left) {
      atomicMax(params.amax, 0x7fffffffU);
    }
  }
  __syncwarp();
  leak.noted = 0;
  __syncwarp();
}

}  // namespace hattn::sm90
