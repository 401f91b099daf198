// Stands in for the kernels' interface: the types of params.rs that common/mask.hpp and common/visits.hpp name.
#pragma once

#include <cstdint>

namespace hattn {

enum class MaskClass : std::uint8_t { Full, Causal, Window };

struct MaskEdges {
  std::int32_t step;
  std::uint32_t multiplier;
  std::int32_t shift;
  std::int32_t prefix_last;
};

}  // namespace hattn
