// What all launchers do alike: load kernels ahead of their first launch, fill the outputs of empty problems, zero
// workspace, start the kernels, and describe a row to the launch table.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/around.hpp"
#include "common/fill.hpp"
#include "common/row.hpp"
#include "common/scalars.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// Loads a kernel on the current device, and raises its limit of shared memory.
template <class Kernel>
Status prepare_kernel(Kernel* kernel, int smem_bytes) noexcept {
  return to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
}

// The same for the three kernels of a backward. `main` is the one in the middle.
template <class Traits, class Main>
Status prepare_backward(Main* main) noexcept {
  Status status = BwdStatistics<typename Traits::Plain>::load();
  status = is_ok(status) ? BwdConvert<typename Traits::Unmasked>::load() : status;
  if constexpr (Traits::kTakesBias) {
    status = is_ok(status) ? BwdBiasGradient<typename Traits::Unmasked>::load() : status;
  }
  return is_ok(status) ? prepare_kernel(main, Traits::kSmemBytes) : status;
}

// Zeroes device memory in stream order. Address 0: there is none.
inline Status zero(std::uint64_t address, std::size_t bytes, CUstream_st* stream) noexcept {
  return address == 0 ? Status{} : to_status(cudaMemsetAsync(reinterpret_cast<void*>(address), 0, bytes, stream));
}

// Zeroes the counter that CTAs draw their tiles from, where there is one.
inline Status zero_tile_counter(std::uint64_t tile_counter, CUstream_st* stream) noexcept {
  return zero(tile_counter, sizeof(int), stream);
}

// Encodes nothing, for kernels without tensor maps.
inline Status no_maps() noexcept { return {}; }

// Starts a forward of 16-bit operands. Where there are keys, `encode()` makes the kernel's tensor maps and returns a
// Status, before anything is enqueued. `start_main(scalars)` then starts the kernel.
template <class Encode, class StartMain>
Status launch_forward(FwdParams const& params, CUstream_st* stream, Encode const& encode,
                      StartMain const& start_main) noexcept {
  bool const has_rows = params.batch > 0 && params.seqlen_q > 0;
  if (params.seqlen_kv == 0 || !has_rows) {
    Status const status = launch_fill_max_logits(params, stream);
    return is_ok(status) && has_rows ? launch_fill_empty(params, stream) : status;
  }
  Status status = encode();
  status = is_ok(status) ? launch_fill_max_logits(params, stream) : status;
  // (The kernel that makes lists of blocks has done so.)
  if (params.blocks.counts == 0) {
    status = is_ok(status) ? zero_tile_counter(params.tile_counter, stream) : status;
  }
  if (is_ok(status)) {
    start_main(fwd_scalars(params));
    status = to_status(cudaGetLastError());
  }
  return status;
}

// Writes zeros into the rows of an output that belong to no sequence, where that is asked for. `lse` may have no
// address.
inline Status fill_gaps(Sequences const& sequences, TensorDesc const& tensor, int batch, int rows, int heads,
                        int head_dim, bool of_keys, TensorDesc const& lse, CUstream_st* stream) noexcept {
  if (!sequences.fill_gaps || rows == 0) {
    return {};
  }
  return launch_fill_gaps(sequences, tensor, batch, rows, heads, head_dim, of_keys, lse, stream);
}

// Starts a forward of 16-bit operands whose sequences have lengths that the device knows (sequences.hpp). `encode` is
// as above. `start_main()` starts the kernel after the one that makes the table.
template <class Traits, class Encode, class StartMain>
Status launch_packed_forward(FwdParams const& params, CUstream_st* stream, Encode const& encode,
                             StartMain const& start_main) noexcept {
  Sequences const& sequences = params.sequences;
  // Without queries there is the maximum logit alone to write.
  if (params.batch == 0 || params.seqlen_q == 0) {
    if (Status const status = launch_fill_max_logits(params, stream); !is_ok(status)) {
      return status;
    }
  } else {
    Status status = encode();
    status = is_ok(status) ? launch_fill_max_logits(params, stream) : status;
    status = is_ok(status) ? launch_schedule(sequences,
                                             {params.batch, params.seqlen_q, params.seqlen_kv, Traits::kTileM,
                                              params.heads_q, sequences.list_size, 0, 0},
                                             stream)
                           : status;
    if (!is_ok(status)) {
      return status;
    }
    start_main();
    if (status = to_status(cudaGetLastError()); !is_ok(status)) {
      return status;
    }
  }
  return fill_gaps(sequences, params.o, params.batch, params.seqlen_q, params.heads_q, params.head_dim_vo, false,
                   params.lse, stream);
}

