// Words of global memory by which CTAs tell each other how far they are.
//
// A release makes everything that the thread has written before visible to a thread that acquires the word: the writes
// of other threads too, if a barrier stands between them and the release.
#pragma once

#include <cute/config.hpp>

namespace hattn {

// Word: int or unsigned.
template <class Word>
CUTE_DEVICE Word load_acquire(Word const* address) {
  Word value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

template <class Word>
CUTE_DEVICE Word load_relaxed(Word const* address) {
  Word value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Adds, and does not wait for the sum.
CUTE_DEVICE void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
CUTE_DEVICE void add_release(unsigned* address, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Adds, and gives what was there before. What others have released is visible afterwards.
CUTE_DEVICE int add_acquire_release(int* address, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

// Adds four numbers in one access, on sm_90 and later. `address` is a multiple of 16.
CUTE_DEVICE void add_four(float* address, float4 const& values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

// A flag is a word that is 0 until it is set, once.
CUTE_DEVICE void set_flag(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }

// Returns when the flag is set. The loop is in PTX so that the compiler sees one instruction without control flow.
CUTE_DEVICE void await_flag(int const* flag) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      ".reg .s32 word;\n"
      "again:\n"
      "ld.acquire.gpu.global.s32 word, [%0];\n"
      "setp.ne.s32 there, word, 0;\n"
      "@!there bra again;\n"
      "}\n" ::"l"(flag)
      : "memory");
}

}  // namespace hattn
