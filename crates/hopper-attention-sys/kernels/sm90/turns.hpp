// Turns at issuing products (ping-pong), which the consumer warpgroups of a forward take: one warpgroup exponentiates
// while another multiplies.
#pragma once

#include "common/barrier.hpp"

namespace hattn::sm90 {

// Named barriers 1 .. kConsumers. A warpgroup waits for its turn at the barrier of its own number, at which the
// warpgroup before it in the round arrives.
//
// kTaken: whether there are turns at all. kNextAnew: whether the next warpgroup's number, of two, is made at each pass;
// else the compiler keeps it in a register.
template <int kConsumers, bool kTaken = true, bool kNextAnew = false>
struct Turns {
  static_assert(!(kTaken && kNextAnew) || kConsumers == 2);

  // Waits until it is this warpgroup's turn.
  CUTE_DEVICE static void wait(int consumer) {
    if constexpr (kTaken) {
      named_barrier_sync(number(consumer), 256);
    }
  }

  // Passes the turn to the next warpgroup.
  CUTE_DEVICE static void pass(int consumer) {
    if constexpr (kTaken) {
      int const own = number(consumer);
      named_barrier_arrive(kNextAnew ? 3 - own : own == kConsumers ? 1 : own + 1, 256);
    }
  }

  // At the beginning: the first turn is the first warpgroup's, to which the last one passes it.
  CUTE_DEVICE static void begin(int consumer) {
    if (consumer + 1 == kConsumers) {
      pass(consumer);
    }
  }

 private:
  // Two consumers have a register for that number. Three make it of the uniform `consumer`, which costs an instruction.
  CUTE_DEVICE static int number(int consumer) {
    return kConsumers == 2 ? static_cast<int>(threadIdx.x) / 128 : consumer + 1;
  }
};

}  // namespace hattn::sm90
