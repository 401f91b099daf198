// wgmma of each shape and type, from a full pipe: the list, and the loop that runs one of them.
#pragma once

#include "instructions.hpp"

namespace rates {

// Every operand is one tile of 128-byte rows in the 128-byte swizzle: 64 rows of A for each warpgroup, up to 256 of B
// for all. A row is four products deep, 32 bytes each. What is where within a tile does not matter: it is all random.
constexpr int kStepBytes = 32;
constexpr int kStepsOfRow = 4;
constexpr int kTileBytesA = 64 * 128;
constexpr int kTileBytesB = 256 * 128;
constexpr int kMostWarpgroups = 3;
constexpr int kOperandBytes = kMostWarpgroups * kTileBytesA + kTileBytesB;
// More than half of an SM's shared memory, so that no two blocks share an SM. Behind the operands: the alignment's
// slack, and the bytes of the warps that run beside.
constexpr int kSharedBytes = 120 * 1024;
constexpr int kBesideBytes = 8 * kWarpBytes;
static_assert(1024 + kOperandBytes + kBesideBytes <= kSharedBytes, "shared memory");

// Products between two waits.
constexpr int kBatch = 8;

__device__ __forceinline__ std::uint64_t descriptor(void const* tile) {
  std::uint64_t const address = (shared_address(tile) & 0x3FFFF) >> 4;
  std::uint64_t const eight_rows = 1024 >> 4;
  std::uint64_t const swizzle_128 = 1;
  return address | 1ULL << 16 | eight_rows << 32 | swizzle_128 << 62;
}

// Copies the operands behind the first multiple of 1024 bytes, which the swizzle asks for, and returns that.
__device__ __forceinline__ char* load_operands(char* shared, std::uint32_t const* operands) {
  char* const aligned = shared + (1024 - shared_address(shared) % 1024) % 1024;
  for (int i = threadIdx.x; i < kOperandBytes / 4; i += blockDim.x) {
    reinterpret_cast<std::uint32_t*>(aligned)[i] = operands[i];
  }
  // wgmma reads through the async proxy.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  return aligned;
}

// One warpgroup's products: accumulators in registers, A there too or in shared memory.
template <class Product>
struct Multiplier {
  // Two fragments of A do where 128 accumulators leave no registers for four.
  static constexpr int kFragments = Product::kAccumulators < 128 ? 4 : 2;

  std::uint32_t d[Product::kAccumulators];
  std::uint32_t a[kFragments][4];
  std::uint64_t tile_a;
  std::uint64_t tile_b;

  __device__ __forceinline__ Multiplier(char const* shared, std::uint32_t const* operands, int warpgroup)
      : tile_a(descriptor(shared + warpgroup * kTileBytesA)),
        tile_b(descriptor(shared + kMostWarpgroups * kTileBytesA)) {
#pragma unroll
    for (int i = 0; i < Product::kAccumulators; ++i) {
      d[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4 * kFragments; ++i) {
      a[i / 4][i % 4] = operands[threadIdx.x + i * kMostWarpgroups * kWarpgroup];
    }
  }

  // One batch is always under way while the next is issued. The first product of a batch overwrites: sums stay small,
  // which f16 needs, and as random as an attention kernel's, which the power depends on.
  __device__ __forceinline__ void run(int batches) {
#pragma unroll 1
    for (int i = 0; i < batches; ++i) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int step = 0; step < kBatch; ++step) {
        int const k = step % kStepsOfRow;
        std::uint64_t const offset = k * (kStepBytes >> 4);
        Product::multiply(d, a[k % kFragments], tile_a + offset, tile_b + offset, step != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // The accumulators are the hardware's until here: nothing that reads them may move up.
#pragma unroll
    for (int i = 0; i < Product::kAccumulators; ++i) {
      asm volatile("" : "+r"(d[i])::"memory");
    }
  }

  __device__ __forceinline__ std::uint32_t folded() const {
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < Product::kAccumulators; ++i) {
      sum = 3 * sum + d[i];
    }
    return sum;
  }
};

// On any number of SMs, one block each.
template <class Product>
__device__ __forceinline__ void run_product(std::uint32_t const* operands, std::uint32_t* sink, Span* spans,
                                            int batches) {
  extern __shared__ char shared[];
  __shared__ Times times;
  char const* const tiles = load_operands(shared, operands);
  // The shuffle tells the compiler that a warp agrees about it, without which descriptors are not uniform.
  int const warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarpgroup, 0);
  Multiplier<Product> multiplier(tiles, operands, warpgroup);
  multiplier.run(1);
  __syncthreads();
  Moment const start = now();
  multiplier.run(batches);
  Moment const stop = now();
  sink[blockIdx.x * kMostWarpgroups * kWarpgroup + threadIdx.x] = multiplier.folded();
  times.note(start, stop);
  __syncthreads();
  if (threadIdx.x == 0) {
    times.add_to(spans[blockIdx.x], 0, blockDim.x / kWarp);
  }
}

}  // namespace rates

// The operands of inline PTX must be spelled out. RATES_D_n: the accumulators' places; RATES_NEXT_n: the six places
// after them, which are A (one descriptor or four registers), B and whether to add; RATES_LIST_n: the accumulators
// themselves.
// clang-format off
#define RATES_D_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RATES_D_64 RATES_D_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define RATES_D_128 RATES_D_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103," \
  "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define RATES_NEXT_32 "%32", "%33", "%34", "%35", "%36", "%37"
