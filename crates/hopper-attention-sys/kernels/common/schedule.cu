// Makes the table of sequences (sequences.hpp), before the kernels that use it.
//
// 1. Read offsets. Whatever they are, a sequence lies within the tensor, and no two sequences overlap on a packed side:
//    an offset counts as the largest of those up to it, within [0, rows of the tensor].
// 2. Order the sequences by classes, four to a power of two: those with the longest tiles first. In which order those
//    of a class come changes no result. A class has a range of places, of tiles and of blocks. A sequence takes what
//    comes next of its class.
// 3. Write the record of each sequence, and list the record of each tile.
//
// It is a short kernel of which each step waits for the one before, and all other kernels wait for its end. It runs
// once, so that its code comes from memory, which takes much of its time: so there is little code. Up to 32 sequences
// take one warp, without barriers. Up to 1024 take one CTA, with a thread for each. Up to 1536 take one CTA, too, since
// a cluster's barriers cost 4 us. More take a cluster, where the GPU has them.
#include <cuda_runtime.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>
#include <cute/numeric/math.hpp>

#include "common/sequences.hpp"
#include "common/start.hpp"
#include "common/status.hpp"

namespace hattn {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kClasses = 128;
constexpr int kMostOfOneCta = 1536;  // sequences
constexpr int kMostCtas = 8;         // of a cluster, which every GPU with clusters has
constexpr unsigned kAll = 0xffffffffU;

// The offsets and lengths of one side.
struct Side {
  int const* offsets;  // or null: the side is dense
  int const* used;     // or null
  int rows;            // of the tensor (packed), or of a batch entry
  int most;            // that a sequence may have
};

struct Schedule {
  Side q;
  Side kv;
  ScheduleShape shape;
  SequenceTable table;
};

// Where a sequence begins and its room ends, and how many rows are used: of queries (x) and of keys (y).
struct Ends {
  int2 begin;
  int2 end;
  int2 used;

  CUTE_DEVICE static Ends read(Schedule const& launch, int index) {
    auto const read = [&](int const* words, int i, int other, int rows) {
      return words == nullptr ? other : cute::min(cute::max(words[i], 0), rows);
    };
    Side const& q = launch.q;
    Side const& kv = launch.kv;
    return {{read(q.offsets, index, 0, q.rows), read(kv.offsets, index, 0, kv.rows)},
            {read(q.offsets, index + 1, q.rows, q.rows), read(kv.offsets, index + 1, kv.rows, kv.rows)},
            {read(q.used, index, q.most, q.most), read(kv.used, index, kv.most, kv.most)}};
  }
  // `largest`: of the offsets before.
  CUTE_DEVICE void begin_behind(int2 const& largest) {
    begin = {cute::max(begin.x, largest.x), cute::max(begin.y, largest.y)};
    end = {cute::max(begin.x, end.x), cute::max(begin.y, end.y)};
  }
  CUTE_DEVICE int2 length() const { return {cute::min(used.x, end.x - begin.x), cute::min(used.y, end.y - begin.y)}; }
  CUTE_DEVICE Sequence record(int index, int tiles, int2 const& first) const {
    int2 const rows = length();
    return {first.x, tiles, index, first.y, begin.x, rows.x, begin.y, rows.y, end.x, end.y, {0, 0}};
  }
};

// The class of a length: smaller where it is longer.
CUTE_DEVICE int class_of(int length) {
  if (length < 4) {
    return kClasses - 1 - length;
  }
  int const power = 31 - __clz(length);
  return kClasses - 1 - (4 * power - 4 + (length >> (power - 2) & 3));
}

// The tiles of a sequence, and its blocks of queries.
CUTE_DEVICE int2 parts_of(ScheduleShape const& shape, int q_len, int kv_len) {
  int const tiles = ((shape.of_keys() ? kv_len : q_len) + shape.tile_rows - 1) / shape.tile_rows;
  return {tiles, shape.of_keys() ? (q_len + shape.block_rows - 1) / shape.block_rows : 0};
}

// The class of a sequence: smaller where its tiles take longer. Of keys, those with several tiles come before those
// with one, in half as many classes each.
CUTE_DEVICE int class_of_sequence(ScheduleShape const& shape, int q_len, int kv_len) {
  int const all = class_of(shape.of_keys() ? q_len : kv_len);
  return !shape.of_keys() ? all : all / 2 + (kv_len > shape.tile_rows ? 0 : kClasses / 2);
}

// Writes where the first sequence begins, or where the last one's room ends.
CUTE_DEVICE void note_ends(SequenceHeader& header, Sequence const& sequence, int batch) {
  if (sequence.index == 0) {
    header.q_begin = sequence.q_begin;
    header.kv_begin = sequence.kv_begin;
  }
  if (sequence.index == batch - 1) {
    header.q_end = sequence.q_end;
    header.kv_end = sequence.kv_end;
  }
}

// Writes a sequence's record.
CUTE_DEVICE void write_record(Schedule const& launch, int place, Sequence const& sequence) {
  launch.table.records()[place] = sequence;
  note_ends(*launch.table.header(), sequence, launch.shape.batch);
}

// `total`: tiles and blocks of a head.
CUTE_DEVICE void write_totals(Schedule const& launch, int2 const& total) {
  SequenceHeader& header = *launch.table.header();
  header.tiles = total.x * launch.shape.heads;
  header.counter = 0;
  header.blocks = total.y;
}

// The combination of the values of all threads before this one: of two values at a time, none of which is below 0;
// their sums or the largest. A function and loops, or there would be three times as much code.
__device__ __noinline__ int2 scan_before(int2 value, bool sums, int2* warp_totals) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  auto const combine = [&](int a, int b) { return sums ? a + b : cute::max(a, b); };
  int2 scanned = value;
  CUTE_NO_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    int2 const other{__shfl_up_sync(kAll, scanned.x, step), __shfl_up_sync(kAll, scanned.y, step)};
    if (lane >= step) {
      scanned = {combine(scanned.x, other.x), combine(scanned.y, other.y)};
    }
  }
  if (lane == 31) {
    warp_totals[warp] = scanned;
  }
  __syncthreads();
  int2 total = lane < warp ? warp_totals[lane] : int2{0, 0};
  CUTE_NO_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    total = {combine(total.x, __shfl_xor_sync(kAll, total.x, step)),
             combine(total.y, __shfl_xor_sync(kAll, total.y, step))};
  }
  int2 const before{__shfl_up_sync(kAll, scanned.x, 1), __shfl_up_sync(kAll, scanned.y, 1)};
  return lane == 0 ? total : int2{combine(total.x, before.x), combine(total.y, before.y)};
}

