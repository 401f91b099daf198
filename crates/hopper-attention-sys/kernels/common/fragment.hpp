// A thread's elements of a tile, in registers.
#pragma once

#include <cute/config.hpp>

namespace hattn {

// kCount elements in the order of the product that makes them or takes them, kStrips times. Every index must be known
// at compile time (loops are unrolled), or the compiler puts the array in local memory.
template <class Element, int kCount, int kStrips = 1>
struct Fragment {
  alignas(16) Element elements[kStrips * kCount];

  CUTE_DEVICE Element& operator()(int i) { return elements[i]; }
  CUTE_DEVICE Element const& operator()(int i) const { return elements[i]; }
  CUTE_DEVICE Element& operator()(int i, int strip) { return elements[strip * kCount + i]; }
  CUTE_DEVICE Element const& operator()(int i, int strip) const { return elements[strip * kCount + i]; }
  CUTE_HOST_DEVICE static constexpr int size() { return kStrips * kCount; }

  // The same registers, as a fragment of the first kFirst elements from one on.
  template <int kFirst>
  CUTE_DEVICE Fragment<Element, kFirst>& part(int from) {
    return reinterpret_cast<Fragment<Element, kFirst>&>(elements[from]);
  }
  CUTE_DEVICE Fragment<Element, kCount>& strip(int index) { return part<kCount>(index * kCount); }
};

template <class Element, int kCount, int kStrips>
CUTE_DEVICE void clear(Fragment<Element, kCount, kStrips>& fragment) {
  CUTE_UNROLL
  for (int i = 0; i < fragment.size(); ++i) {
    fragment(i) = Element{};
  }
}

// Multiplies the two rows of an accumulator of a thread: of each four elements, two are of each row.
template <int kCount>
CUTE_DEVICE void multiply_rows(Fragment<float, kCount>& sums, float const (&factors)[2]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    sums(i) *= factors[i / 2 % 2];
  }
}

// The same registers as elements of another type.
template <class To, class From, int kCount>
CUTE_DEVICE Fragment<To, kCount * sizeof(From) / sizeof(To)>& recast(Fragment<From, kCount>& fragment) {
  return reinterpret_cast<Fragment<To, kCount * sizeof(From) / sizeof(To)>&>(fragment);
}
template <class To, class From, int kCount>
CUTE_DEVICE Fragment<To, kCount * sizeof(From) / sizeof(To)> const& recast(Fragment<From, kCount> const& fragment) {
  return reinterpret_cast<Fragment<To, kCount * sizeof(From) / sizeof(To)> const&>(fragment);
}

}  // namespace hattn