// The same of the kernels of a backward. `Packed` are the traits of the kernel in the middle, which `start_main()`
// starts.
template <class Packed, class Encode, class StartMain>
Status launch_packed_backward(BwdParams const& params, CUstream_st* stream, Encode const& encode,
                              StartMain const& start_main) noexcept {
  Sequences const& sequences = params.sequences;
  Status status;
  if (params.batch > 0 && (params.seqlen_q > 0 || params.seqlen_kv > 0)) {
    status = encode();
    status = is_ok(status)
                 ? launch_schedule(sequences,
                                   {params.batch, params.seqlen_q, params.seqlen_kv, Packed::kTileN, params.heads_kv,
                                    sequences.list_size, Packed::kTileM, sequences.block_list_size},
                                   stream)
                 : status;
    if (!is_ok(status)) {
      return status;
    }
    BwdStatistics<typename Packed::Plain>::launch(params, stream);
    start_main();
    BwdConvert<typename Packed::Unmasked>::launch(params, stream);
    BwdStatistics<typename Packed::Plain>::launch_sinks(params, stream);
  } else {
    status = launch_fill_sinks(params, stream);  // no row: 0
  }
  if constexpr (Packed::kTakesBias) {
    BwdBiasGradient<typename Packed::Unmasked>::launch(params, stream);
  }
  status = is_ok(status) ? to_status(cudaGetLastError()) : status;
  auto const fill = [&](TensorDesc const& tensor, int rows, int heads, int head_dim, bool of_keys) {
    status = is_ok(status)
                 ? fill_gaps(sequences, tensor, params.batch, rows, heads, head_dim, of_keys, TensorDesc{}, stream)
                 : status;
  };
  fill(params.d_q, params.seqlen_q, params.heads_q, params.head_dim_qk, false);
  fill(params.d_k, params.seqlen_kv, params.heads_kv, params.head_dim_qk, true);
  fill(params.d_v, params.seqlen_kv, params.heads_kv, params.head_dim_vo, true);
  return status;
}

// Starts the three kernels of a backward, where there are queries and keys, and those of the gradients of sinks and of
// a bias. `encode` is as above. `start_main(scalars)` starts the kernel in the middle.
template <class Traits, class Encode, class StartMain>
Status launch_backward(BwdParams const& params, CUstream_st* stream, Encode const& encode,
                       StartMain const& start_main) noexcept {
  bool const is_empty = params.batch == 0 || params.seqlen_q == 0 || params.seqlen_kv == 0;
  if (Status const status = is_empty ? launch_fill_gradients(params, stream) : encode(); !is_ok(status)) {
    return status;
  }
  if (!is_empty) {
    BwdStatistics<typename Traits::Plain>::launch(params, stream);
    start_main(bwd_scalars<Traits>(params));
    BwdConvert<typename Traits::Unmasked>::launch(params, stream);
    BwdStatistics<typename Traits::Plain>::launch_sinks(params, stream);
  }
  if constexpr (Traits::kTakesBias) {
    BwdBiasGradient<typename Traits::Unmasked>::launch(params, stream);
  }
  return to_status(cudaGetLastError());
}

}  // namespace hattn

// Defines a row's function: what a unit says once a row. `Traits` is the list's traits template, and `Launch` a
// template over such traits with the row's static `prepare` and `launch`.
#define HATTN_INSTANCE(Row, list, Traits, Launch, dtype, mask, ...)                              \
  namespace hattn {                                                                              \
  Row HATTN_ROW(list, dtype, mask, __VA_ARGS__)() noexcept {                                     \
    using TraitsOfRow = Traits<DType::dtype, MaskClass::mask, __VA_ARGS__>;                      \
    return {row_info<TraitsOfRow>(), Launch<TraitsOfRow>::prepare, Launch<TraitsOfRow>::launch}; \
  }                                                                                              \
  }