// Lists a place as that of `count` tiles from `first` on: each lane its own, and all lanes together those of a long
// sequence.
__device__ __noinline__ void write_list(int* list, int place, int first, int count) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  bool const is_long = count > 32;
  if (!is_long) {
    CUTE_NO_UNROLL
    for (int tile = 0; tile < count; ++tile) {
      list[first + tile] = place;
    }
  }
  CUTE_NO_UNROLL
  for (unsigned left = __ballot_sync(kAll, is_long); left != 0; left &= left - 1) {
    int const owner = __ffs(left) - 1;
    int const its_place = __shfl_sync(kAll, place, owner);
    int const its_first = __shfl_sync(kAll, first, owner);
    int const its_count = __shfl_sync(kAll, count, owner);
    CUTE_NO_UNROLL
    for (int tile = lane; tile < its_count; tile += 32) {
      list[its_first + tile] = its_place;
    }
  }
}
CUTE_DEVICE void write_lists(Schedule const& launch, int place, int2 const& first, int2 const& parts) {
  ScheduleShape const& shape = launch.shape;
  CUTE_NO_UNROLL
  for (int list = 0; list < (shape.of_keys() ? 2 : 1); ++list) {
    write_list(list == 0 ? launch.table.list() : launch.table.block_list(shape.list_size), place,
               list == 0 ? first.x : first.y, list == 0 ? parts.x : parts.y);
  }
}

