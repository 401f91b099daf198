// Single instructions and short mixes of them: the list, and the loop that runs one of them alone.
//
// A thread carries kChains independent chains, so that latency does not count; a step is one link of a chain. A step
// may read the next chain's value: otherwise ptxas would fold repeated maxima, sums and logic of the same operands into
// one.
#pragma once

#include "clock.hpp"

namespace rates {

constexpr int kChains = 8;
// Instructions of a trip of the loop: enough for the loop's own few not to show, few enough for the instruction cache.
constexpr int kTripInstructions = 256;
// Each warp's own 16 bytes a lane for those that go to shared memory: neither bank conflicts nor races.
constexpr int kWarpBytes = 16 * kWarp;

// Values that the compiler must not know. The zeros make the chains' addresses differ for it.
struct Inputs {
  std::uint32_t a;
  std::uint32_t b;
  std::uint32_t seeds[kChains];
  std::uint32_t zeros[kChains];
};

// What a chain holds at first. An address is that of the lane's own 16 bytes; loads find there, or where their matrices
// come from, the same address again: the next link, without an instruction in between.
enum class Chain { kValue, kAddress, kMatrix, kMatrixTransposed };

__device__ __forceinline__ std::uint32_t shared_address(void const* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

template <class Instruction>
__device__ __forceinline__ void start_chains(std::uint32_t (&x)[kChains], Inputs const& in, char* warp_bytes) {
  int const lane = threadIdx.x % kWarp;
  std::uint32_t const own = shared_address(warp_bytes) + 16 * lane;
  if constexpr (Instruction::kChain == Chain::kAddress) {
    *reinterpret_cast<std::uint32_t*>(warp_bytes + 16 * lane) = own;
  } else if constexpr (Instruction::kChain == Chain::kMatrix) {
    // Of the first 8x8 matrix of halves, lane i receives word i.
    *reinterpret_cast<std::uint32_t*>(warp_bytes + 4 * lane) = own;
  } else if constexpr (Instruction::kChain == Chain::kMatrixTransposed) {
    // Transposed, lane i receives column i / 4 of rows 2 (i % 4) and the one after.
    auto* const half = reinterpret_cast<std::uint16_t*>(warp_bytes + 32 * (lane % 4) + 2 * (lane / 4));
    half[0] = static_cast<std::uint16_t>(own);
    half[8] = static_cast<std::uint16_t>(own >> 16);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kChains; ++j) {
    x[j] = Instruction::kChain == Chain::kValue ? in.seeds[j] ^ (threadIdx.x % 8) : own + in.zeros[j];
  }
}

// One trip of the loop: kSteps links of every chain.
template <class Instruction>
__device__ __forceinline__ void trip(std::uint32_t (&x)[kChains], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int step = 0; step < Instruction::kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kChains; ++j) {
      Instruction::step(x[j], x[(j + 1) % kChains], a, b);
    }
  }
}

__device__ __forceinline__ std::uint32_t folded(std::uint32_t const (&x)[kChains]) {
  std::uint32_t sum = 0;
#pragma unroll
  for (int j = 0; j < kChains; ++j) {
    sum = 3 * sum + x[j];
  }
  return sum;
}

// On one SM. The first pass is short and brings the loop into the instruction cache.
template <class Instruction>
__device__ __forceinline__ void run_alone(Inputs const* in, std::uint32_t* sink, Span* span, int trips) {
  __shared__ alignas(16) char bytes[kMostWarps * kWarpBytes];
  __shared__ Times times;
  std::uint32_t const a = in->a;
  std::uint32_t const b = in->b;
  std::uint32_t x[kChains];
  start_chains<Instruction>(x, *in, bytes + threadIdx.x / kWarp * kWarpBytes);
  Moment start{};
  Moment stop{};
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    int const todo = pass == 0 ? 2 : trips;
    __syncthreads();
    start = now();
#pragma unroll 1
    for (int i = 0; i < todo; ++i) {
      trip<Instruction>(x, a, b);
    }
    stop = now();
  }
  sink[threadIdx.x] = folded(x);
  times.note(start, stop);
  __syncthreads();
  if (threadIdx.x == 0) {
    times.add_to(*span, 0, blockDim.x / kWarp);
  }
}

constexpr int words(char const* text) {
  int count = 1;
  for (; *text != 0; ++text) {
    count += *text == ' ';
  }
  return count;
}

}  // namespace rates

