/* The door through which `hattn bench` times an attention forward: any shared object that exports the functions below.
   Plain C, no CUDA header: a stream is an opaque pointer (a CUstream or cudaStream_t). */
#ifndef HATTN_PEER_H
#define HATTN_PEER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What hattn_peer_fwd returns. */
enum {
  HATTN_PEER_OK = 0,
  HATTN_PEER_INVALID = 1,     /* an argument breaks the rules below, or a buffer is missing or too small */
  HATTN_PEER_UNSUPPORTED = 2, /* a legal problem that this library has no kernel for */
  HATTN_PEER_FAILED = 3       /* a CUDA call or a launch failed */
};

/* hattn_peer_fwd_args.dtype: the type of Q, K, V and O. */
enum { HATTN_PEER_F16 = 0, HATTN_PEER_BF16 = 1 };

/* hattn_peer_fwd_args.mask. */
enum {
  HATTN_PEER_FULL = 0,
  HATTN_PEER_CAUSAL = 1, /* query i keeps keys up to i + offset */
  HATTN_PEER_WINDOW = 2  /* ... from i + offset - window_left to i + offset + window_right; -1: without bound */
};

/* hattn_peer_fwd_args.corner: the offset is seqlen_kv - seqlen_q, or 0. */
enum { HATTN_PEER_BOTTOM_RIGHT = 0, HATTN_PEER_TOP_LEFT = 1 };

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
  int32_t reserved;         /* 0 */
  void* stream;             /* the work is enqueued here, and the call returns without waiting for it */
  void* workspace;          /* device scratch, contents undefined; the call zeroes on the stream what must be zero */
  uint64_t workspace_bytes; /* `hattn bench` gives 16 MiB */
} hattn_peer_fwd_args;

/* Enqueues one forward on the current device. Must not throw, exit, synchronise or keep the pointers. What can be done
   once a shape (module loads, plans) may be cached: the sweep warms up first. */
int hattn_peer_fwd(hattn_peer_fwd_args const* args);

/* Optional: why the last call of this thread failed, as text, valid until its next call. */
char const* hattn_peer_last_error(void);

/* The short name that tables and JSON use, for the life of the process: "fa3". */
char const* hattn_peer_name(void);

#ifdef __cplusplus
}
#endif
#endif
