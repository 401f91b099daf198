// How the sums of two shares of a row's keys are added.
//
// A share's sums (of weights, and of weights times V) are taken against a reference of its own, which stands for the
// row's maximum. The whole is taken against the larger of the two.
#pragma once

#include "common/softmax.hpp"

namespace hattn::sm90 {

// What the sums of a row are multiplied by before they are added.
struct JointFactors {
  float own;
  float other;

  // Of sums against `reference` and sums against `other`. `reference` becomes that of the whole. (The references are
  // compared, as both may be -inf: no key.)
  CUTE_DEVICE static JointFactors of(float& reference, float other) {
    float const joint = fmaxf(reference, other);
    JointFactors const factors{reference == joint ? 1.0F : exp2_approx(reference - joint),
                               other == joint ? 1.0F : exp2_approx(other - joint)};
    reference = joint;
    return factors;
  }

  CUTE_DEVICE float sum(float of_own, float of_other) const { return of_own * own + of_other * other; }
};

}  // namespace hattn::sm90
