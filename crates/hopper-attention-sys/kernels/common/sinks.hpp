// Attention sinks: a logit for each query head, which takes part in the softmax of every row and has no value.
//
// With a sink s, a row whose log-sum-exp over its keys is LSE has
//
//     LSE' = log(exp(LSE) + exp(s))    O' = O exp(LSE - LSE')
//
// The softmax scale does not multiply a sink, and no mask hides it.
//
// - A row without keys has O' = 0 and LSE' = s.
// - s = -inf changes nothing.
// - s = inf gives O' = 0 and LSE' = inf.
// - A sink of NaN makes NaN of all rows of its head.
//
// Where sequences have lengths that the device knows, a row that belongs to no sequence has no sink.
//
// No loop over keys knows of sinks. A sink is added once to a tile, when the sums of its rows are done.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/softmax.hpp"
#include "kernels.hpp"

namespace hattn {

// The sink of a head, -inf where there are none. Without a branch: this stands between products that are under way.
//
// `kMultiplies`: which of two ways makes the address. Both give the same. With one of them ptxas serialises the
// products of some FP8 rows, with the other those of others: rows with scores in f16 multiply (C7511 in the compiler's
// log).
template <bool kMultiplies>
CUTE_DEVICE float sink_of_head(TensorDesc const& sinks, DType dtype, int head) {
  bool const wide = dtype == DType::F32;
  std::uint32_t bits = 0xff800000U;
  if constexpr (kMultiplies) {
    asm volatile(
        "{\n"
        ".reg .pred given, wide, narrow;\n"
        ".reg .b64 at;\n"
        "setp.ne.u64 given, %1, 0;\n"
        "setp.eq.and.s32 wide, %3, %4, given;\n"
        "setp.ne.and.s32 narrow, %3, %4, given;\n"
        "mad.wide.s32 at, %2, 4, %1;\n"
        "@narrow mad.wide.s32 at, %2, 2, %1;\n"
        "@wide ld.global.nc.b32 %0, [at];\n"
        "@narrow ld.global.nc.u16 %0, [at];\n"
        "@narrow shl.b32 %0, %0, 16;\n"
        "}\n"
        : "+r"(bits)
        : "l"(sinks.address), "r"(head), "r"(static_cast<int>(dtype)), "n"(static_cast<int>(DType::F32)));
  } else {
    std::uint64_t const address = sinks.address + (wide ? 4 : 2) * (head * sinks.stride_head);
    asm volatile(
        "{\n"
        ".reg .pred wide, narrow;\n"
        "setp.eq.s32 wide, %2, 1;\n"
        "setp.eq.s32 narrow, %2, 2;\n"
        "@wide ld.global.nc.b32 %0, [%1];\n"
        "@narrow ld.global.nc.u16 %0, [%1];\n"
        "@narrow shl.b32 %0, %0, 16;\n"
        "}\n"
        : "+r"(bits)
        : "l"(address), "r"(sinks.address == 0 ? 0
                            : wide             ? 1
                                               : 2));
  }
  return __uint_as_float(bits);
}
template <bool kMultiplies = false, class Params>
CUTE_DEVICE float sink_of_head(Params const& params, int head) {
  return sink_of_head<kMultiplies>(params.sinks, params.sinks_dtype, head);
}

// A row's sums with its sink, relative to the larger of the two.
struct SunkRow {
  float own;        // what weights and sums of keys are multiplied by, from 0 to 1
  float weight;     // of the sink
  float reference;  // of both, in powers of two

  // `reference`: of the row's weights. It may be -inf where the row has no key. Without a sink (-inf) all is as it was.
  CUTE_DEVICE static SunkRow of(float sink, float reference) {
    SunkRow row;
    float const sink_log2 = sink * kLog2E;
    float const finite = fmaxf(reference, -FLT_MAX);  // (A NaN is in the row's sum, too.)
    row.reference = fmaxf(finite, sink_log2);         // not the NaN of a sink, which stays in its weight
    row.own = exp2_approx(finite - row.reference);
    row.weight = sink_log2 == row.reference ? 1.0F : exp2_approx(sink_log2 - row.reference);
    return row;
  }

  CUTE_DEVICE float add_to(float sum) const { return fmaf(sum, own, weight); }
};

// The end of a row: what its O is multiplied by, and its log-sum-exp. `sum`: of the weights of its keys, 0 where it has
// none. `divisor`: what O is divided by without a sink.
//
// `inverse` is 0 if and only if the row has no key. Of another row it is at least the smallest number there is, which
// arithmetic flushes to 0: so that code which looks at rows by their inverse knows one from the other (leak.hpp).
struct RowEnd {
  float inverse;
  float lse;

  CUTE_DEVICE static RowEnd of(float sink, float reference, float sum, float divisor) {
    constexpr float kLn2 = 0.693147180559945309F;
    SunkRow const row = SunkRow::of(sink, reference);
    float const total = row.add_to(sum);
    float const inverse = row.own * reciprocal_approx(row.add_to(divisor));
    std::uint32_t const bits = __float_as_uint(inverse);
    bool const empty = sum == 0.0F;  // a NaN is not
    RowEnd end;
    end.inverse = empty ? (isnan(sink) ? sink : 0.0F) : __uint_as_float(bits == 0 ? 1U : bits);
    end.lse = empty ? sink : (row.reference + log2_approx(total)) * kLn2;
    return end;
  }
};

// What O is multiplied by where there is dropout. An inverse above 0 stays above 0.
CUTE_DEVICE float with_factor(float inverse, float factor) {
  float const product = inverse * factor;
  return __float_as_uint(product) == 0 ? inverse : product;
}

}  // namespace hattn
