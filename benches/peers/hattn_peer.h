/* What `hattn bench` calls to time attention: any shared object that exports the functions below. A library takes part
   in forwards with hattn_peer_fwd, in backwards if it has hattn_peer_bwd too, in forwards of e4m3 operands if it has
   hattn_peer_fwd_fp8, and at points of packed sequences if it has hattn_peer_packs. Plain C, no CUDA header: a stream
   is an opaque pointer (a CUstream or cudaStream_t). */
#ifndef HATTN_PEER_H
#define HATTN_PEER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What hattn_peer_fwd, hattn_peer_bwd and hattn_peer_bwd_workspace return. */
enum {
  HATTN_PEER_OK = 0,
  HATTN_PEER_INVALID = 1,     /* an argument breaks the rules below, or a buffer is missing or too small */
  HATTN_PEER_UNSUPPORTED = 2, /* a legal problem that this library has no kernel for */
  HATTN_PEER_FAILED = 3       /* a CUDA call or a launch failed */
};

/* dtype: the type of Q, K, V, O and their gradients. E4M3 is hattn_peer_fwd_fp8's alone, whose O has a type of its own.
   F32 is that of a bias alone. */
enum { HATTN_PEER_F16 = 0, HATTN_PEER_BF16 = 1, HATTN_PEER_E4M3 = 2, HATTN_PEER_F32 = 3 };

/* mask. */
enum {
  HATTN_PEER_FULL = 0,
  HATTN_PEER_CAUSAL = 1, /* query i keeps keys up to i + offset */
  HATTN_PEER_WINDOW = 2  /* ... from i + offset - window_left to i + offset + window_right; -1: without bound */
};

/* scaling: how many elements of e4m3 operands share a factor, and so the shape [batch, heads, blocks] of the factors.
 */
enum {
  HATTN_PEER_PER_TENSOR = 0, /* [1, 1, 1] */
  HATTN_PEER_PER_HEAD = 1,   /* [batch, heads_kv, 1], those of Q too */
  HATTN_PEER_PER_BLOCK = 2   /* [batch, heads, ceil(seqlen / 128)], with the heads and the length of the tensor */
};

/* corner: the offset is seqlen_kv - seqlen_q, or 0. */
enum { HATTN_PEER_BOTTOM_RIGHT = 0, HATTN_PEER_TOP_LEFT = 1 };

/* Packed sequences are at the end of every struct of arguments. A null `cu_seqlens` means that there are none, and
   so does a struct that ends before it. With it:
   - `batch` is the number of sequences, and seqlen_q and seqlen_kv the number of all their rows together;
   - tensors are [rows, heads, head_dim] and the LSE is [heads_q, rows]; the batch of a stride triple has no meaning;
   - sequence i has the rows from cu_seqlens[i] to below cu_seqlens[i + 1], of queries and of keys alike. It attends to
     its own keys alone, with a mask of its own.
   The sweep gives packed sequences only to libraries that export hattn_peer_packs. */

/* softcap: scores are softcap * tanh(scale * Q K^T / softcap), before the mask; 0: they are not capped. The sweep gives
   a cap only to libraries that export hattn_peer_caps. */

/* alibi_slopes, after the packed sequences: the score of query i and key j loses
   alibi_slopes[head] * |i + seqlen_kv - seqlen_q - j|, after the cap and before the mask. Of packed sequences it is the
   distance within the sequence. Null, or a struct that ends before it: there are no biases. The sweep gives slopes only
   to libraries that export hattn_peer_biases. e4m3 operands have none. */

/* full_block_cnt, full_block_idx and mask_block_cnt, after the slopes, are device addresses of contiguous lists of
   blocks of 128 queries and 128 keys, of all batch entries and heads. With Qb = ceil(seqlen_q / 128) and
   Kb = ceil(seqlen_kv / 128), block i of the queries sees the keys of the blocks full_block_idx[i * Kb], ... of which
   there are full_block_cnt[i], and no others. mask_block_cnt is Qb zeros: no block is partial. Null, or a struct that
   ends before them: there are no lists. The sweep gives lists only to libraries that export hattn_peer_lists. In the
   struct of e4m3 operands they come last. */

/* dropout_state and dropout, after the lists: a weight becomes 0 with the probability dropout, above 0 and below 1, and
   is divided by 1 - dropout otherwise. dropout_state is the device address of the four words of a seed and an offset,
   low words first. Null, or a struct that ends before it: there is no dropout. A library must keep the pairs of a query
   and a key that docs/numerics.md defines, in both passes: its outputs are held against these. The sweep gives dropout
   only to libraries that export hattn_peer_drops. */

