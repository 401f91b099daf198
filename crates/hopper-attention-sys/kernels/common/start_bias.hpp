// What S of a query begins with in a backward, beside -LSE.
#pragma once

#include "common/alibi.hpp"
#include "common/scalars.hpp"
#include "kernels.hpp"

namespace hattn {

// A part of ALiBi, where the row's kernel leaves it to that (sm90/bwd/alibi.hpp).
template <class Traits>
CUTE_DEVICE float start_bias(BwdParams const& params, int batch, int head, int query, int diagonal, int keys) {
  int const distance = Traits::start_distance(params, batch, head, query, diagonal, keys);
  return distance == 0
             ? 0.0F
             : static_cast<float>(-distance) * alibi_slope(params.alibi, batch, head, backward_factor(params));
}

}  // namespace hattn
