// A matrix product of one warpgroup, issued as a group of its own.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/tensor.hpp>

namespace hattn::sm90 {

// The k-steps of a product, without a fence.
template <bool kAccumulate, class Mma, class A, class B, class C>
CUTE_DEVICE void multiply(Mma& mma, A const& a, B const& b, C& c) {
  mma.accumulate_ = kAccumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
    mma.accumulate_ = cute::SM90::GMMA::ScaleOut::One;
  }
}

// Issues one product and commits it; the result may be read after a `warpgroup_wait`.
template <bool kAccumulate, class Mma, class A, class B, class C>
CUTE_DEVICE void issue_product(Mma& mma, A const& a, B const& b, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  multiply<kAccumulate>(mma, a, b, c);
  cute::warpgroup_commit_batch();
}

// The same for the sum of two products.
template <class MmaFirst, class AFirst, class BFirst, class Mma, class A, class B, class C>
CUTE_DEVICE void issue_sum(MmaFirst& mma_first, AFirst const& a_first, BFirst const& b_first, Mma& mma, A const& a,
                           B const& b, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  multiply<false>(mma_first, a_first, b_first, c);
  multiply<true>(mma, a, b, c);
  cute::warpgroup_commit_batch();
}

}  // namespace hattn::sm90