#define RATES_NEXT_64 "%64", "%65", "%66", "%67", "%68", "%69"
#define RATES_NEXT_128 "%128", "%129", "%130", "%131", "%132", "%133"
#define RATES_LIST_8(i) \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define RATES_LIST_32_AT(i) RATES_LIST_8(i), RATES_LIST_8(i + 8), RATES_LIST_8(i + 16), RATES_LIST_8(i + 24)
#define RATES_LIST_32 RATES_LIST_32_AT(0)
#define RATES_LIST_64 RATES_LIST_32, RATES_LIST_32_AT(32)
#define RATES_LIST_128 RATES_LIST_64, RATES_LIST_32_AT(64), RATES_LIST_32_AT(96)

// A in shared memory, or in registers.
#define RATES_A_ss "l"(tile_a)
#define RATES_A_rs "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define RATES_TEXT_ss(shape, tail, d, p0, p1, p2, p3, p4, p5) RATES_TEXT(shape, tail, d, p0, p1, p2)
#define RATES_TEXT_rs(shape, tail, d, p0, p1, p2, p3, p4, p5) \
  RATES_TEXT(shape, tail, d, "{" p0 "," p1 "," p2 "," p3 "}", p4, p5)
#define RATES_TEXT(shape, tail, d, a, b, add) \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add ", 0;\n\t" \
  "wgmma.mma_async.sync.aligned." shape " {" d "}, " a ", " b ", p, 1, 1" tail ";\n\t}"
#define RATES_EXPAND(macro, ...) macro(__VA_ARGS__)

// The one list. Columns: name, shape and types in PTX, n, k, operands, registers of accumulators, where A is, which operands
// are transposed (16-bit types only, and only of those in shared memory), opcode in SASS.
#define RATES_PRODUCTS(X) \
  X(bf16_n64_ss,      "m64n64k16.f32.bf16.bf16",   64, 16, kBf16,  32, ss, ", 0, 0", "HGMMA.64x64x16.F32.BF16") \
  X(bf16_n64_rs,      "m64n64k16.f32.bf16.bf16",   64, 16, kBf16,  32, rs, ", 0",    "HGMMA.64x64x16.F32.BF16") \
  X(bf16_n128_ss,     "m64n128k16.f32.bf16.bf16", 128, 16, kBf16,  64, ss, ", 0, 0", "HGMMA.64x128x16.F32.BF16") \
  X(bf16_n128_rs,     "m64n128k16.f32.bf16.bf16", 128, 16, kBf16,  64, rs, ", 0",    "HGMMA.64x128x16.F32.BF16") \
  X(bf16_n256_ss,     "m64n256k16.f32.bf16.bf16", 256, 16, kBf16, 128, ss, ", 0, 0", "HGMMA.64x256x16.F32.BF16") \
  X(bf16_n256_rs,     "m64n256k16.f32.bf16.bf16", 256, 16, kBf16, 128, rs, ", 0",    "HGMMA.64x256x16.F32.BF16") \
  X(f16_f16_n128_rs,  "m64n128k16.f16.f16.f16",   128, 16, kF16,   32, rs, ", 0",    "HGMMA.64x128x16.F16") \
  X(e4m3_n128_ss,     "m64n128k32.f32.e4m3.e4m3", 128, 32, kE4m3,  64, ss, "",       "QGMMA.64x128x32.F32.E4M3.E4M3") \
  X(e4m3_n128_rs,     "m64n128k32.f32.e4m3.e4m3", 128, 32, kE4m3,  64, rs, "",       "QGMMA.64x128x32.F32.E4M3.E4M3") \
  X(e4m3_n256_ss,     "m64n256k32.f32.e4m3.e4m3", 256, 32, kE4m3, 128, ss, "",       "QGMMA.64x256x32.F32.E4M3.E4M3") \
  X(e4m3_n256_rs,     "m64n256k32.f32.e4m3.e4m3", 256, 32, kE4m3, 128, rs, "",       "QGMMA.64x256x32.F32.E4M3.E4M3") \
  X(e4m3_f16_n128_rs, "m64n128k32.f16.e4m3.e4m3", 128, 32, kE4m3,  32, rs, "",       "QGMMA.64x128x32.F16.E4M3.E4M3")
// clang-format on

namespace rates {
enum class Operands { kBf16, kF16, kE4m3 };
}

#define RATES_DEFINE(name, shape, n, k, operands, accumulators, source, tail, opcode)                                \
  namespace rates {                                                                                                  \
  struct name {                                                                                                      \
    static constexpr int kAccumulators = accumulators;                                                               \
    static __device__ __forceinline__ void multiply(std::uint32_t (&d)[kAccumulators], std::uint32_t const (&a)[4],  \
                                                    std::uint64_t tile_a, std::uint64_t tile_b, bool add) {          \
      asm volatile(RATES_EXPAND(RATES_TEXT_##source, shape, tail, RATES_D_##accumulators, RATES_NEXT_##accumulators) \
                   : RATES_LIST_##accumulators                                                                       \
                   : RATES_A_##source, "l"(tile_b), "r"(static_cast<int>(add))                                       \
                   : "memory");                                                                                      \
    }                                                                                                                \
  };                                                                                                                 \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(rates::kMostWarpgroups* rates::kWarpgroup, 1)                         \
      product_##name(std::uint32_t const* operands, std::uint32_t* sink, rates::Span* spans, int batches) {          \
    rates::run_product<rates::name>(operands, sink, spans, batches);                                                 \
  }
RATES_PRODUCTS(RATES_DEFINE)
#undef RATES_DEFINE
