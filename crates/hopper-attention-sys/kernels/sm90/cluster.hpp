// CTAs of a cluster that work on one tile, and read each other's shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace hattn::sm90 {

// The traits of a row's second kernel, in which the CTAs of a cluster share a tile.
template <class Traits>
struct SharedTraits : Traits {
  static constexpr bool kShares = true;
};

// The index of this CTA's share of a tile, and the number of shares.
CUTE_DEVICE int cluster_share() { return static_cast<int>(cute::block_rank_in_cluster()); }
CUTE_DEVICE int cluster_shares() { return static_cast<int>(cute::cluster_shape().x); }

// What lies at an address of this CTA's shared memory, in another CTA of the cluster.
CUTE_DEVICE float4 read_shared(float4 const& at, int cta) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&at), cta)));
  return value;
}
CUTE_DEVICE float2 read_shared(float2 const& at, int cta) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&at), cta)));
  return value;
}

// Two barriers of the cluster keep its CTAs together: one before the others' sums are read, one before a CTA ends,
// since with it goes its shared memory. Threads that have ended count as arrived.
CUTE_DEVICE void await_sums() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// No fence: nothing is handed over here. It is called after all that was read has been used: a thread's sums and
// shuffles wait for the values, and its stores come after them. So no read is under way any more.
// tests/tests/disassembly.rs holds the machine code to that order.
CUTE_DEVICE void await_readers() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace hattn::sm90