// For no more sequences than a warp has lanes. Each lane compares its sequence with all others.
__global__ void __launch_bounds__(32, 1) schedule_warp(__grid_constant__ Schedule const launch) {
  let_next_start();
  ScheduleShape const& shape = launch.shape;
  int const lane = static_cast<int>(threadIdx.x);
  int const batch = shape.batch;
  Ends ends = Ends::read(launch, cute::min(lane, batch - 1));
  int2 largest = ends.begin;  // of the offsets up to this lane's
  CUTE_NO_UNROLL
  for (int step = 1; step < batch; step *= 2) {
    int2 const other{__shfl_up_sync(kAll, largest.x, step), __shfl_up_sync(kAll, largest.y, step)};
    largest = {cute::max(largest.x, other.x), cute::max(largest.y, other.y)};
  }
  ends.begin_behind(largest);
  int2 const length = ends.length();
  int2 const parts = parts_of(shape, length.x, length.y);
  int const rank = class_of_sequence(shape, length.x, length.y) * 32 + lane;
  int place = 0;
  int2 first{0, 0};
  int2 total{0, 0};
  CUTE_NO_UNROLL
  for (int i = 0; i < batch; ++i) {
    int const other = __shfl_sync(kAll, rank, i);
    int2 const its{__shfl_sync(kAll, parts.x, i), __shfl_sync(kAll, parts.y, i)};
    total = {total.x + its.x, total.y + its.y};
    if (other < rank) {
      ++place;
      first = {first.x + its.x, first.y + its.y};
    }
  }
  if (lane < batch) {
    write_record(launch, place, ends.record(lane, parts.x, first));
  }
  if (lane == 0) {
    write_totals(launch, total);
  }
  bool const exists = lane < batch;
  write_lists(launch, place, first, exists ? parts : int2{0, 0});
}

// Of any number of sequences: what a CTA knows of its own.
struct Shared {
  // Of each class: how many sequences, tiles and blocks. Then where the next of them begin.
  int counts[3][kClasses];
  int2 warp_totals[kWarps];
  int2 largest;  // of the offsets
};

// A value of another CTA's shared memory.
CUTE_DEVICE int read_shared(int const& at, int cta) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  int value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];"
               : "=r"(value)
               : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&at), cta))
               : "memory");
  return value;
#else
  return at;  // there is one CTA
#endif
}

