// Softcap: a score s = softmax_scale * q k becomes cap * tanh(s / cap), before the mask. No score leaves [-cap, cap].
//
// With t = tanh(y), y = s / cap, a kernel keeps t in place of the score. What scores are multiplied by, to be in powers
// of two, is then cap * log2(e) in place of softmax_scale * log2(e). So nothing else in a softmax changes. The
// backward multiplies dS by the derivative, 1 - t^2.
//
// t must be exact to about 1e-7: an error of t is an error of cap times as much in the LSE. (The hardware's tanh is
// off by up to 2^-11 of t.) Two forms are used:
//
// - near: |y| < 0.4. A polynomial, t = y (1 + a1 y^2 + a2 y^4 + a3 y^6), off by 1.2e-7 of t. Small scores are as exact
//   as without a cap, whatever the cap is. It takes no special function.
// - far: t = 1 - 2 / (1 + 2^(2 log2(e) y)), off by up to 4e-7. That is nearly as good from |t| = 0.38 on. It takes two
//   special functions, which is why a warp avoids it where it can.
//
// Caps are often far above most scores (50 for scores of some units), so a warp looks at the largest of the scores that
// it has. If it is near, the warp computes nothing but polynomials, of the product q k itself (Softcap::terms). Else
// each score has both forms, and takes the one that is right. Some kernels have no registers for all of this:
//
// - forward, sm90 above head dim 128 or with a window above 64, and sm80: each score has both forms. No warp looks.
// - backward, sm90: a warp looks. Unless all scores are near, all have the far form.
// - backward, sm80: the far form alone. A score is off by up to 3e-7 of the cap.
//
// The forward on sm90 goes further, in blocks that are exponentiated unseen and that nothing else looks at: it takes
// all scores for near, and exponentiates them at once (unseen_capped_block in sm90/fwd/softmax.hpp). If one was far,
// the block is computed again, and the rest of the tile as above.
//
// What is no number stays what it is: t of NaN is NaN, t of inf is 1, and of -inf is -1.
#pragma once

#include <cfloat>
#include <cmath>
#include <cute/config.hpp>

#include "common/softmax.hpp"

namespace hattn {

// tanh(y) = y (1 + a1 y^2 + a2 y^4 + a3 y^6) for |y| up to kTanhNear: fitted to the smallest error relative to tanh.
constexpr double kTanhNear = 0.4;
constexpr double kTanhA1 = -0.33331882262369866;
constexpr double kTanhA2 = 0.13277629031360516;
constexpr double kTanhA3 = -0.047794220588577324;

// What exponents of 2 are made of y with: tanh is made of 2^(2 log2(e) y).
constexpr float kTwoLog2E = 2.88539008177792681F;

// What a kernel knows of a cap.
struct Softcap {
  float inner;     // softmax_scale / cap: y is so many times the product q k. 0: scores are not capped
  float most;      // a product is near up to this magnitude. Below 0: the terms do not serve
  float terms[3];  // t = p (inner + p^2 (terms[0] + p^2 (terms[1] + p^2 terms[2]))) of a near product p
  // The same four coefficients, from that of `inner` on, times cap log2(e): of a score in powers of two.
  float in_log2[4];
  float most_square;  // of `most`; below 0: the terms do not serve

  CUTE_HOST_DEVICE bool caps() const { return inner != 0.0F; }

  // What a product is multiplied by to be z = 2 log2(e) y. As a new value at each call: the compiler would keep it in a
  // register through all of a kernel.
  CUTE_DEVICE float factor_anew() const {
    float factor;
    asm volatile("mul.ftz.f32 %0, %1, %2;" : "=f"(factor) : "f"(inner), "f"(kTwoLog2E));
    return factor;
  }

  // softmax_scale / cap, a normal number. The largest ones count as 2^125: z is finite wherever the product is 0.
  CUTE_HOST_DEVICE static float quotient(float softmax_scale, float cap) {
#ifdef __CUDA_ARCH__
    float const inner = __fdiv_rn(softmax_scale, cap);
#else
    float const inner = softmax_scale / cap;
#endif
    return inner < 0x1p125F ? inner : 0x1p125F;
  }

