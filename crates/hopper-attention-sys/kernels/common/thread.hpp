// A thread's place in its CTA, and values that the compiler is made to compute where they are used.
//
// Registers are short in most kernels. What follows from the thread's index (addresses, rows, columns) is used seldom,
// yet the compiler would compute it once and keep it all through the loop. A value that comes out of an asm statement
// is a new one each time, and so is all that follows from it.
#pragma once

#include <cute/config.hpp>

namespace hattn {

// The thread's index in its CTA, as a new value at each call.
CUTE_DEVICE int thread_index_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The thread's index in its CTA; kAnew: as a new value at each call.
template <bool kAnew>
CUTE_DEVICE int thread_index() {
  if constexpr (kAnew) {
    return thread_index_anew();
  } else {
    return static_cast<int>(threadIdx.x);
  }
}

// The same value, as a new one.
CUTE_DEVICE int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Zero, unknown to the compiler.
CUTE_DEVICE int opaque_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

// The thread's warpgroup, or warp, in its CTA. It is the same in the whole warp; the shuffle tells the compiler so.
CUTE_DEVICE int warpgroup_index() { return __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0); }
CUTE_DEVICE int warp_index() { return __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0); }

// The dynamic shared memory of the CTA, laid out as a Storage.
template <class Storage>
CUTE_DEVICE Storage& shared_storage() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return *reinterpret_cast<Storage*>(shared);
}

}  // namespace hattn