/* bias, bias_dtype and bias_dims, after dropout: bias[b, h, i, j] is added to the score of query i and key j, after the
   cap and before the mask. bias is the device address of a contiguous tensor of f16, bf16 or f32,
   [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]; of packed sequences [1 or batch, 1 or heads_q, 1 or longest,
   longest], where i and j count from the first row of each. bias_dims says which of these are not 1: a sum of 1 (batch),
   2 (heads) and 4 (queries). A bias of -inf hides a pair as the mask does: a query without a key has O = 0 and an LSE
   of -inf. Of pairs that the mask hides it may be NaN. Null, or a struct that ends before it: there is no bias. The
   sweep gives a bias only to libraries that export hattn_peer_adds. e4m3 operands have none. */

/* One forward: O = softmax(scale * Q K^T + mask) V. All pointers are device addresses, 16-byte aligned. Q and O are
   [batch, seqlen_q, heads_q, head_dim], K and V [batch, seqlen_kv, heads_kv, head_dim], whatever the strides; the head
   dimension has stride 1. A stride triple is {batch, seqlen, head}, in elements. */
typedef struct hattn_peer_fwd_args {
  uint64_t struct_bytes; /* sizeof(hattn_peer_fwd_args) of the caller: fields are only ever added at the end */
  void const* q;
  void const* k;
  void const* v;
  void* o;
  float* lse; /* [batch, heads_q, seqlen_q] contiguous, natural log; null: not wanted (a library may refuse that) */
  int64_t q_stride[3];
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t o_stride[3];
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int32_t heads_q;
  int32_t heads_kv; /* divides heads_q */
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t dtype;
  int32_t mask;
  int32_t corner;
  int32_t window_left;
  int32_t window_right;
  float softmax_scale;
  float softcap;             /* finite and above 0, or 0 */
  void* stream;              /* the work is enqueued here, and the call returns without waiting for it */
  void* workspace;           /* device scratch, contents undefined; the call zeroes on the stream what must be zero */
  uint64_t workspace_bytes;  /* `hattn bench` gives 16 MiB */
  int32_t const* cu_seqlens; /* device address of batch + 1 numbers from 0 to the number of rows, or null */
  int32_t longest;           /* the length of the longest sequence */
  int32_t reserved_2;        /* 0 */
  float const* alibi_slopes; /* device address of heads_q numbers, or null */
  int32_t const* full_block_cnt;
  int32_t const* full_block_idx;
  int32_t const* mask_block_cnt;
  int32_t const* dropout_state; /* device address of 4 words, or null */
  float dropout;                /* with dropout_state: above 0 and below 1 */
  int32_t reserved_3;           /* 0 */
  void const* bias;             /* device address, or null */
  int32_t bias_dtype;           /* with a bias: HATTN_PEER_F16, HATTN_PEER_BF16 or HATTN_PEER_F32 */
  int32_t bias_dims;            /* with a bias: 0 to 7 */
} hattn_peer_fwd_args;

/* Enqueues one forward on the current device. Must not throw, exit, synchronise or keep the pointers. What can be done
   once a shape (module loads, plans) may be cached: the sweep warms up first. */
int hattn_peer_fwd(hattn_peer_fwd_args const* args);

/* One backward: dQ, dK and dV of a forward, from dO and the O and LSE that the forward gave. Shapes, strides and
   addresses are as in hattn_peer_fwd_args; a gradient has the shape of what it is of. dK and dV are sums over the query
   heads that read a key head. Outputs are overwritten, not added to, and may hold anything before. */
typedef struct hattn_peer_bwd_args {
  uint64_t struct_bytes; /* sizeof(hattn_peer_bwd_args) of the caller: fields are only ever added at the end */
  void const* q;
  void const* k;
  void const* v;
  void const* o;
  void const* d_o;
  float const* lse; /* [batch, heads_q, seqlen_q] contiguous, natural log */
  void* d_q;
  void* d_k;
  void* d_v;
  int64_t q_stride[3];
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t o_stride[3];
  int64_t d_o_stride[3];
  int64_t d_q_stride[3];
  int64_t d_k_stride[3];
  int64_t d_v_stride[3];
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int32_t heads_q;
  int32_t heads_kv; /* divides heads_q */
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t dtype;
  int32_t mask;
  int32_t corner;
  int32_t window_left;
  int32_t window_right;
  float softmax_scale;
  float softcap;            /* finite and above 0, or 0 */
  void* stream;             /* the work is enqueued here, and the call returns without waiting for it */
  void* workspace;          /* device scratch, contents undefined; the call zeroes on the stream what must be zero */
  uint64_t workspace_bytes; /* at least what hattn_peer_bwd_workspace says, or 16 MiB where there is no such function */
  int32_t const* cu_seqlens; /* device address of batch + 1 numbers from 0 to the number of rows, or null */
  int32_t longest;           /* the length of the longest sequence */
  int32_t reserved_2;        /* 0 */
  float const* alibi_slopes; /* device address of heads_q numbers, or null */
  int32_t const* full_block_cnt;
  int32_t const* full_block_idx;
  int32_t const* mask_block_cnt;
  int32_t const* dropout_state; /* device address of 4 words, or null */
  float dropout;                /* with dropout_state: above 0 and below 1 */
  int32_t reserved_3;           /* 0 */
  void const* bias;             /* device address, or null */
  int32_t bias_dtype;           /* with a bias: HATTN_PEER_F16, HATTN_PEER_BF16 or HATTN_PEER_F32 */
  int32_t bias_dims;            /* with a bias: 0 to 7 */
  void* d_bias;                 /* with a bias: its gradient, summed over what shares a number; null: not wanted */
} hattn_peer_bwd_args;

