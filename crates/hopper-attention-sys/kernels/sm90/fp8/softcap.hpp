// A cap of the scores (common/softcap.hpp), where operands are e4m3.
//
// A block's products come with factors of their own: a score in powers of two is x = unit (q k), where `unit` has the
// factors of Q and K in it. So what z = 2 log2(e) y is made with is another number for each block: x has log2(e) in it
// already, and z = (2 / cap) x. Where all of a warp's products are near, it takes the polynomial of z; one of the
// products themselves would need its terms anew for each block.
//
// t then stands in the place of the products, and the block's unit is cap * log2(e). So nothing else in a softmax
// changes. Masks come after that.
#pragma once

#include "common/softcap.hpp"

namespace hattn::sm90 {

struct Fp8Cap {
  float z_of_score;  // 2 / cap
  float cap_log2;    // cap * log2(e)

  static Fp8Cap of(float cap) noexcept { return {2.0F / cap, cap * kLog2E}; }

  // What z is made of a product with: finite, so that z of a product of 0 is no NaN.
  CUTE_DEVICE float factor(float unit) const { return fminf(z_of_score * unit, 0x1p126F); }

  // The score in powers of two of one product. `unit` may be NaN, and then the score is.
  CUTE_DEVICE float score(float product, float unit) const {
    float const score = tanh_of(product * factor(unit)) * cap_log2;
    return isnan(unit) ? unit : score;
  }

  // The products of a warp, in place. Returns the block's unit from now on. The whole warp comes here. kNear: whether
  // it looks for products that are all near.
  template <bool kNear, int kAtATime, class Scores>
  CUTE_DEVICE float cap(Scores& scores, float unit) const {
    float const z_of_product = factor(unit);
    constexpr float kNearZ = static_cast<float>(kTanhNear) * kTwoLog2E;
    if (kNear && all_near(scores, kNearZ * reciprocal_approx(z_of_product))) {
      CUTE_UNROLL
      for (int i = 0; i < scores.size(); ++i) {
        scores(i) = tanh_near(scores(i) * z_of_product);
      }
    } else {
      cap_any<kAtATime>(scores, z_of_product);
    }
    return cap_log2;
  }
};

// Of a row without a cap.
struct Fp8NoCap {
  CUTE_DEVICE static float score(float product, float unit) { return product * unit; }
};

}  // namespace hattn::sm90
