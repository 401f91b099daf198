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

struct CUstream_st; /* a CUstream, which is a cudaStream_t, points to one */

/* Structs with their header filled in and everything else 0. */
#define HATTN_FORWARD_PROBLEM_INIT \
  { sizeof(hattn_forward_problem), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_BACKWARD_PROBLEM_INIT \
  { sizeof(hattn_backward_problem), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_TENSOR_INIT \
  { sizeof(hattn_tensor), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0} }
#define HATTN_FORWARD_ARGS_INIT \
  { sizeof(hattn_forward_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_PROBLEM_INIT \
  { sizeof(hattn_quantize_problem), HATTN_ABI_VERSION, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_TENSOR_INIT \
  { sizeof(hattn_quantize_tensor), HATTN_ABI_VERSION, 0, 0, 0, 0, 0 }
#define HATTN_QUANTIZE_ARGS_INIT \
  { sizeof(hattn_quantize_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0 }
#define HATTN_BACKWARD_ARGS_INIT \
  { sizeof(hattn_backward_args), HATTN_ABI_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

// The version of the ABI, which every struct carries. It changes when something is removed or changes its meaning.
#define HATTN_ABI_VERSION 1

// A window without a bound on this side.
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

// The type of a tensor's elements. 0 is none, so that a forgotten field is refused.
typedef int32_t hattn_dtype;

// Which keys a query attends to. A query that keeps no key gets output 0 and log-sum-exp -inf.
typedef int32_t hattn_mask;

// Where the diagonal of a causal mask or window lies when seqlen_q and seqlen_kv differ.
typedef int32_t hattn_corner;

// The instruction set that kernels are written for.
typedef int32_t hattn_arch;

// How many elements of Q, K or V of HATTN_E4M3 share a descale factor: a real value is what is stored times its factor.
// Factors are HATTN_F32 [batch, heads, blocks].
typedef int32_t hattn_scaling;

// The forward pass O = softmax(mask(softmax_scale * Q K^T)) V, as numbers. Begin with HATTN_FORWARD_PROBLEM_INIT.
//
// Q is [batch, seqlen_q, heads_q, head_dim_qk], K [batch, seqlen_kv, heads_kv, head_dim_qk],
// V [batch, seqlen_kv, heads_kv, head_dim_vo], O [batch, seqlen_q, heads_q, head_dim_vo].
typedef struct hattn_forward_problem {
  // sizeof(hattn_forward_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Of Q, K, V and O: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too. HATTN_E4M3: of Q, K and V, which have factors then.
  hattn_dtype dtype;
  // Which keys a query attends to.
  hattn_mask mask;
  // Where a causal mask or a window is aligned.
  hattn_corner corner;
  // 1: the log-sum-exp of each row is an output; 0: it is not.
  int32_t lse;
  // Sequences; may be 0.
  int64_t batch;
  // Queries in a sequence; may be 0.
  int64_t seqlen_q;
  // Keys in a sequence; may be 0.
  int64_t seqlen_kv;
  // Query heads, a multiple of heads_kv: head h reads key head h / (heads_q / heads_kv).
  int64_t heads_q;
  // Key and value heads.
  int64_t heads_kv;
  // Length of a query and of a key.
  int64_t head_dim_qk;
  // Length of a value and of an output.
  int64_t head_dim_vo;
  // With HATTN_MASK_WINDOW: keys kept before a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
  int64_t window_left;
  // With HATTN_MASK_WINDOW: keys kept after a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
  int64_t window_right;
  // The factor on Q K^T, finite and above 0; 0 for 1 / sqrt(head_dim_qk).
  float softmax_scale;
  // Which kernels compute it; a GPU that does not run them, or a build without them, has no plan.
  hattn_arch arch;
  // Of O: 0 for dtype, of HATTN_E4M3 operands for HATTN_BF16; these may have HATTN_F16 and HATTN_E4M3 too.
  hattn_dtype output;
  // With HATTN_E4M3 operands: how many elements share a factor. Otherwise 0.
  hattn_scaling scaling;
  // With HATTN_E4M3 operands, 1: the largest magnitude of O is an output; 0: it is not. Otherwise 0.
  int32_t amax;
  // With HATTN_E4M3 operands, 1: scores may be summed in half precision, which is faster on a GPU where no stored element of
  // Q and K is larger than 14 in magnitude, and hattn_quantize_run of this problem makes none. The kernel looks: where one is
  // larger, or a NaN, another kernel computes all again, and it takes twice as long and more. 0: single precision. Otherwise 0.
  int32_t half_scores;
} hattn_forward_problem;

// Where something is: HATTN_CPU, or the ordinal of a GPU (0 and above) in the CUDA driver's order.
typedef int32_t hattn_device;

// Borrowed memory. Begin with HATTN_TENSOR_INIT.
typedef struct hattn_tensor {
  // sizeof(hattn_tensor).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // The first element. Inputs are only read. Anything where there is no element.
  void *data;
  // Of the elements.
  hattn_dtype dtype;
  // Where the memory is.
  hattn_device device;
  // 4: [batch, seqlen, heads, head_dim]. 3: [batch, heads, seqlen], the log-sum-exp, or [batch, heads, blocks], factors.
  // 2: [3, 2], counts. 1: a single number.
  int32_t ndim;
  // 0.
  int32_t reserved;
  // Sizes; from ndim on not looked at.
  int64_t shape[4];
  // From one element to the next, in elements; the innermost is 1. From ndim on not looked at.
  int64_t stride[4];
} hattn_tensor;

// What a forward pass reads and writes. Begin with HATTN_FORWARD_ARGS_INIT.
typedef struct hattn_forward_args {
  // sizeof(hattn_forward_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries.
  const struct hattn_tensor *q;
  // Keys.
  const struct hattn_tensor *k;
  // Values.
  const struct hattn_tensor *v;
  // The output.
  const struct hattn_tensor *o;
  // The log-sum-exp of each row, natural log, HATTN_F32: given exactly when the problem says so, otherwise null.
  const struct hattn_tensor *lse;
  // Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
  void *workspace;
  // At least what hattn_forward_plan_workspace_size says.
  size_t workspace_bytes;
  // The factors of Q, K and V, HATTN_F32, finite and above 0 (which the CPU checks): given exactly with HATTN_E4M3
  // operands, otherwise null.
  const struct hattn_tensor *descale_q;
  // As descale_q.
  const struct hattn_tensor *descale_k;
  // As descale_q.
  const struct hattn_tensor *descale_v;
  // What O is multiplied by before it is rounded, one HATTN_F32: given exactly with an output of HATTN_E4M3, otherwise null.
  const struct hattn_tensor *scale_o;
  // The largest magnitude of O before that, one HATTN_F32, written: given exactly when the problem says so, otherwise
  // null.
  const struct hattn_tensor *amax;
} hattn_forward_args;

// The gradients of the forward pass with respect to Q, K and V, as numbers. Begin with HATTN_BACKWARD_PROBLEM_INIT.
//
// dQ, dK, dV and dO, the gradient of the output, have the shapes of Q, K, V and O.
typedef struct hattn_backward_problem {
  // sizeof(hattn_backward_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Of Q, K, V, O and all gradients but the log-sum-exp's: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too.
  hattn_dtype dtype;
  // Which keys a query attends to.
  hattn_mask mask;
  // Where a causal mask or a window is aligned.
  hattn_corner corner;
  // 1: a gradient of the log-sum-exp is an input; 0: it is not.
  int32_t d_lse;
  // Sequences; may be 0.
  int64_t batch;
  // Queries in a sequence; may be 0.
  int64_t seqlen_q;
  // Keys in a sequence; may be 0.
  int64_t seqlen_kv;
  // Query heads, a multiple of heads_kv: head h reads key head h / (heads_q / heads_kv).
  int64_t heads_q;
  // Key and value heads.
  int64_t heads_kv;
  // Length of a query and of a key.
  int64_t head_dim_qk;
  // Length of a value and of an output.
  int64_t head_dim_vo;
  // With HATTN_MASK_WINDOW: keys kept before a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
  int64_t window_left;
  // With HATTN_MASK_WINDOW: keys kept after a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
  int64_t window_right;
  // The factor on Q K^T, finite and above 0; 0 for 1 / sqrt(head_dim_qk).
  float softmax_scale;
  // 1: the same inputs, plan and device give the same bits, which may cost time on a GPU; 0: that is not promised
  // there.
  int32_t deterministic;
  // Which kernels compute it; a GPU that does not run them, or a build without them, has no plan.
  hattn_arch arch;
  // 0.
  uint32_t reserved;
} hattn_backward_problem;

// What a backward pass reads and writes. Begin with HATTN_BACKWARD_ARGS_INIT.
typedef struct hattn_backward_args {
  // sizeof(hattn_backward_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries.
  const struct hattn_tensor *q;
  // Keys.
  const struct hattn_tensor *k;
  // Values.
  const struct hattn_tensor *v;
  // The forward pass's output.
  const struct hattn_tensor *o;
  // The forward pass's log-sum-exp, HATTN_F32. A row of -inf has no part in any gradient, and its own is 0.
  const struct hattn_tensor *lse;
  // The gradient of the output.
  const struct hattn_tensor *d_o;
  // The gradient of the log-sum-exp, HATTN_F32: given exactly when the problem says so, otherwise null.
  const struct hattn_tensor *d_lse;
  // The gradient of the queries, overwritten.
  const struct hattn_tensor *d_q;
  // The gradient of the keys, overwritten: the sum over the query heads that read them.
  const struct hattn_tensor *d_k;
  // The gradient of the values, overwritten: the sum over the query heads that read them.
  const struct hattn_tensor *d_v;
  // Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
  void *workspace;
  // At least what hattn_backward_plan_workspace_size says.
  size_t workspace_bytes;
} hattn_backward_args;

// Taking Q, K and V to operands of HATTN_E4M3, as numbers. Begin with HATTN_QUANTIZE_PROBLEM_INIT.
//
// A factor is max(amax / 448, the smallest normal number), amax the largest finite magnitude that shares it, and what is
// stored the nearest to the value times 1 / factor, or 448 with its sign where that is larger; what is not finite is stored
// as NaN. Of Q and K it is 14 in place of 448 where the forward problem has half_scores.
typedef struct hattn_quantize_problem {
  // sizeof(hattn_quantize_problem).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // What the operands are for: sizes, HATTN_E4M3 and the scaling.
  const struct hattn_forward_problem *forward;
  // Of the values: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too.
  hattn_dtype source;
  // 1: Q and K are rotated before, by signs and a Hadamard transform over the head dim, which leaves Q K^T as it is and
  // spreads outliers; 0: they are not.
  int32_t hadamard;
  // With hadamard: of the signs; queries and keys that meet have the same. Otherwise not looked at.
  uint64_t seed;
} hattn_quantize_problem;

// One tensor to quantise. Begin with HATTN_QUANTIZE_TENSOR_INIT.
typedef struct hattn_quantize_tensor {
  // sizeof(hattn_quantize_tensor).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // What is read, of the source type.
  const struct hattn_tensor *values;
  // What is written, HATTN_E4M3.
  const struct hattn_tensor *stored;
  // Its factors, HATTN_F32 as the scaling says: written, or read.
  const struct hattn_tensor *descale;
  // 1: the factors are given, finite and above 0 (which the CPU checks); 0: they are made of the largest magnitudes.
  int32_t given;
  // 0.
  uint32_t reserved;
} hattn_quantize_tensor;

// What a quantiser reads and writes. Begin with HATTN_QUANTIZE_ARGS_INIT.
typedef struct hattn_quantize_args {
  // sizeof(hattn_quantize_args).
  uint32_t struct_size;
  // HATTN_ABI_VERSION.
  uint32_t abi_version;
  // Queries; null where they are not quantised.
  const struct hattn_quantize_tensor *q;
  // Keys; null where they are not quantised.
  const struct hattn_quantize_tensor *k;
  // Values; null where they are not quantised.
  const struct hattn_quantize_tensor *v;
  // Where to count, HATTN_F32 [3, 2], of q, k and v: elements that were too large and stored as 448 (or 14), and those that
  // were not finite. Null where it is not wanted.
  const struct hattn_tensor *counts;
  // Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
  void *workspace;
  // At least what hattn_quantize_plan_workspace_size says.
  size_t workspace_bytes;
} hattn_quantize_args;

// IEEE 754 half precision.
#define HATTN_F16 1

// bfloat16.
#define HATTN_BF16 2

// IEEE 754 single precision.
#define HATTN_F32 3

// 8-bit float with 4 exponent and 3 mantissa bits, largest value 448.
#define HATTN_E4M3 4

// The cores of this machine.
#define HATTN_CPU -1

// Every key.
#define HATTN_MASK_FULL 0

// The keys up to the one where the query stands.
#define HATTN_MASK_CAUSAL 1

// The keys from window_left before to window_right after the one where the query stands.
#define HATTN_MASK_WINDOW 2

// The last query stands at the last key: query i at key i + seqlen_kv - seqlen_q.
#define HATTN_BOTTOM_RIGHT 0

// The first query stands at the first key: query i at key i.
#define HATTN_TOP_LEFT 1

// The GPU's own. The CPU takes no other.
#define HATTN_ARCH_OWN 0

// Compute capability 8.0 and later.
#define HATTN_ARCH_SM80 80

// Compute capability 9.0.
#define HATTN_ARCH_SM90 90

// All of them: factors [1, 1, 1].
#define HATTN_PER_TENSOR 0

// Those of one sequence and key head, of Q those of all query heads that read it: factors [batch, heads_kv, 1].
#define HATTN_PER_HEAD 1

// 128 rows of one head, as far as they exist: factors [batch, heads, ceil(seqlen / 128)], of Q with heads_q and seqlen_q, of
// K and V with heads_kv and seqlen_kv.
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
// # Safety
// `count` is null, which is refused, or valid for writing.
hattn_status hattn_device_count(int32_t *count);

// Reads the text that `hattn tune` wrote, `length` bytes of it, and writes it to `*tuning`; null there on failure. The
// library itself opens no file.
//
// # Safety
// `text` is valid for reading `length` bytes, null when that is 0; `tuning` is null, which is refused, or valid for
// writing.
hattn_status hattn_tuning_create(const char *text, size_t length, struct hattn_tuning **tuning);

// Frees a tuning; null is fine. Plans that were made with it go on.
//
// # Safety
// `tuning` is null, or came from hattn_tuning_create and is used nowhere, now or later.
void hattn_tuning_destroy(struct hattn_tuning *tuning);

// Whether hattn_forward_plan_create would find a kernel for the problem on the device: HATTN_OK,
// HATTN_ERROR_UNSUPPORTED, HATTN_ERROR_NO_DEVICE, or what is wrong with the problem. Opens no context and loads nothing.
//
// # Safety
// `problem` is null, which is refused, or points to a struct of the size that it says.
hattn_status hattn_forward_supported(const struct hattn_forward_problem *problem,
                                     hattn_device device);

// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, the one that cudaSetDevice uses, and leaves the thread's current context as it was.
//
// # Safety
// `problem` is as for hattn_forward_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_forward_plan_create(const struct hattn_forward_problem *problem,
                                       hattn_device device,
                                       struct hattn_forward_plan **plan);

// As hattn_forward_plan_create, but with the kernel that the tuning holds for this problem on this card, where it holds
// one. The tuning may be freed afterwards.
//
// # Safety
// As for hattn_forward_plan_create; `tuning` is null, which is refused, or a live tuning.
hattn_status hattn_forward_plan_create_tuned(const struct hattn_forward_problem *problem,
                                             hattn_device device,
                                             const struct hattn_tuning *tuning,
                                             struct hattn_forward_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// # Safety
// `plan` is null, or came from hattn_forward_plan_create and is used nowhere, now or later.
void hattn_forward_plan_destroy(struct hattn_forward_plan *plan);

// Says in words what the plan computes and how. `*length` becomes the length of the text without its final 0; as much
// of it as fits `capacity` is written to `text`, always with a final 0.
//
// # Safety
// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
// `length` is null, when it is not wanted, or valid for writing.
hattn_status hattn_forward_plan_describe(const struct hattn_forward_plan *plan,
                                         char *text,
                                         size_t capacity,
                                         size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: exact, and often 0.
//
// # Safety
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
// # Safety
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
// # Safety
// `problem` is null, which is refused, or points to a struct of the size that it says.
hattn_status hattn_backward_supported(const struct hattn_backward_problem *problem, hattn_device device);

// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, as hattn_forward_plan_create does.
//
// # Safety
// `problem` is as for hattn_backward_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_backward_plan_create(const struct hattn_backward_problem *problem,
                                        hattn_device device,
                                        struct hattn_backward_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// # Safety
// `plan` is null, or came from hattn_backward_plan_create and is used nowhere, now or later.
void hattn_backward_plan_destroy(struct hattn_backward_plan *plan);

// Says in words what the plan computes and how, as hattn_forward_plan_describe does.
//
// # Safety
// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
// `length` is null, when it is not wanted, or valid for writing.
hattn_status hattn_backward_plan_describe(const struct hattn_backward_plan *plan,
                                          char *text,
                                          size_t capacity,
                                          size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: exact. 0 on the CPU; on a GPU it holds the sums of dQ in f32.
//
// # Safety
// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
hattn_status hattn_backward_plan_workspace_size(const struct hattn_backward_plan *plan,
                                                size_t *bytes);

// Computes the gradients of the plan's problem. Outputs are overwritten, not added to. Checks, streams and lifetimes are
// those of hattn_forward_run.
//
// # Safety
// As for hattn_forward_run, with a live plan of hattn_backward_plan_create; `d_lse` is the tensor that may be null, and
// the outputs are `d_q`, `d_k` and `d_v`.
hattn_status hattn_backward_run(const struct hattn_backward_plan *plan,
                                const struct hattn_backward_args *args,
                                struct CUstream_st *stream);

// Whether hattn_quantize_plan_create would find kernels for the problem on the device; as hattn_forward_supported.
//
// # Safety
// `problem` is null, which is refused, or points to a struct of the size that it says, and so does its `forward`.
hattn_status hattn_quantize_supported(const struct hattn_quantize_problem *problem, hattn_device device);

// Picks kernels and loads them, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
// context, as hattn_forward_plan_create does.
//
// # Safety
// `problem` is as for hattn_quantize_supported; `plan` is null, which is refused, or valid for writing.
hattn_status hattn_quantize_plan_create(const struct hattn_quantize_problem *problem,
                                        hattn_device device,
                                        struct hattn_quantize_plan **plan);

// Frees a plan; null is fine. Work that was enqueued with it goes on.
//
// # Safety
// `plan` is null, or came from hattn_quantize_plan_create and is used nowhere, now or later.
void hattn_quantize_plan_destroy(struct hattn_quantize_plan *plan);

// Says in words what the plan does and how, as hattn_forward_plan_describe.
//
// # Safety
// As for hattn_forward_plan_describe, with a plan of quantising.
hattn_status hattn_quantize_plan_describe(const struct hattn_quantize_plan *plan,
                                          char *text,
                                          size_t capacity,
                                          size_t *length);

// Writes to `*bytes` how large a workspace the plan needs: none on the CPU.
//
// # Safety
// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
hattn_status hattn_quantize_plan_workspace_size(const struct hattn_quantize_plan *plan, size_t *bytes);

// Quantises what is given, under the rules of hattn_forward_run. What it writes may be read by a forward pass that is
// enqueued on the same stream afterwards.
//
// # Safety
// `plan` is null, which is refused, or a live plan; `args` points to a struct of the size that it says or is null, which is
// refused, and so do q, k, v, counts (where null is fine) and their tensors. Otherwise as for hattn_forward_run.
hattn_status hattn_quantize_run(const struct hattn_quantize_plan *plan,
                                const struct hattn_quantize_args *args,
                                struct CUstream_st *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HOPPER_ATTENTION_H */