/* Optional: enqueues one backward on the current device, by the rules of hattn_peer_fwd. It may add up dQ in any order,
   so that its last bits differ from call to call, and where query heads share key heads also dK and dV. */
int hattn_peer_bwd(hattn_peer_bwd_args const* args);

/* Optional: how many bytes of scratch hattn_peer_bwd needs for these arguments, of which pointers and workspace are not
   looked at. */
int hattn_peer_bwd_workspace(hattn_peer_bwd_args const* args, uint64_t* bytes);

/* One forward of e4m3 operands: hattn_peer_fwd_args, whose Q, K and V are e4m3 (the kind without infinities), each with
   factors: a real value is `stored * descale`. O is of real values. */
typedef struct hattn_peer_fwd_fp8_args {
  uint64_t struct_bytes; /* sizeof(hattn_peer_fwd_fp8_args) of the caller: fields are only ever added at the end */
  void const* q;
  void const* k;
  void const* v;
  void* o;
  float* lse;             /* [batch, heads_q, seqlen_q] contiguous, natural log */
  float const* q_descale; /* contiguous, of the shape that `scaling` says */
  float const* k_descale;
  float const* v_descale;
  int64_t q_stride[3];
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t o_stride[3];
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int32_t heads_q;
  int32_t heads_kv; /* divides heads_q */
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t dtype; /* HATTN_PEER_E4M3 */
  int32_t mask;
  int32_t corner;
  int32_t window_left;
  int32_t window_right;
  float softmax_scale;
  float softcap; /* 0 */
  int32_t scaling;
  int32_t o_dtype;          /* HATTN_PEER_BF16 or HATTN_PEER_F16 */
  void* stream;             /* the work is enqueued here, and the call returns without waiting for it */
  void* workspace;          /* device scratch, contents undefined; the call zeroes on the stream what must be zero */
  uint64_t workspace_bytes; /* `hattn bench` gives 16 MiB */
  int32_t half_scores;      /* 1: no stored element of Q and K is larger than 14 in magnitude, so that f16 holds their
                               products' sums; 0: they may be. A caller whose struct ends before this promises nothing */
  int32_t wish;             /* 0: the library chooses its kernel. Else the one to time, by what the library knows of its
                               kernels: scores in f16 (1) or f32 (2), + 16 * queries of a tile, + 65536 * CTAs that share
                               a tile; 0 of each: any. A peer gets 0 */
  int32_t const* cu_seqlens; /* device address of batch + 1 numbers from 0 to the number of rows, or null */
  int32_t longest;           /* the length of the longest sequence */
  int32_t reserved_2;        /* 0 */
  int32_t const* full_block_cnt;
  int32_t const* full_block_idx;
  int32_t const* mask_block_cnt;
} hattn_peer_fwd_fp8_args;

/* Optional: enqueues one forward of e4m3 operands on the current device, by the rules of hattn_peer_fwd. */
int hattn_peer_fwd_fp8(hattn_peer_fwd_fp8_args const* args);

/* Optional: 1 if hattn_peer_fwd, and hattn_peer_bwd if there is one, take a softcap. */
int hattn_peer_caps(void);

/* Optional: 1 if hattn_peer_fwd, and hattn_peer_bwd if there is one, take alibi_slopes. */
int hattn_peer_biases(void);

/* Optional: 1 if hattn_peer_fwd, and hattn_peer_bwd if there is one, take dropout. */
int hattn_peer_drops(void);

/* Optional: 1 if hattn_peer_fwd takes a bias, and hattn_peer_bwd, if there is one, also gives its gradient. */
int hattn_peer_adds(void);

/* Optional: 1 if all functions that this library exports take packed sequences. */
int hattn_peer_packs(void);

/* Optional: why the last call of this thread failed, as text, valid until its next call. */
char const* hattn_peer_last_error(void);

/* The short name that tables and JSON use, for the life of the process: "fa3". */
char const* hattn_peer_name(void);

#ifdef __cplusplus
}
#endif
#endif