  static Softcap of(float softmax_scale, float cap) noexcept {
    Softcap softcap{};
    if (cap == 0.0F) {
      return softcap;
    }
    double const inner = static_cast<double>(quotient(softmax_scale, cap));
    softcap.inner = static_cast<float>(inner);
    // Terms are powers of `inner`, and must be floats that are not flushed. Where some would be, fewer are enough, of
    // smaller y: as far as there the missing ones are below 2^-24 of t.
    bool const small = inner <= 0x1p16;
    int const count = !small ? 0 : inner >= 0x1p-16 ? 3 : inner >= 0x1p-24 ? 2 : 0;
    double const near = count == 3 ? kTanhNear : count == 2 ? 0x1p-4 : 0x1p-12;
    double const square = inner * inner;
    double const coefficients[4] = {inner, count > 0 ? kTanhA1 * inner * square : 0.0,
                                    count > 0 ? kTanhA2 * inner * square * square : 0.0,
                                    count > 2 ? kTanhA3 * inner * square * square * square : 0.0};
    double const factor = static_cast<double>(cap) * static_cast<double>(kLog2E);
    bool finite = true;
    for (int i = 0; i < 4; ++i) {
      softcap.in_log2[i] = static_cast<float>(coefficients[i] * factor);
      finite = finite && fabsf(softcap.in_log2[i]) <= FLT_MAX;
      if (i > 0) {
        softcap.terms[i - 1] = static_cast<float>(coefficients[i]);
      }
    }
    // (Of products up to 2^60 the square does not overflow.)
    softcap.most = !small ? -1.0F : static_cast<float>(near / inner < 0x1p60 ? near / inner : 0x1p60);
    softcap.most_square = finite ? softcap.most * fabsf(softcap.most) : -1.0F;
    return softcap;
  }
};

// t in the near form, from z = 2 log2(e) y.
CUTE_DEVICE float tanh_near(float z) {
  constexpr double kUnit = 1.0 / 2.88539008177792681;  // y = z * kUnit
  constexpr double kSquare = kUnit * kUnit;
  constexpr float kFirst = static_cast<float>(kUnit);
  constexpr float kSecond = static_cast<float>(kTanhA1 * kUnit * kSquare);
  constexpr float kThird = static_cast<float>(kTanhA2 * kUnit * kSquare * kSquare);
  constexpr float kFourth = static_cast<float>(kTanhA3 * kUnit * kSquare * kSquare * kSquare);
  float const square = z * z;
  return z * fmaf(fmaf(fmaf(kFourth, square, kThird), square, kSecond), square, kFirst);
}
CUTE_DEVICE bool is_near(float z) { return fabsf(z) < static_cast<float>(kTanhNear * 2.88539008177792681); }

// t in the form that is right.
CUTE_DEVICE float tanh_of(float z) {
  float const far = fmaf(-2.0F, reciprocal_approx(1.0F + exp2_approx(z)), 1.0F);
  return is_near(z) ? tanh_near(z) : far;
}

// softmax_scale / cap, where there is no Softcap.
template <class Params>
CUTE_DEVICE float inner_of(Params const& params) {
  return params.softcap == 0.0F ? 0.0F : Softcap::quotient(params.softmax_scale, params.softcap);
}

// t of one product of a query and a key.
CUTE_DEVICE float capped(float product, float inner) { return tanh_of(product * (inner * kTwoLog2E)); }

// t of a near product.
CUTE_DEVICE float capped_near(float product, Softcap const& softcap) {
  float const square = product * product;
  return product *
         fmaf(fmaf(fmaf(softcap.terms[2], square, softcap.terms[1]), square, softcap.terms[0]), square, softcap.inner);
}

// What the backward needs of a product: t, and 1 - t^2.
struct CappedScore {
  float t;
  float slope;

  // Of a near product.
  CUTE_DEVICE static CappedScore near(float product, Softcap const& softcap) {
    float const t = capped_near(product, softcap);
    return {t, fmaf(-t, t, 1.0F)};
  }

  // Of another, from z = 2 log2(e) y. With e = 2^-|z| and r = 1 / (1 + e), |t| is (1 - e) r and 1 - t^2 is 4 e r^2. So
  // the derivative is exact however small it is, and nothing overflows. (t is off by up to 3e-7, whatever it is.)
  CUTE_DEVICE static CappedScore far(float z) {
    float const e = exp2_approx(-fabsf(z));
    float const r = reciprocal_approx(1.0F + e);
    return {copysignf((1.0F - e) * r, z), 4.0F * e * r * r};
  }

  // Of any.
  CUTE_DEVICE static CappedScore of(float z) {
    CappedScore score = far(z);
    score.t = is_near(z) ? tanh_near(z) : score.t;
    return score;
  }
};

// `other`, or `factor`, again, once `value` is there. The compiler does not know that grids have one dimension.
CUTE_DEVICE std::uint32_t after(std::uint32_t value, std::uint32_t other) {
  asm volatile(
      "{\n"
      ".reg .b32 zero;\n"
      "mov.u32 zero, %%ctaid.y;\n"
      "and.b32 zero, zero, %1;\n"
      "or.b32 %0, %0, zero;\n"
      "}\n"
      : "+r"(other)
      : "r"(value));
  return other;
}
CUTE_DEVICE float factor_after(float value, float factor) {
  asm volatile(
      "{\n"
      ".reg .b32 zero;\n"
      "mov.u32 zero, %%ctaid.y;\n"
      "and.b32 zero, zero, %1;\n"
      "or.b32 %0, %0, zero;\n"
      "}\n"
      : "+f"(factor)
      : "f"(value));
  return factor;
}

// The products of a thread, whatever they are. `factor`: what z is made with. kAtATime: how many the compiler may begin
// with. It would begin with all of them, and spill.
template <int kAtATime, class Scores>
CUTE_DEVICE void cap_any(Scores& scores, float factor) {
  CUTE_UNROLL
  for (int i = 0; i < scores.size(); ++i) {
    if (i % kAtATime == 0 && i > 0) {
      factor = factor_after(scores(i - 1), factor);
    }
    scores(i) = tanh_of(scores(i) * factor);
  }
}

// Whether no product of a warp is larger than `most_near` in magnitude. A NaN counts as near: it stays NaN.
template <class Scores>
CUTE_DEVICE bool all_near(Scores const& scores, float most_near) {
  float most[4] = {};  // four chains of dependent instructions, not one
  CUTE_UNROLL
  for (int i = 0; i < scores.size(); ++i) {
    most[i % 4] = fmaxf(most[i % 4], fabsf(scores(i)));
  }
  // (By the lanes that are not: with __all_sync ptxas takes the uniform registers away from loops around it.)
  bool const near = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) <= most_near;
  return __ballot_sync(0xffffffffU, !near) == 0;
}

// The products of a warp: the whole warp comes here. kNear: whether it looks for scores that are all near. The result:
// whether they are, or are not looked at.
template <bool kNear, int kAtATime, class Scores>
CUTE_DEVICE bool cap_scores(Scores& scores, Softcap const& softcap) {
  if (kNear && all_near(scores, softcap.most)) {
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) = capped_near(scores(i), softcap);
    }
    return true;
  }
  cap_any<kAtATime>(scores, softcap.factor_anew());
  return !kNear;
}

}  // namespace hattn