// The one list, for alone and for beside.hpp. A line is: name, SASS opcodes of a step, what a chain holds, the step in
// PTX with %0 this chain, %1 the next chain, %2 and %3 constants, t u v scratch, h i halves, p a predicate.
//
// ptxas may send half of a kernel's HFMA2 to the pipe of FFMA (.MMA in their name): here it does alone, not beside.
// clang-format off
#define RATES_INSTRUCTIONS(X) \
  X(ffma,         "FFMA",                              kValue,   "fma.rn.f32 %0, %0, %2, %3;") \
  X(fadd,         "FADD",                              kValue,   "add.rn.f32 %0, %0, %2;") \
  X(fmul,         "FMUL",                              kValue,   "mul.rn.f32 %0, %0, %2;") \
  X(fmnmx,        "FMNMX",                             kValue,   "max.f32 %0, %0, %1;") \
  X(ex2,          "MUFU.EX2",                          kValue,   "ex2.approx.ftz.f32 %0, %0;") \
  X(ex2_f16x2,    "MUFU.EX2.F16 MUFU.EX2.F16",         kValue,   "ex2.approx.f16x2 %0, %0;") \
  X(pack_bf16x2,  "F2FP.BF16",                         kValue,   "cvt.rn.bf16x2.f32 %0, %0, %1;") \
  X(pack_e4m3x4,  "F2FP.SATFINITE.E4M3 F2FP.SATFINITE.E4M3", kValue, \
    "cvt.rn.satfinite.e4m3x2.f32 h, %0, %2; cvt.rn.satfinite.e4m3x2.f32 i, %1, %0; mov.b32 %0, {h, i};") \
  X(prmt,         "PRMT",                              kValue,   "prmt.b32 %0, %0, %1, %2;") \
  X(lop3,         "LOP3",                              kValue,   "lop3.b32 %0, %0, %1, %2, 0xe8;") \
  X(shf,          "SHF",                               kValue,   "shf.l.wrap.b32 %0, %0, %1, %2;") \
  X(iadd3,        "IADD3",                             kValue,   "add.s32 t, %0, %1; add.s32 %0, t, %2;") \
  X(imad,         "IMAD",                              kValue,   "mad.lo.s32 %0, %0, %2, %3;") \
  X(isetp_fsel,   "ISETP.GT FSEL",                     kValue,   "setp.gt.s32 p, %0, %2; selp.f32 %0, %1, %3, p;") \
  X(hfma2_bf16,   "HFMA2",                             kValue,   "fma.rn.bf16x2 %0, %0, %2, %3;") \
  X(hmnmx2,       "HMNMX2",                            kValue,   "max.f16x2 %0, %0, %1;") \
  X(vhmnmx,       "VHMNMX",                            kValue,   "max.f16x2 t, %0, %1; max.f16x2 %0, t, %2;") \
  X(shfl,         "SHFL.BFLY",                         kValue,   "shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;") \
  X(lds_128,      "LDS.128",                           kAddress, "ld.volatile.shared.v4.b32 {%0, t, u, v}, [%0];") \
  X(sts_128,      "STS.128",                           kAddress, "st.volatile.shared.v4.b32 [%0], {%2, %3, %2, %3};") \
  X(ldsm_x4,      "LDSM.16.M88.4",                     kMatrix,  "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, t, u, v}, [%0];") \
  X(ldsm_x4_t,    "LDSM.16.MT88.4",                    kMatrixTransposed, "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, t, u, v}, [%0];") \
  X(stsm_x4,      "STSM.16.M88.4",                     kAddress, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%2, %3, %2, %3};") \
  X(ffma_ex2,     "FFMA MUFU.EX2",                     kValue,   "fma.rn.f32 %0, %0, %2, %3; ex2.approx.ftz.f32 %0, %0;") \
  X(ffma_ex2_f2fp, "FFMA MUFU.EX2 F2FP.BF16",          kValue, \
    "fma.rn.f32 t, %0, %2, %3; ex2.approx.ftz.f32 t, t; cvt.rn.bf16x2.f32 %0, t, %1;") \
  X(softmax,      "FMNMX FFMA MUFU.EX2 FADD",          kValue, \
    "max.f32 t, %0, %1; fma.rn.f32 u, %0, %2, %3; ex2.approx.ftz.f32 u, u; add.rn.f32 %0, t, u;")
// clang-format on

#define RATES_DEFINE(name, opcodes, chain, ptx)                                                                        \
  namespace rates {                                                                                                    \
  struct name {                                                                                                        \
    static constexpr Chain kChain = Chain::chain;                                                                      \
    static constexpr int kSteps = kTripInstructions / kChains / words(opcodes);                                        \
    static __device__ __forceinline__ void step(std::uint32_t& x, std::uint32_t y, std::uint32_t a, std::uint32_t b) { \
      asm volatile("{\n\t.reg .b32 t, u, v;\n\t.reg .b16 h, i;\n\t.reg .pred p;\n\t" ptx "\n\t}"                       \
                   : "+r"(x)                                                                                           \
                   : "r"(y), "r"(a), "r"(b)                                                                            \
                   : "memory");                                                                                        \
    }                                                                                                                  \
  };                                                                                                                   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512, 1)                                                                 \
      alone_##name(rates::Inputs const* in, std::uint32_t* sink, rates::Span* span, int trips) {                       \
    rates::run_alone<rates::name>(in, sink, span, trips);                                                              \
  }
RATES_INSTRUCTIONS(RATES_DEFINE)
#undef RATES_DEFINE
