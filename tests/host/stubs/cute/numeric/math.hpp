// Stands in for CuTe's header of this name, so that a host compiler takes common/mask.hpp and common/visits.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#define CUTE_DEVICE inline
#define CUTE_UNROLL

inline std::uint32_t __umulhi(std::uint32_t a, std::uint32_t b) { return (std::uint64_t{a} * b) >> 32; }

namespace cute {

using std::max;
using std::min;

template <class T>
using remove_cvref_t = std::remove_cv_t<std::remove_reference_t<T>>;

}  // namespace cute
