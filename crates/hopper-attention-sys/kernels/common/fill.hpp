// Outputs that no product reaches: a forward without keys, a backward without keys or without queries.
#pragma once

#include "kernels.hpp"

namespace hattn {

// O = 0 and LSE = -inf. With sinks LSE is the sink of the head (common/sinks.hpp).
Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept;

// Gradients where one of the sequences is empty: zeros, of the sequence that is there. And that of the sinks.
Status launch_fill_gradients(BwdParams const& params, CUstream_st* stream) noexcept;

// The gradient of the sinks where no row has keys, or there are no rows. Nothing where it is not wanted.
Status launch_fill_sinks(BwdParams const& params, CUstream_st* stream) noexcept;

// The filling kernels take an element for two bytes: a tensor of e4m3 as they see it. Its head dim is halved, too.
inline TensorDesc of_two_bytes(TensorDesc tensor) noexcept {
  tensor.stride_batch /= 2;
  tensor.stride_row /= 2;
  tensor.stride_head /= 2;
  return tensor;
}

// Sets the results of common/max_logits.hpp to -inf. Nothing where they are not wanted.
Status launch_fill_max_logits(FwdParams const& params, CUstream_st* stream) noexcept;

// The rows of a packed tensor, or of a dense one with used lengths, that belong to no sequence: zeros, and LSE = -inf
// where there is one. The table of sequences is there. `of_keys`: the tensor has the rows of keys.
Status launch_fill_gaps(Sequences const& sequences, TensorDesc const& tensor, int batch, int rows, int heads,
                        int head_dim, bool of_keys, TensorDesc const& lse, CUstream_st* stream) noexcept;

}  // namespace hattn
