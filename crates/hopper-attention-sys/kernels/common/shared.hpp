// Shared memory by its address there: a chunk of 16 bytes, or a word, in one access.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace hattn {

CUTE_DEVICE uint4 load_chunk(std::uint32_t address) {
  uint4 piece;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "r"(address)
               : "memory");
  return piece;
}

CUTE_DEVICE void store_chunk(std::uint32_t address, uint4 piece) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(piece.x), "r"(piece.y), "r"(piece.z),
               "r"(piece.w)
               : "memory");
}

// A word, read anew at each call.
template <class Word>
CUTE_DEVICE std::uint32_t read_word(Word const& from) {
  static_assert(sizeof(Word) == 4);
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(cute::cast_smem_ptr_to_uint(&from)) : "memory");
  return word;
}

}  // namespace hattn
