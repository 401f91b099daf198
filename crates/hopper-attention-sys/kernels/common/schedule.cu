// Makes the table of sequences (sequences.hpp), before the kernels that use it.
//
// 1. Read offsets. Whatever they are, a sequence lies within the tensor, and no two sequences overlap on a packed side:
//    an offset counts as the largest of those up to it, within [0, rows of the tensor].
// 2. Order the sequences, those with the longest tiles first: a counting sort by classes, four to a power of two. In
//    which order those of a class come changes no result.
// 3. Sum up their tiles, and list the record of each tile.
//
// A thread has neighbouring sequences, as many as are needed for all, so that a sum over all is one scan of the CTA. It
// is a short kernel of which each step waits for the one before, and all other kernels wait for its end. Where there
// are many sequences, the writing takes longest: then several CTAs do all of the rest alike, and each writes a part
// (one CTA where they do not fit into shared memory).
#include <cuda_runtime.h>

#include <cute/numeric/math.hpp>

#include "common/sequences.hpp"
#include "common/start.hpp"
#include "common/status.hpp"

namespace hattn {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kClasses = 128;
constexpr unsigned kAll = 0xffffffffU;

// The offsets and lengths of one side.
struct Side {
  int const* offsets;  // or null: the side is dense
  int const* used;     // or null
  int rows;            // of the tensor (packed), or of a batch entry

  CUTE_DEVICE bool packed() const { return offsets != nullptr; }
  // The length of sequence `i`, which has room for `most` rows.
  CUTE_DEVICE int length(int i, int most) const {
    return used == nullptr ? most : cute::min(cute::max(used[i], 0), most);
  }
};

struct Schedule {
  Side q;
  Side kv;
  ScheduleShape shape;
  SequenceTable table;
  bool keeps_in_table;  // what else lies in shared memory
};

// What is kept of each sequence while the table is made.
struct Kept {
  int* q_offset;     // [batch + 1]
  int* kv_offset;    // [batch + 1]
  int* place;        // [batch]: in the order
  int* first_tile;   // [batch], by places
  int* first_block;  // [batch], by places

  CUTE_DEVICE static Kept at(int* words, int batch) {
    return {words, words + batch + 1, words + 2 * (batch + 1), words + 3 * batch + 2, words + 4 * batch + 2};
  }
};
std::size_t kept_bytes(int batch) { return sizeof(int) * (5 * static_cast<std::size_t>(batch) + 2); }

struct Shared {
  int counts[kWarps][kClasses];  // of the sequences of each warp; then where those begin in the order
  int2 warp_totals[kWarps];
  int2 total;  // tiles and blocks
};

// The sequences of a side, one after the other.
struct SideReader {
  Side const& side;
  int const* offsets;
  int end;  // of the sequence before

  // `before`: the largest of the offsets before that of sequence `first`.
  CUTE_DEVICE SideReader(Side const& side, int const* offsets, int first, int before)
      : side{side}, offsets{offsets}, end{side.packed() ? cute::max(before, offsets[first]) : 0} {}

  CUTE_DEVICE void next(int i, int& begin, int& length, int& room_end) {
    begin = end;
    room_end = side.rows;
    if (side.packed()) {
      end = cute::max(end, offsets[i + 1]);
      room_end = end;
    }
    length = side.length(i, room_end - begin);
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

// The combination of the values of all threads before this one: of two values at a time, none of which is below 0.
template <class Combine>
CUTE_DEVICE int2 scan_before(int2 const& value, int2 (&warp_totals)[kWarps], Combine const& combine) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int2 scanned = value;
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    int2 const other{__shfl_up_sync(kAll, scanned.x, step), __shfl_up_sync(kAll, scanned.y, step)};
    scanned.x = lane >= step ? combine(scanned.x, other.x) : scanned.x;
    scanned.y = lane >= step ? combine(scanned.y, other.y) : scanned.y;
  }
  if (lane == 31) {
    warp_totals[warp] = scanned;
  }
  __syncthreads();
  int2 total = lane < warp ? warp_totals[lane] : int2{0, 0};
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    total.x = combine(total.x, __shfl_xor_sync(kAll, total.x, step));
    total.y = combine(total.y, __shfl_xor_sync(kAll, total.y, step));
  }
  int2 const before{__shfl_up_sync(kAll, scanned.x, 1), __shfl_up_sync(kAll, scanned.y, 1)};
  return lane == 0 ? total : int2{combine(total.x, before.x), combine(total.y, before.y)};
}

