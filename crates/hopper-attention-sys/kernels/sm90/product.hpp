// A matrix product of one warpgroup, issued as a group of its own.
#pragma once

#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

// The k-steps of a product, without a fence.
template <class Mma, bool kAccumulate, class A, class B>
CUTE_DEVICE void multiply(A const& a, B const& b, typename Mma::Sums& sums) {
  Mma::template issue<kAccumulate>(a, b, 0, sums);
  CUTE_UNROLL
  for (int k = 1; k < B::Layout::kSteps; ++k) {
    Mma::template issue<true>(a, b, k, sums);
  }
}

// Issues one product and commits it; the result may be read after a `warpgroup_wait`.
template <class Mma, bool kAccumulate, class A, class B>
CUTE_DEVICE void issue_product(A const& a, B const& b, typename Mma::Sums& sums) {
  warpgroup_fence_operand(sums);
  warpgroup_arrive();
  multiply<Mma, kAccumulate>(a, b, sums);
  warpgroup_commit_batch();
}

// The same for the sum of two products.
template <class MmaFirst, class Mma, class AFirst, class BFirst, class A, class B>
CUTE_DEVICE void issue_sum(AFirst const& a_first, BFirst const& b_first, A const& a, B const& b,
                           typename Mma::Sums& sums) {
  warpgroup_fence_operand(sums);
  warpgroup_arrive();
  multiply<MmaFirst, false>(a_first, b_first, sums);
  multiply<Mma, true>(a, b, sums);
  warpgroup_commit_batch();
}

}  // namespace hattn::sm90