// A barrier of all CTAs.
template <bool kMany>
CUTE_DEVICE void sync_ctas() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (kMany && gridDim.x > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// A thread has one sequence, or kMany: several neighbouring ones. There may be several CTAs then, and records wait
// behind the table between the steps.
template <bool kMany>
__global__ void __launch_bounds__(kThreads, 1) schedule(__grid_constant__ Schedule const launch) {
  __shared__ Shared shared;
  let_next_start();
  ScheduleShape const& shape = launch.shape;
  int const batch = shape.batch;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread % 32;
  int const cta = kMany ? static_cast<int>(blockIdx.x) : 0;
  int const ctas = kMany ? static_cast<int>(gridDim.x) : 1;
  int const threads = ctas * static_cast<int>(blockDim.x);
  int const each = kMany ? (batch + threads - 1) / threads : 1;
  int const first = cute::min((cta * static_cast<int>(blockDim.x) + thread) * each, batch);
  int const last = cute::min(first + each, batch);
  Sequence* const waiting = reinterpret_cast<Sequence*>(launch.table.block_list(shape.list_size) +
                                                        (std::int64_t{shape.block_list_size} + 3) / 4 * 4);
  for (int i = thread; i < 3 * kClasses; i += static_cast<int>(blockDim.x)) {
    (&shared.counts[0][0])[i] = 0;
  }

  Ends ends = Ends::read(launch, cute::min(first, batch - 1));
  int2 largest = ends.begin;
  if constexpr (kMany) {
    CUTE_NO_UNROLL
    for (int i = first + 1; i < last; ++i) {
      int2 const begin = Ends::read(launch, i).begin;
      largest = {cute::max(largest.x, begin.x), cute::max(largest.y, begin.y)};
    }
  }
  int2 before = scan_before(largest, false, shared.warp_totals);
  if constexpr (kMany) {
    if (thread == static_cast<int>(blockDim.x) - 1) {
      shared.largest = {cute::max(before.x, largest.x), cute::max(before.y, largest.y)};
    }
    sync_ctas<kMany>();
    CUTE_NO_UNROLL
    for (int other = 0; other < cta; ++other) {
      before = {cute::max(before.x, read_shared(shared.largest.x, other)),
                cute::max(before.y, read_shared(shared.largest.y, other))};
    }
  }

  Sequence sequence{};
  CUTE_NO_UNROLL
  for (int i = first; i < first + each; ++i) {
    bool const exists = i < last;
    if constexpr (kMany) {
      ends = Ends::read(launch, cute::min(i, batch - 1));
    }
    ends.begin_behind(before);
    before = ends.begin;  // the largest offset up to this one
    int2 const length = ends.length();
    int2 const parts = parts_of(shape, length.x, length.y);
    int const length_class = class_of_sequence(shape, length.x, length.y);
    // One lane counts for all of its warp that are of its class and as long: equal lengths are common.
    std::uint64_t const kind = static_cast<std::uint64_t>(length_class) | static_cast<std::uint64_t>(parts.x) << 8 |
                               static_cast<std::uint64_t>(parts.y) << 36;
    unsigned const alike = __match_any_sync(kAll, exists ? kind : ~std::uint64_t{0});
    int const leader = __ffs(alike) - 1;
    int const number = __popc(alike & ((1U << lane) - 1));
    int place = 0;
    int2 begin{0, 0};
    if (exists && lane == leader) {
      int const count = __popc(alike);
      place = atomicAdd(&shared.counts[0][length_class], count);
      begin = {atomicAdd(&shared.counts[1][length_class], count * parts.x),
               atomicAdd(&shared.counts[2][length_class], count * parts.y)};
    }
    place = __shfl_sync(kAll, place, leader) + number;
    begin = {__shfl_sync(kAll, begin.x, leader) + number * parts.x,
             __shfl_sync(kAll, begin.y, leader) + number * parts.y};
    sequence = ends.record(i, parts.x, begin);
    sequence.unused[0] = length_class;
    sequence.unused[1] = place;
    if (kMany && exists) {
      waiting[i] = sequence;
    }
  }

  // Where this CTA's sequences of each class begin.
  sync_ctas<kMany>();
  int all[3] = {0, 0, 0};
  int earlier[3] = {0, 0, 0};
  if (thread < kClasses) {
    CUTE_UNROLL
    for (int i = 0; i < 3; ++i) {
      if constexpr (kMany) {
        CUTE_NO_UNROLL
        for (int other = 0; other < ctas; ++other) {
          int const count = read_shared(shared.counts[i][thread], other);
          all[i] += count;
          earlier[i] += other < cta ? count : 0;
        }
      } else {
        all[i] = shared.counts[i][thread];
      }
    }
  }
  int2 const start = scan_before({all[0], all[1]}, true, shared.warp_totals);
  sync_ctas<kMany>();  // all counts are read, and so are the totals of warps
  int const start_block = scan_before({all[2], 0}, true, shared.warp_totals).x;
  if (thread < kClasses) {
    shared.counts[0][thread] = start.x + earlier[0];
    shared.counts[1][thread] = start.y + earlier[1];
    shared.counts[2][thread] = start_block + earlier[2];
  }
  if (cta == 0 && thread == kClasses - 1) {
    write_totals(launch, {start.y + all[1], start_block + all[2]});
  }
  __syncthreads();

  CUTE_NO_UNROLL
  for (int i = first; i < first + each; ++i) {
    bool const exists = i < last;
    if (kMany && exists) {
      sequence = waiting[i];
    }
    int const length_class = sequence.unused[0];
    int const place = shared.counts[0][length_class] + sequence.unused[1];
    sequence.first_tile += shared.counts[1][length_class];
    sequence.first_block += shared.counts[2][length_class];
    if (exists) {
      write_record(launch, place, sequence);
    }
    int2 const parts = parts_of(shape, sequence.q_len, sequence.kv_len);
    write_lists(launch, place, {sequence.first_tile, sequence.first_block}, exists ? parts : int2{0, 0});
  }
}

bool has_clusters() {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

}  // namespace

Status prepare_schedule() noexcept {
  Status status = load_kernel(schedule_warp);
  status = is_ok(status) ? load_kernel(schedule<false>) : status;
  return is_ok(status) ? load_kernel(schedule<true>) : status;
}

Status launch_schedule(Sequences const& sequences, ScheduleShape const& shape, CUstream_st* stream) noexcept {
  auto const words = [](std::uint64_t address) { return reinterpret_cast<int const*>(address); };
  Schedule const launch{
      {words(sequences.cu_seqlens_q), words(sequences.seqused_q), shape.seqlen_q, sequences.most_queries},
      {words(sequences.cu_seqlens_kv), words(sequences.seqused_kv), shape.seqlen_kv, sequences.most_keys},
      shape,
      {sequences.table, shape.batch}};
  if (shape.batch <= 32) {
    schedule_warp<<<1, 32, 0, stream>>>(launch);
  } else if (shape.batch <= kThreads) {
    schedule<false><<<1, cute::max(kClasses, (shape.batch + 31) / 32 * 32), 0, stream>>>(launch);
  } else {
    int const ctas = shape.batch > kMostOfOneCta && has_clusters() ? kMostCtas : 1;
    start_kernel({ctas, kThreads, 0, stream, ctas}, schedule<true>, launch);
  }
  return to_status(cudaGetLastError());
}

}  // namespace hattn