// Writes the record of each tile of a head: of tiles `thread`, `thread + threads` and so on.
CUTE_DEVICE void write_list(int* list, int total, int const* first_tile, int batch, int thread, int threads) {
  CUTE_NO_UNROLL
  for (int tile = thread; tile < total; tile += threads) {
    // The last record that begins at or before the tile has it.
    int low = 0;
    CUTE_NO_UNROLL
    for (int size = batch; size > 1;) {
      int const half = size / 2;
      low += first_tile[low + half] <= tile ? half : 0;
      size -= half;
    }
    list[tile] = low;
  }
}

// Makes of counts the places where the sequences of a warp and a class begin.
CUTE_DEVICE void begin_classes(Shared& shared) {
  int const thread = static_cast<int>(threadIdx.x);
  int of_warp[kWarps];
  int sum = 0;
  if (thread < kClasses) {
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      of_warp[warp] = shared.counts[warp][thread];
    }
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      int const count = of_warp[warp];
      of_warp[warp] = sum;
      sum += count;
    }
  }
  int const start = scan_before({sum, 0}, shared.warp_totals, [](int a, int b) { return a + b; }).x;
  if (thread < kClasses) {
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) {
      shared.counts[warp][thread] = start + of_warp[warp];
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1) schedule(__grid_constant__ Schedule const launch) {
  extern __shared__ int dynamic[];
  __shared__ Shared shared;
  let_next_start();
  Side const& q = launch.q;
  Side const& kv = launch.kv;
  ScheduleShape const& shape = launch.shape;
  int const batch = shape.batch;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread % 32;
  int const warp = thread / 32;
  Kept const kept = Kept::at(
      launch.keeps_in_table ? launch.table.block_list(shape.list_size) + (shape.block_list_size + 3) / 4 * 4 : dynamic,
      batch);

  auto const within = [](int offset, int rows) { return cute::min(cute::max(offset, 0), rows); };
  for (int i = thread; i <= batch; i += kThreads) {
    if (q.packed()) {
      kept.q_offset[i] = within(q.offsets[i], q.rows);
    }
    if (kv.packed()) {
      kept.kv_offset[i] = within(kv.offsets[i], kv.rows);
    }
  }
  for (int i = thread; i < kWarps * kClasses; i += kThreads) {
    (&shared.counts[0][0])[i] = 0;
  }
  __syncthreads();

  int const each = (batch + kThreads - 1) / kThreads;
  int const first = cute::min(thread * each, batch);
  int const last = cute::min(first + each, batch);
  int2 largest{0, 0};
  for (int i = first; i < last; ++i) {
    largest.x = q.packed() ? cute::max(largest.x, kept.q_offset[i]) : 0;
    largest.y = kv.packed() ? cute::max(largest.y, kept.kv_offset[i]) : 0;
  }
  int2 const before = scan_before(largest, shared.warp_totals, [](int a, int b) { return cute::max(a, b); });

  // Calls `use` for each sequence of this thread, and without one as often as other threads have more.
  auto const for_each = [&](auto const& use) {
    int const from = cute::min(first, batch - 1);
    SideReader read_q{q, kept.q_offset, from, before.x};
    SideReader read_kv{kv, kept.kv_offset, from, before.y};
    for (int i = first; i < first + each; ++i) {
      Sequence sequence{};
      sequence.index = -1;
      if (i < last) {
        sequence.index = i;
        read_q.next(i, sequence.q_begin, sequence.q_len, sequence.q_end);
        read_kv.next(i, sequence.kv_begin, sequence.kv_len, sequence.kv_end);
        sequence.tiles = parts_of(shape, sequence.q_len, sequence.kv_len).x;
      }
      use(sequence);
    }
  };
  // Calls `use(sequence, count)` with a number of sequences of the warp and the class that come before it.
  auto const for_each_counted = [&](auto const& use) {
    for_each([&](Sequence const& sequence) {
      bool const exists = sequence.index >= 0;
      int const length_class = exists ? class_of_sequence(shape, sequence.q_len, sequence.kv_len) : -1;
      unsigned const alike = __match_any_sync(kAll, length_class);
      int* const count = &shared.counts[warp][cute::max(length_class, 0)];
      int const so_far = *count;
      __syncwarp();
      if (exists && lane == __ffs(alike) - 1) {
        *count = so_far + __popc(alike);
      }
      __syncwarp();
      if (exists) {
        use(sequence, so_far + __popc(alike & ((1U << lane) - 1)));
      }
    });
  };
  for_each_counted([](Sequence const&, int) {});
  __syncthreads();
  begin_classes(shared);
  for_each_counted([&](Sequence const& sequence, int place) {
    kept.place[sequence.index] = place;
    kept.first_tile[place] = sequence.tiles;
    kept.first_block[place] = parts_of(shape, sequence.q_len, sequence.kv_len).y;
  });
  __syncthreads();

  int2 sum{0, 0};
  for (int i = first; i < last; ++i) {
    sum.x += kept.first_tile[i];
    sum.y += kept.first_block[i];
  }
  int2 start = scan_before(sum, shared.warp_totals, [](int a, int b) { return a + b; });
  for (int i = first; i < last; ++i) {
    int2 const parts{kept.first_tile[i], kept.first_block[i]};
    kept.first_tile[i] = start.x;
    kept.first_block[i] = start.y;
    start.x += parts.x;
    start.y += parts.y;
  }
  if (thread == kThreads - 1) {
    shared.total = start;
  }
  __syncthreads();

  int const cta = static_cast<int>(blockIdx.x);
  int const ctas = static_cast<int>(gridDim.x);
  if (warp % ctas == cta) {
    Sequence* const records = launch.table.records();
    for_each([&](Sequence& sequence) {
      if (sequence.index >= 0) {
        int const place = kept.place[sequence.index];
        sequence.first_tile = kept.first_tile[place];
        sequence.first_block = kept.first_block[place];
        records[place] = sequence;
        note_ends(*launch.table.header(), sequence, batch);
      }
    });
  }
  write_list(launch.table.list(), shared.total.x, kept.first_tile, batch, cta * kThreads + thread, ctas * kThreads);
  write_list(launch.table.block_list(shape.list_size), shared.total.y, kept.first_block, batch, cta * kThreads + thread,
             ctas * kThreads);
  if (cta == 0 && thread == 0) {
    SequenceHeader& header = *launch.table.header();
    header.tiles = shared.total.x * shape.heads;
    header.counter = 0;
    header.blocks = shared.total.y;
  }
}

