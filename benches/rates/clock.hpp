// Time inside a kernel, in both clocks: SM cycles say how much work a cycle does, nanoseconds beside them what a cycle
// was.
#pragma once

#include <cstdint>

namespace rates {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kMostWarps = 16;
// An SM's sub-partitions (SMSP): each issues one warp instruction a clock, and warps are dealt out to them in turn.
constexpr int kPartitions = 4;

struct Moment {
  long long cycles;
  long long ns;
};

__device__ __forceinline__ Moment now() {
  Moment moment;
  asm volatile("mov.u64 %0, %%clock64;\n\tmov.u64 %1, %%globaltimer;" : "=l"(moment.cycles), "=l"(moment.ns)::"memory");
  return moment;
}

// What a block adds to its own slot in global memory: launches on one stream add up, so that the clock of a long run is
// that of all of it.
struct Span {
  unsigned long long cycles;
  unsigned long long ns;
};

// When each warp of a block started and stopped; in shared memory.
struct Times {
  Moment start[kMostWarps];
  Moment stop[kMostWarps];

  __device__ void note(Moment from, Moment to) {
    if (threadIdx.x % kWarp == 0) {
      start[threadIdx.x / kWarp] = from;
      stop[threadIdx.x / kWarp] = to;
    }
  }

  // From the first start of warps [begin, end) to their last stop; by one thread, after a barrier.
  __device__ void add_to(Span& span, int begin, int end) const {
    Moment first = start[begin];
    Moment last = stop[begin];
#pragma unroll 1
    for (int warp = begin + 1; warp < end; ++warp) {
      first.cycles = min(first.cycles, start[warp].cycles);
      first.ns = min(first.ns, start[warp].ns);
      last.cycles = max(last.cycles, stop[warp].cycles);
      last.ns = max(last.ns, stop[warp].ns);
    }
    span.cycles += last.cycles - first.cycles;
    span.ns += last.ns - first.ns;
  }
};

}  // namespace rates
