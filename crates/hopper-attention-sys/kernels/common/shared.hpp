// A chunk of 16 bytes of shared memory in one access, at an address in shared memory.
#pragma once

#include <cstdint>
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

}  // namespace hattn