// The same for no more sequences than threads, which is the common case. The kernel runs once and its code comes from
// memory, which takes most of its time: so there is little code. Sequences of a class come in any order.
struct FewShared {
  int class_start[kClasses];
  int first_tile[kThreads];   // by places
  int first_block[kThreads];  // by places
  int2 warp_totals[kWarps];
  int2 total;
};

// As scan_before, of sums or of the largest. A function and loops, or there would be three times as much code.
__device__ __noinline__ int2 scan_few(int2 value, bool sums, int2* warp_totals) {
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

__global__ void __launch_bounds__(kThreads, 1) schedule_few(__grid_constant__ Schedule const launch) {
  __shared__ FewShared shared;
  let_next_start();
  ScheduleShape const& shape = launch.shape;
  int const thread = static_cast<int>(threadIdx.x);
  int const batch = shape.batch;
  bool const exists = thread < batch;
  int const index = cute::min(thread, batch - 1);
  if (thread < kClasses) {
    shared.class_start[thread] = 0;
  }
  auto const read = [&](int const* words, int i, int other, int rows) {
    return words == nullptr ? other : cute::min(cute::max(words[i], 0), rows);
  };
  Side const& q = launch.q;
  Side const& kv = launch.kv;
  int2 begin{read(q.offsets, index, 0, q.rows), read(kv.offsets, index, 0, kv.rows)};
  int2 end{read(q.offsets, index + 1, q.rows, q.rows), read(kv.offsets, index + 1, kv.rows, kv.rows)};
  int2 const used{read(q.used, index, q.rows, q.rows), read(kv.used, index, kv.rows, kv.rows)};
  int2 const before = scan_few(begin, false, shared.warp_totals);
  begin = {cute::max(begin.x, before.x), cute::max(begin.y, before.y)};
  end = {cute::max(begin.x, end.x), cute::max(begin.y, end.y)};
  int2 const length{cute::min(used.x, end.x - begin.x), cute::min(used.y, end.y - begin.y)};
  int2 const parts = parts_of(shape, length.x, length.y);
  int const length_class = class_of_sequence(shape, length.x, length.y);
  int place = 0;
  if (exists) {
    place = atomicAdd(&shared.class_start[length_class], 1);
  }
  __syncthreads();
  int const count = thread < kClasses ? shared.class_start[thread] : 0;
  int const class_start = scan_few({count, 0}, true, shared.warp_totals).x;
  if (thread < kClasses) {
    shared.class_start[thread] = class_start;
  }
  __syncthreads();
  if (exists) {
    place += shared.class_start[length_class];
    shared.first_tile[place] = parts.x;
    shared.first_block[place] = parts.y;
  }
  __syncthreads();
  int2 const placed = exists ? int2{shared.first_tile[thread], shared.first_block[thread]} : int2{0, 0};
  int2 const first = scan_few(placed, true, shared.warp_totals);
  shared.first_tile[thread] = first.x;
  shared.first_block[thread] = first.y;
  if (thread == static_cast<int>(blockDim.x) - 1) {
    shared.total = {first.x + placed.x, first.y + placed.y};
    SequenceHeader& header = *launch.table.header();
    header.tiles = shared.total.x * shape.heads;
    header.counter = 0;
    header.blocks = shared.total.y;
  }
  __syncthreads();
  if (exists) {
    Sequence const sequence{shared.first_tile[place],
                            parts.x,
                            thread,
                            shared.first_block[place],
                            begin.x,
                            length.x,
                            begin.y,
                            length.y,
                            end.x,
                            end.y,
                            {0, 0}};
    launch.table.records()[place] = sequence;
    note_ends(*launch.table.header(), sequence, batch);
  }
  CUTE_NO_UNROLL
  for (int list = 0; list < (shape.of_keys() ? 2 : 1); ++list) {
    write_list(list == 0 ? launch.table.list() : launch.table.block_list(shape.list_size),
               list == 0 ? shared.total.x : shared.total.y, list == 0 ? shared.first_tile : shared.first_block, batch,
               thread, static_cast<int>(blockDim.x));
  }
}

constexpr int kMostInShared = 10240;  // sequences

}  // namespace

