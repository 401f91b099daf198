/* Hopper Attention: exact fused attention for NVIDIA Hopper, with a CPU backend. Made by cbindgen from
   crates/hopper-attention-capi, whose documentation says how this ABI grows; do not edit.

     hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;   sizes, type, mask
     hattn_forward_plan_create(&problem, device, &plan);           once
     hattn_forward_plan_workspace_size(plan, &bytes);              memory that the caller allocates
     hattn_forward_run(plan, &args, stream);                       as often as wanted
     hattn_forward_plan_destroy(plan);

   Gradients go the same way, with hattn_backward_problem, hattn_backward_plan and hattn_backward_args; and so does taking
   16-bit tensors to FP8 operands, with hattn_quantize_problem, hattn_quantize_plan and hattn_quantize_args.

   Every function is safe to call from any thread. Nothing throws, prints or exits. */

#ifndef HOPPER_ATTENTION_H
#define HOPPER_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

struct CUstream_st; /* what a CUstream or a cudaStream_t points to */

/* Initial values of structs: struct_size and abi_version are filled in, everything else is 0. */
#define HATTN_FORWARD_PROBLEM_INIT \
  { sizeof(hattn_forward_problem), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_BACKWARD_PROBLEM_INIT \
  { sizeof(hattn_backward_problem), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_PROBLEM_INIT \
  { sizeof(hattn_quantize_problem), HATTN_ABI_VERSION, 0, 0, 0, 0 }
#define HATTN_TENSOR_INIT \
  { sizeof(hattn_tensor), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0} }
#define HATTN_FORWARD_ARGS_INIT \
  { sizeof(hattn_forward_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_BACKWARD_ARGS_INIT \
  { sizeof(hattn_backward_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_TENSOR_INIT \
  { sizeof(hattn_quantize_tensor), HATTN_ABI_VERSION, 0, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_ARGS_INIT \
  { sizeof(hattn_quantize_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0 }

// The version of the ABI. Every struct carries it. It changes when something is removed or changes its meaning.
#define HATTN_ABI_VERSION 1

// No bound on this side of a window.
#define HATTN_UNBOUNDED -1

// How the gradients of one problem are computed on one device. Made once and run as often as wanted, by any threads and
// on any streams of the device at once. Holds no device memory.
typedef struct hattn_backward_plan hattn_backward_plan;

// How one problem is computed on one device. Made once and run as often as wanted, by any threads and on any streams of
// the device at once. Holds no device memory.
typedef struct hattn_forward_plan hattn_forward_plan;

// How Q, K and V are taken to HATTN_E4M3 on one device. Made once and run as often as wanted, by any threads and on any
// streams of the device at once. Holds no device memory.
typedef struct hattn_quantize_plan hattn_quantize_plan;

// Which kernel was measured to be the fastest, by version of the library, card and shape: what the program `hattn tune`
// writes. Used by any threads at once.
typedef struct hattn_tuning hattn_tuning;

// HATTN_OK, or why nothing was done; hattn_last_error has the words.
typedef int32_t hattn_status;

// An element type: HATTN_F16, HATTN_BF16, HATTN_F32 or HATTN_E4M3.
// 0 is none of them, so that a forgotten field is refused.
typedef int32_t hattn_dtype;

// Which keys a query attends to: HATTN_MASK_FULL, HATTN_MASK_CAUSAL or HATTN_MASK_WINDOW.
// A query without keys gets output 0 and log-sum-exp -inf.
typedef int32_t hattn_mask;

// Which key a query meets, for causal masks and windows: HATTN_BOTTOM_RIGHT or HATTN_TOP_LEFT.
// The two differ when seqlen_q and seqlen_kv differ.
typedef int32_t hattn_corner;

// The instruction set of the kernels that compute a problem: HATTN_ARCH_OWN, HATTN_ARCH_SM80 or HATTN_ARCH_SM90.
typedef int32_t hattn_arch;

// Which elements of a HATTN_E4M3 tensor share a descale factor: HATTN_PER_TENSOR, HATTN_PER_HEAD or HATTN_PER_BLOCK.
// A real value is the stored value times its factor. Factors are HATTN_F32 tensors [batch, heads, blocks].
// A dimension has size 1 where all of its entries share the factor.
typedef int32_t hattn_scaling;

// A forward pass, as numbers: O = softmax(mask(softmax_scale * Q K^T)) V. Begin with HATTN_FORWARD_PROBLEM_INIT.
//
// Shapes:
// - Q: [batch, seqlen_q, heads_q, head_dim_qk]
// - K: [batch, seqlen_kv, heads_kv, head_dim_qk]
// - V: [batch, seqlen_kv, heads_kv, head_dim_vo]
// - O: [batch, seqlen_q, heads_q, head_dim_vo]
//
// Limits: seqlen_q + seqlen_kv < 2^30, batch * heads_q < 2^31, head dims < 2^31.
// On a GPU, head dims are multiples of 8 (16 for HATTN_E4M3). Their largest value depends on the compiled kernels.
typedef struct hattn_forward_problem {
  // sizeof(hattn_forward_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Element type of Q, K and V: HATTN_F16, HATTN_BF16 or HATTN_E4M3. On the CPU also HATTN_F32.
  // HATTN_E4M3 operands come with descale factors.
  hattn_dtype dtype;
  // Which keys a query attends to.
  hattn_mask mask;
  // Which key a query meets. Only causal masks and windows use it.
  hattn_corner corner;
  // 1: the log-sum-exp of each query is an output. 0: it is not.
  int32_t lse;
  // Number of sequences, 0 or more.
  int64_t batch;
  // Number of queries in each sequence, 0 or more.
  int64_t seqlen_q;
  // Number of keys in each sequence, 0 or more.
  int64_t seqlen_kv;
  // Number of query heads, a multiple of heads_kv. Query head h reads key head h / (heads_q / heads_kv).
  int64_t heads_q;
  // Number of key and value heads, 1 or more.
  int64_t heads_kv;
  // Number of elements of a query and of a key, 1 or more.
  int64_t head_dim_qk;
  // Number of elements of a value and of an output, 1 or more.
  int64_t head_dim_vo;
  // Number of keys that a window keeps before the key that the query meets. HATTN_UNBOUNDED: all of them.
  // Only HATTN_MASK_WINDOW uses it.
  int64_t window_left;
  // Number of keys that a window keeps after the key that the query meets. HATTN_UNBOUNDED: all of them.
  // Only HATTN_MASK_WINDOW uses it.
  int64_t window_right;
  // The factor on Q K^T, finite and above 0. 0 stands for 1 / sqrt(head_dim_qk).
  float softmax_scale;
  // Restricts plans to kernels of one instruction set. Planning fails if the GPU or the library has no such kernel.
  hattn_arch arch;
  // Element type of O. 0 stands for dtype, and for HATTN_BF16 with HATTN_E4M3 operands.
  // HATTN_E4M3 operands may also have HATTN_F16 or HATTN_E4M3. Other operands have their own type only.
  hattn_dtype output;
  // Which elements share a descale factor. Must be 0 unless the operands are HATTN_E4M3.
  hattn_scaling scaling;
  // 1: the largest magnitude of O is an output. 0: it is not. Must be 0 unless the operands are HATTN_E4M3.
  int32_t amax;
  // 1: scores may be summed in half precision. 0: in single precision. Must be 0 unless the operands are HATTN_E4M3.
  //
  // A GPU sums faster in half precision. The sums fit where no stored element of Q or K is larger in magnitude than 14.
  // hattn_quantize_run stores no larger elements if the problem has this option. Results are right for any elements:
  // the kernel checks each one. If an element is larger or NaN, a second kernel computes everything again in single
  // precision. The run then takes more than twice as long. The CPU always sums in single precision.
  int32_t half_scores;
} hattn_forward_problem;

// A device: HATTN_CPU, or the ordinal of a GPU, from 0, in the order of the CUDA driver and cudaSetDevice.
typedef int32_t hattn_device;

// A tensor in the caller's memory. Begin with HATTN_TENSOR_INIT.
//
// The element at index [i, j, ..] is stride[0] * i + stride[1] * j + .. elements behind data.
// The order of the dimensions is fixed:
// - 4 dimensions: Q, K, V, O and their gradients, [batch, seqlen, heads, head_dim]
// - 3 dimensions: a log-sum-exp or its gradient, [batch, heads, seqlen]; descale factors, [batch, heads, blocks]
// - 1 or 2 dimensions: as the comment of the argument says
//
// The order in memory follows from the strides. For memory that is [batch, heads, seqlen, head_dim], only they differ.
//
// On a GPU, data and the outer strides of a 4-dimensional tensor are multiples of 16 bytes.
// All other tensors are aligned to their elements. No two elements of an output have the same address.
typedef struct hattn_tensor {
  // sizeof(hattn_tensor).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Address of the first element, on the host or on a GPU. Not used if there are no elements.
  // Inputs are only read, so a const pointer may be cast to this type.
  void *data;
  // Element type.
  hattn_dtype dtype;
  // Where the memory is.
  hattn_device device;
  // Number of dimensions, 1 to 4.
  int32_t ndim;
  // Must be 0.
  int32_t reserved;
  // Size of each dimension, outermost first. Entries from ndim on are not used.
  int64_t shape[4];
  // Distance of neighbours in each dimension, in elements. The last one is 1. Entries from ndim on are not used.
  int64_t stride[4];
} hattn_tensor;

// What a forward pass reads and writes. Begin with HATTN_FORWARD_ARGS_INIT.
//
// A tensor with a condition ("given exactly if") must be null where the condition does not hold.
typedef struct hattn_forward_args {
  // sizeof(hattn_forward_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries, read: [batch, seqlen_q, heads_q, head_dim_qk].
  const struct hattn_tensor *q;
  // Keys, read: [batch, seqlen_kv, heads_kv, head_dim_qk].
  const struct hattn_tensor *k;
  // Values, read: [batch, seqlen_kv, heads_kv, head_dim_vo].
  const struct hattn_tensor *v;
  // The output, written: [batch, seqlen_q, heads_q, head_dim_vo].
  const struct hattn_tensor *o;
  // The log-sum-exp of each query, written: natural logarithm, HATTN_F32 [batch, heads_q, seqlen_q].
  // Given exactly if the problem's lse is 1.
  const struct hattn_tensor *lse;
  // Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none.
  // Runs that may overlap in time need one each.
  void *workspace;
  // Size of the workspace in bytes: at least what hattn_forward_plan_workspace_size gives.
  size_t workspace_bytes;
  // Descale factors of Q, read: HATTN_F32, finite and above 0. hattn_scaling has the shape.
  // Given exactly if the operands are HATTN_E4M3. Only the CPU checks the values.
  const struct hattn_tensor *descale_q;
  // Descale factors of K, as descale_q.
  const struct hattn_tensor *descale_k;
  // Descale factors of V, as descale_q.
  const struct hattn_tensor *descale_v;
  // The factor that O is multiplied by before it is rounded to HATTN_E4M3, read: HATTN_F32 [1].
  // Given exactly if the output is HATTN_E4M3. A product with a magnitude above 448 is stored as 448 with its sign.
  const struct hattn_tensor *scale_o;
  // The largest magnitude of O before scale_o and rounding, written: HATTN_F32 [1].
  // Given exactly if the problem's amax is 1.
  const struct hattn_tensor *amax;
} hattn_forward_args;

// The gradients of a forward pass with respect to Q, K and V, as numbers. Begin with HATTN_BACKWARD_PROBLEM_INIT.
//
// dQ, dK, dV and dO (the gradient of the output) have the shapes of Q, K, V and O.
// Fields without a comment mean the same as in hattn_forward_problem.
typedef struct hattn_backward_problem {
  // sizeof(hattn_backward_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Element type of Q, K, V, O, dO, dQ, dK and dV: HATTN_F16 or HATTN_BF16. On the CPU also HATTN_F32.
  hattn_dtype dtype;
  hattn_mask mask;
  hattn_corner corner;
  // 1: a gradient of the log-sum-exp is an input. 0: it is not.
  int32_t d_lse;
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_kv;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t head_dim_qk;
  int64_t head_dim_vo;
  int64_t window_left;
  int64_t window_right;
  float softmax_scale;
  // 1: the same inputs, plan and device always give the same bits. This may cost time on a GPU.
  // 0: sums on a GPU may be added in another order each time. The CPU always gives the same bits.
  int32_t deterministic;
  hattn_arch arch;
  // Must be 0.
  uint32_t reserved;
} hattn_backward_problem;

// What a backward pass reads and writes. Begin with HATTN_BACKWARD_ARGS_INIT.
typedef struct hattn_backward_args {
  // sizeof(hattn_backward_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries, read.
  const struct hattn_tensor *q;
  // Keys, read.
  const struct hattn_tensor *k;
  // Values, read.
  const struct hattn_tensor *v;
  // The output of the forward pass, read.
  const struct hattn_tensor *o;
  // The log-sum-exp of the forward pass, read: HATTN_F32 [batch, heads_q, seqlen_q].
  // A query whose log-sum-exp is -inf has gradient 0 and adds nothing to any other gradient.
  const struct hattn_tensor *lse;
  // The gradient of the output, read.
  const struct hattn_tensor *d_o;
  // The gradient of the log-sum-exp, read: HATTN_F32 [batch, heads_q, seqlen_q].
  // Given exactly if the problem's d_lse is 1, otherwise null.
  const struct hattn_tensor *d_lse;
  // The gradient of the queries, overwritten.
  const struct hattn_tensor *d_q;
  // The gradient of the keys, overwritten: the sum over the query heads that read them.
  const struct hattn_tensor *d_k;
  // The gradient of the values, overwritten: the sum over the query heads that read them.
  const struct hattn_tensor *d_v;
  // Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none.
  // Runs that may overlap in time need one each.
  void *workspace;
  // Size of the workspace in bytes: at least what hattn_backward_plan_workspace_size gives.
  size_t workspace_bytes;
} hattn_backward_args;

// How Q, K and V become operands of HATTN_E4M3, as numbers. Begin with HATTN_QUANTIZE_PROBLEM_INIT.
//
// For the elements x that share a descale factor, where amax is the largest finite magnitude among them:
//
// - descale is max(amax / most, the smallest normal float). The caller may give it instead.
// - stored is x * (1 / descale), rounded to the nearest HATTN_E4M3, ties to even. Arithmetic is in single precision.
// - most is 448. It is 14 for Q and K if the forward problem has half_scores.
// - An element that would round to a magnitude above most is stored as most, with its sign.
//   This happens with given factors only.
// - An element that is not finite is stored as NaN.
typedef struct hattn_quantize_problem {
  // sizeof(hattn_quantize_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // The forward pass that takes the operands. Its dtype is HATTN_E4M3. It is read during the call only.
  const struct hattn_forward_problem *forward;
  // Element type of the values that are quantised: HATTN_F16 or HATTN_BF16. On the CPU also HATTN_F32.
  hattn_dtype source;
  // 1: rotate each query and key before it is quantised. 0: do not.
  //
  // The rotation multiplies the elements by random signs and applies a Hadamard transform over the head dim.
  // It leaves Q K^T as it is, and spreads an outlier over its whole vector.
  int32_t hadamard;
  // The seed of the random signs. Queries and keys of one forward pass need the same seed. Only hadamard uses it.
  uint64_t seed;
} hattn_quantize_problem;

// One tensor to quantise. Begin with HATTN_QUANTIZE_TENSOR_INIT.
typedef struct hattn_quantize_tensor {
  // sizeof(hattn_quantize_tensor).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // What is quantised, read. The element type is the problem's source, the shape that of Q, K or V.
  const struct hattn_tensor *values;
  // What it is quantised to, written: HATTN_E4M3, the same shape.
  const struct hattn_tensor *stored;
  // The descale factors: HATTN_F32. hattn_scaling has the shape.
  const struct hattn_tensor *descale;
  // 1: the factors are read. They are finite and above 0, which only the CPU checks.
  // 0: the factors are made of the largest magnitudes, and written.
  int32_t given;
  // Must be 0.
  uint32_t reserved;
} hattn_quantize_tensor;

// What a quantiser reads and writes. Begin with HATTN_QUANTIZE_ARGS_INIT.
typedef struct hattn_quantize_args {
  // sizeof(hattn_quantize_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries. Null if they are not quantised.
  const struct hattn_quantize_tensor *q;
  // Keys. Null if they are not quantised.
  const struct hattn_quantize_tensor *k;
  // Values. Null if they are not quantised.
  const struct hattn_quantize_tensor *v;
  // Two numbers for each of q, k and v, written: HATTN_F32 [3, 2]. Null if they are not wanted.
  // The first counts the elements that were stored as 448 (or 14) because they were too large.
  // The second counts the elements that were not finite.
  const struct hattn_tensor *counts;
  // Scratch memory on the plan's device, aligned to 16 bytes. Null if the plan needs none.
  // Runs that may overlap in time need one each.
  void *workspace;
  // Size of the workspace in bytes: at least what hattn_quantize_plan_workspace_size gives.
  size_t workspace_bytes;
} hattn_quantize_args;

// IEEE 754 half precision, 2 bytes.
#define HATTN_F16 1

// bfloat16, 2 bytes.
#define HATTN_BF16 2

// IEEE 754 single precision, 4 bytes.
#define HATTN_F32 3

// FP8 with 4 exponent and 3 mantissa bits, 1 byte. No infinity; the largest value is 448. CUDA: __nv_fp8_e4m3.
#define HATTN_E4M3 4

// The host: all cores of this machine.
#define HATTN_CPU -1

// Every key.
#define HATTN_MASK_FULL 0

// The keys up to and with the key that the query meets (see hattn_corner).
#define HATTN_MASK_CAUSAL 1

// The keys from window_left before to window_right after the key that the query meets, both included.
#define HATTN_MASK_WINDOW 2

// The last query meets the last key. Query i meets key i + seqlen_kv - seqlen_q.
#define HATTN_BOTTOM_RIGHT 0

// The first query meets the first key. Query i meets key i.
#define HATTN_TOP_LEFT 1

// The newest one that the GPU runs. The CPU takes no other value.
#define HATTN_ARCH_OWN 0

// Compute capability 8.0 and later.
#define HATTN_ARCH_SM80 80

// Compute capability 9.0.
#define HATTN_ARCH_SM90 90

// One factor for each of Q, K and V: [1, 1, 1].
#define HATTN_PER_TENSOR 0

// One factor for each sequence and key head: [batch, heads_kv, 1].
// All query heads that read one key head share one factor of Q.
#define HATTN_PER_HEAD 1

// One factor for each block of 128 rows of a head. The last block may be shorter.
// Q: [batch, heads_q, ceil(seqlen_q / 128)]. K and V: [batch, heads_kv, ceil(seqlen_kv / 128)].
#define HATTN_PER_BLOCK 2

// It was done, or enqueued.
#define HATTN_OK 0

// A null pointer, or a number that is none of the constants for its place.
#define HATTN_ERROR_ARGUMENT 1

// A struct of a size or version that this library does not know.
#define HATTN_ERROR_ABI 2

// A tensor's shape is not the problem's.
#define HATTN_ERROR_SHAPE 3

// A tensor's strides, alignment or range of addresses.
#define HATTN_ERROR_LAYOUT 4

// An element type that does not fit there.
#define HATTN_ERROR_DTYPE 5

// A number out of range, or an argument that is missing or not wanted.
#define HATTN_ERROR_VALUE 6

// A legal problem for which this library has no kernel on this device.
#define HATTN_ERROR_UNSUPPORTED 7

// The workspace is missing or too small.
#define HATTN_ERROR_WORKSPACE 8

// A tensor or the stream is not where the plan is.
#define HATTN_ERROR_DEVICE 9

// Not possible while the stream is captured.
#define HATTN_ERROR_CAPTURE 10

// The CUDA driver returned an error, possibly that of earlier work.
#define HATTN_ERROR_DRIVER 11

// The kernel could not be loaded or launched.
#define HATTN_ERROR_LAUNCH 12

// No such GPU, no driver, or a library built without CUDA.
#define HATTN_ERROR_NO_DEVICE 13

// A bug of this library.
#define HATTN_ERROR_INTERNAL 14

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The name of a status, such as "HATTN_ERROR_SHAPE"; "HATTN_ERROR_?" for a number that is none.
const char *hattn_status_name(hattn_status status);

// The last failure of this thread: what was wrong, what it was, and what is allowed. "" before the first one. Valid
// until the thread's next failure.
const char *hattn_last_error(void);

// The version of the ABI that this library speaks; compare it with HATTN_ABI_VERSION.
uint32_t hattn_abi_version(void);

// The version of the library, such as "0.2.0".
const char *hattn_version(void);

// Counts the GPUs of this machine, whether or not there is a kernel for them: 0 where there is no driver, and in a
// library that was built without CUDA. Opens no context.
//
// The caller promises:
// `count` is null, which is refused, or valid for writing.
hattn_status hattn_device_count(int32_t *count);

// Reads the text that `hattn tune` wrote, `length` bytes of it, and writes it to `*tuning`; null there on failure. The
// library itself opens no file.
//
// The caller promises:
// `text` is valid for reading `length` bytes, null when that is 0; `tuning` is null, which is refused, or valid for
// writing.
hattn_status hattn_tuning_create(const char *text, size_t length, struct hattn_tuning **tuning);

// Frees a tuning; null is fine. Plans that were made with it go on.
//
// The caller promises:
// `tuning` is null, or came from hattn_tuning_create and is used nowhere, now or later.
void hattn_tuning_destroy(struct hattn_tuning *tuning);

// Whether hattn_forward_plan_create would find a kernel for the problem on the device: HATTN_OK,
// HATTN_ERROR_UNSUPPORTED, HATTN_ERROR_NO_DEVICE, or what is wrong with the problem. Opens no context and loads nothing.
//
// The caller promises:
// `problem` is null, which is refused, or points to a struct of the size that it says.
hattn_status hattn_forward_supported(const struct hattn_forward_problem *problem,
                                     hattn_device device);

// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, the one that cudaSetDevice uses, and leaves the thread's current context as it was.
//
// The caller promises:
// `problem` is as for hattn_forward_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_forward_plan_create(const struct hattn_forward_problem *problem,
                                       hattn_device device,
                                       struct hattn_forward_plan **plan);

// As hattn_forward_plan_create, but with the kernel that the tuning holds for this problem on this card, where it holds
// one. The tuning may be freed afterwards.
//
// The caller promises:
// As for hattn_forward_plan_create; `tuning` is null, which is refused, or a live tuning.
hattn_status hattn_forward_plan_create_tuned(const struct hattn_forward_problem *problem,
                                             hattn_device device,
                                             const struct hattn_tuning *tuning,
                                             struct hattn_forward_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// The caller promises:
// `plan` is null, or came from hattn_forward_plan_create and is used nowhere, now or later.
void hattn_forward_plan_destroy(struct hattn_forward_plan *plan);

// Says in words what the plan computes and how. `*length` becomes the length of the text without its final 0; as much
// of it as fits `capacity` is written to `text`, always with a final 0.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
// `length` is null, when it is not wanted, or valid for writing.
hattn_status hattn_forward_plan_describe(const struct hattn_forward_plan *plan,
                                         char *text,
                                         size_t capacity,
                                         size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: exact, and often 0.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
hattn_status hattn_forward_plan_workspace_size(const struct hattn_forward_plan *plan, size_t *bytes);

// Computes the plan's problem. Types, shapes, strides, alignment and places are checked before anything is launched;
// what the addresses lead to cannot be.
//
// On a GPU it is enqueued on the stream, null for the default one, without allocating, waiting or loading anything, so
// that it can be captured in a graph; the thread's current context is left as it was. Memory must stay as it is until
// the stream has done the work. On the CPU it is done on return, on all cores; the stream is not looked at, and outputs
// must have a range of addresses of their own.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `args` and its tensors are null, which is refused but for `lse`, `scale_o`, `amax`
// and the factors, or
// point to structs of the sizes that they say. Each tensor's memory is valid where it says for every element that its
// shape and strides reach, and so is the workspace. Nothing writes the inputs, and nothing else uses outputs and
// workspace, until the work is done; outputs and workspace share no element with anything else. The stream is live.
hattn_status hattn_forward_run(const struct hattn_forward_plan *plan,
                               const struct hattn_forward_args *args,
                               struct CUstream_st *stream);

// Whether hattn_backward_plan_create would find a kernel for the problem on the device; as hattn_forward_supported.
//
// The caller promises:
// `problem` is null, which is refused, or points to a struct of the size that it says.
hattn_status hattn_backward_supported(const struct hattn_backward_problem *problem, hattn_device device);

// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, as hattn_forward_plan_create does.
//
// The caller promises:
// `problem` is as for hattn_backward_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_backward_plan_create(const struct hattn_backward_problem *problem,
                                        hattn_device device,
                                        struct hattn_backward_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// The caller promises:
// `plan` is null, or came from hattn_backward_plan_create and is used nowhere, now or later.
void hattn_backward_plan_destroy(struct hattn_backward_plan *plan);

// Says in words what the plan computes and how, as hattn_forward_plan_describe does.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
// `length` is null, when it is not wanted, or valid for writing.
hattn_status hattn_backward_plan_describe(const struct hattn_backward_plan *plan,
                                          char *text,
                                          size_t capacity,
                                          size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: exact. 0 on the CPU; on a GPU it holds the sums of dQ in f32.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
hattn_status hattn_backward_plan_workspace_size(const struct hattn_backward_plan *plan,
                                                size_t *bytes);

// Computes the gradients of the plan's problem. Outputs are overwritten, not added to. Checks, streams and lifetimes are
// those of hattn_forward_run.
//
// The caller promises:
// As for hattn_forward_run, with a live plan of hattn_backward_plan_create; `d_lse` is the tensor that may be null, and
// the outputs are `d_q`, `d_k` and `d_v`.
hattn_status hattn_backward_run(const struct hattn_backward_plan *plan,
                                const struct hattn_backward_args *args,
                                struct CUstream_st *stream);

// Whether hattn_quantize_plan_create would find kernels for the problem on the device; as hattn_forward_supported.
//
// The caller promises:
// `problem` is null, which is refused, or points to a struct of the size that it says, and so does its `forward`.
hattn_status hattn_quantize_supported(const struct hattn_quantize_problem *problem, hattn_device device);

// Picks kernels and loads them, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, as hattn_forward_plan_create does.
//
// The caller promises:
// `problem` is as for hattn_quantize_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_quantize_plan_create(const struct hattn_quantize_problem *problem,
                                        hattn_device device,
                                        struct hattn_quantize_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// The caller promises:
// `plan` is null, or came from hattn_quantize_plan_create and is used nowhere, now or later.
void hattn_quantize_plan_destroy(struct hattn_quantize_plan *plan);

// Says in words what the plan does and how, as hattn_forward_plan_describe.
//
// The caller promises:
// As for hattn_forward_plan_describe, with a plan of quantising.
hattn_status hattn_quantize_plan_describe(const struct hattn_quantize_plan *plan,
                                          char *text,
                                          size_t capacity,
                                          size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: none on the CPU.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
hattn_status hattn_quantize_plan_workspace_size(const struct hattn_quantize_plan *plan, size_t *bytes);

// Quantises what is given, under the rules of hattn_forward_run. What it writes may be read by a forward pass that is
// enqueued on the same stream afterwards.
//
// The caller promises:
// `plan` is null, which is refused, or a live plan; `args` points to a struct of the size that it says or is null, which is
// refused, and so do q, k, v, counts (where null is fine) and their tensors. Otherwise as for hattn_forward_run.
hattn_status hattn_quantize_run(const struct hattn_quantize_plan *plan,
                                const struct hattn_quantize_args *args,
                                struct CUstream_st *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HOPPER_ATTENTION_H */
