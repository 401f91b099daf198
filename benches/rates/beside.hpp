// What runs beside a full tensor pipe: two warpgroups multiply, one or two more run an instruction or a mix.
#pragma once

#include "products.hpp"

namespace rates {

constexpr int kMultiplyingWarpgroups = 2;
constexpr int kMultiplyingWarps = kMultiplyingWarpgroups * kWarpgroup / kWarp;
constexpr int kMostBesideThreads = (kMultiplyingWarpgroups + 2) * kWarpgroup;

// What a launch adds up. A trip is a warp's.
struct BesideResult {
  Span products;
  Span others;
  unsigned long long trips;
};

// Without batches the others run alone, for `most_trips`; without trips the products do. With both, the others run
// until the last warpgroup has multiplied, so that they load the SM for all of the time that is taken of the products;
// `most_trips` bounds them all the same.
template <class Product, class Instruction>
__device__ __forceinline__ void run_beside(std::uint32_t const* operands, Inputs const* in, std::uint32_t* sink,
                                           BesideResult* result, int batches, int most_trips) {
  extern __shared__ char shared[];
  __shared__ Times times;
  __shared__ int warpgroups_done;
  if (threadIdx.x == 0) {
    warpgroups_done = 0;
  }
  char* const tiles = load_operands(shared, operands);
  int const warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroup, 0);
  if (warpgroup < kMultiplyingWarpgroups) {
    Multiplier<Product> multiplier(tiles, operands, warpgroup);
    Moment const start = now();
    multiplier.run(batches);
    times.note(start, now());
    if (batches > 0 && threadIdx.x % kWarpgroup == 0) {
      atomicAdd(&warpgroups_done, 1);
    }
    sink[threadIdx.x] = multiplier.folded();
  } else {
    int const warp = threadIdx.x / kWarp - kMultiplyingWarps;
    std::uint32_t const a = in->a;
    std::uint32_t const b = in->b;
    std::uint32_t x[kChains];
    start_chains<Instruction>(x, *in, tiles + kOperandBytes + warp * kWarpBytes);
    Moment const start = now();
    int trips = 0;
    int seen = 0;
    // What one trip reads is used after the next trip. So the loop waits neither for the read nor for the shuffle that
    // gives the whole warp one value.
#pragma unroll 1
    while (trips < most_trips) {
      int const done = __shfl_sync(0xFFFFFFFF, seen, 0);
      asm volatile("ld.relaxed.cta.shared.b32 %0, [%1];"
                   : "=r"(seen)
                   : "r"(shared_address(&warpgroups_done))
                   : "memory");
      trip<Instruction>(x, a, b);
      ++trips;
      if (done == kMultiplyingWarpgroups) {
        break;
      }
    }
    times.note(start, now());
    if (threadIdx.x % kWarp == 0) {
      atomicAdd(&result->trips, trips);
    }
    sink[threadIdx.x] = folded(x);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    times.add_to(result->products, 0, kMultiplyingWarps);
    times.add_to(result->others, kMultiplyingWarps, blockDim.x / kWarp);
  }
}

}  // namespace rates

#define RATES_DEFINE(name, opcodes, chain, ptx)                                                           \
  extern "C" __global__ void __launch_bounds__(rates::kMostBesideThreads, 1)                              \
      beside_##name(std::uint32_t const* operands, rates::Inputs const* in, std::uint32_t* sink,          \
                    rates::BesideResult* result, int batches, int most_trips) {                           \
    rates::run_beside<rates::bf16_n128_rs, rates::name>(operands, in, sink, result, batches, most_trips); \
  }
RATES_INSTRUCTIONS(RATES_DEFINE)
#undef RATES_DEFINE