Status prepare_schedule() noexcept {
  Status const status = load_kernel(schedule_few);
  return !is_ok(status) ? status
                        : to_status(cudaFuncSetAttribute(schedule, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                         static_cast<int>(kept_bytes(kMostInShared))));
}

Status launch_schedule(Sequences const& sequences, ScheduleShape const& shape, CUstream_st* stream) noexcept {
  auto const words = [](std::uint64_t address) { return reinterpret_cast<int const*>(address); };
  bool const in_table = shape.batch > kMostInShared;
  Schedule const launch{{words(sequences.cu_seqlens_q), words(sequences.seqused_q), shape.seqlen_q},
                        {words(sequences.cu_seqlens_kv), words(sequences.seqused_kv), shape.seqlen_kv},
                        shape,
                        {sequences.table, shape.batch},
                        in_table};
  if (shape.batch <= kThreads) {
    int const threads = shape.batch <= kClasses ? kClasses : (shape.batch + 31) / 32 * 32;
    schedule_few<<<1, threads, 0, stream>>>(launch);
    return to_status(cudaGetLastError());
  }
  int const ctas = in_table || shape.batch <= 2 * kThreads ? 1 : 8;
  schedule<<<ctas, kThreads, in_table ? 0 : kept_bytes(shape.batch), stream>>>(launch);
  return to_status(cudaGetLastError());
}

}  // namespace hattn
