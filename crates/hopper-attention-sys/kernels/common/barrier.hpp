// Barriers and proxy fences as thin names over PTX: what a warp-specialised kernel synchronises with.
// Arch-neutral in the sense of design.md: nothing here knows a tile or an arch folder (mbarriers exist from sm_80 on).
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace hattn {

// A transaction barrier in shared memory. Waiters poll; the phase bit flips each time all arrivals and bytes are in.
struct Mbarrier {
  std::uint64_t word;

  CUTE_DEVICE void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(&word)), "r"(arrivals));
  }

  CUTE_DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(cute::cast_smem_ptr_to_uint(&word)) : "memory");
  }

  CUTE_DEVICE void arrive_expect_bytes(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(&word)),
                 "r"(bytes)
                 : "memory");
  }

  // Returns when the phase with this parity has completed. The loop is in PTX so that the compiler sees one instruction
  // without control flow: accumulators may be in flight across it.
  CUTE_DEVICE void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra passed;\n"
        "bra again;\n"
        "passed:\n"
        "}\n" ::"r"(cute::cast_smem_ptr_to_uint(&word)),
        "r"(parity)
        : "memory");
  }

  // Whether it has completed by now: asked early, the answer is there when it is wanted, and `wait_unless` need not
  // ask.
  CUTE_DEVICE bool test(std::uint32_t parity) {
    std::uint32_t passed;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(passed)
        : "r"(cute::cast_smem_ptr_to_uint(&word)), "r"(parity)
        : "memory");
    return passed != 0;
  }

  // `wait`, with nothing to wait for where `test` said so.
  CUTE_DEVICE void wait_unless(bool passed, std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "setp.ne.u32 done, %2, 0;\n"
        "again:\n"
        "@done bra passed;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "bra again;\n"
        "passed:\n"
        "}\n" ::"r"(cute::cast_smem_ptr_to_uint(&word)),
        "r"(parity), "r"(static_cast<std::uint32_t>(passed))
        : "memory");
  }
};

// Initialises every barrier of an array.
template <int kCount>
CUTE_DEVICE void init_barriers(Mbarrier (&barriers)[kCount], std::uint32_t arrivals) {
  for (Mbarrier& barrier : barriers) {
    barrier.init(arrivals);
  }
}

// Makes the initialised barriers visible to the copy engine.
CUTE_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders this thread's ordinary shared-memory writes before later accesses by the tensor cores and the copy engine.
CUTE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers: `threads` counts those that sync and those that only arrive.
CUTE_DEVICE void named_barrier_sync(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CUTE_DEVICE void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Position in a ring of kStages buffers, with the parity of the current lap. A consumer waits for `parity`, a producer
// for its opposite on the empty barriers (which lets the first lap through).
template <int kStages>
struct RingPosition {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;

  // The position of buffer `count` of all that pass through the ring.
  CUTE_DEVICE static RingPosition of(std::uint32_t count) { return {count % kStages, count / kStages % 2}; }

  CUTE_DEVICE void advance() {
    if constexpr (kStages == 2) {
      parity ^= stage;
      stage ^= 1;
    } else {
      ++stage;
      if (stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }

  // The position before this one.
  CUTE_DEVICE RingPosition before() const {
    bool const first = stage == 0;
    return {first ? kStages - 1 : stage - 1, first ? parity ^ 1 : parity};
  }

  // The same in the whole warp already, but after a loop of run-time length ptxas no longer knows, and would move every
  // descriptor that depends on it from ordinary registers to uniform ones, in every block.
  CUTE_DEVICE void make_uniform() {
    stage = __shfl_sync(0xffffffffU, stage, 0);
    parity = __shfl_sync(0xffffffffU, parity, 0);
  }
};

}  // namespace hattn
