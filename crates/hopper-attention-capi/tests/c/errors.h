/* What the tests of refused arguments share: sizes, tensors, memory that shows what was written, and what a text says.
   C99. */
#ifndef HATTN_TESTS_ERRORS_H
#define HATTN_TESTS_ERRORS_H

#include <hopper_attention.h>

#include "check.h"
#include "reference.h"

enum { BATCH = 2, SEQLEN_Q = 3, SEQLEN_KV = 5, HEADS_Q = 4, HEADS_KV = 2, DIM_QK = 8, DIM_VO = 4 };
enum {
  Q_SIZE = BATCH * SEQLEN_Q * HEADS_Q * DIM_QK,
  K_SIZE = BATCH * SEQLEN_KV * HEADS_KV * DIM_QK,
  V_SIZE = BATCH * SEQLEN_KV * HEADS_KV * DIM_VO,
  O_SIZE = BATCH * SEQLEN_Q * HEADS_Q * DIM_VO,
  LSE_SIZE = BATCH * HEADS_Q * SEQLEN_Q,
  POISON = 0xA5
};

/* The sizes of a problem, but for the head dims. */
#define SET_SIZES(problem, dim_qk, dim_vo)                              \
  do {                                                                  \
    (problem).batch = BATCH;                                            \
    (problem).seqlen_q = SEQLEN_Q, (problem).seqlen_kv = SEQLEN_KV;     \
    (problem).heads_q = HEADS_Q, (problem).heads_kv = HEADS_KV;         \
    (problem).head_dim_qk = (dim_qk), (problem).head_dim_vo = (dim_vo); \
  } while (0)

/* A dense f32 tensor on the CPU. */
static hattn_tensor tensor(float* data, int64_t a, int64_t b, int64_t c, int64_t d) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = data;
  made.dtype = HATTN_F32;
  made.device = HATTN_CPU;
  made.ndim = 4;
  made.shape[0] = a, made.shape[1] = b, made.shape[2] = c, made.shape[3] = d;
  made.stride[0] = b * c * d, made.stride[1] = c * d, made.stride[2] = d, made.stride[3] = 1;
  return made;
}

/* The same for a log-sum-exp or its gradient. */
static inline hattn_tensor row_values(float* data) {
  hattn_tensor made = tensor(data, BATCH, HEADS_Q, SEQLEN_Q, 1);
  made.ndim = 3;
  return made;
}

/* A tensor of a pass. */
typedef struct operand {
  const char* name;
  hattn_tensor* tensor;       /* the variable */
  const hattn_tensor** given; /* where the arguments point to it */
  int written, of_keys;       /* whether it is an output; whether it has a row for each key, or for each query */
  int rank;
  int64_t shape[4];
} operand;

enum { READ = 0, WRITTEN = 1, OF_QUERIES = 0, OF_KEYS = 1 };

/* A row of a table of operands, of the variable and the field of the arguments with this name. */
#define OPERAND(name, written, of_keys, rank, ...)                    \
  {                                                                   \
#name, &name, &args.name, written, of_keys, rank, { __VA_ARGS__ } \
  }

static inline int all_poison(const float* data, size_t count) {
  const unsigned char* bytes = (const unsigned char*)data;
  size_t i;
  for (i = 0; i < count * sizeof(float); ++i) {
    if (bytes[i] != POISON) return 0;
  }
  return 1;
}

/* Whether the last error is about this: its text begins with the name and a colon. */
static inline int is_about(const char* what) {
  const size_t length = strlen(what);
  return strncmp(hattn_last_error(), what, length) == 0 && hattn_last_error()[length] == ':';
}

/* Whether the last error speaks of the Rust API, which its readers do not have. */
static inline int speaks_rust(void) {
  static const char* const words[] = {"(true)", "::", "`cuda`", "Tensor"};
  size_t i;
  for (i = 0; i < sizeof(words) / sizeof(words[0]); ++i) {
    if (strstr(hattn_last_error(), words[i]) != NULL) return 1;
  }
  return 0;
}

/* The text names what was wrong at its beginning, and has the other parts somewhere. */
#define SAYS(what, got, allowed)             \
  do {                                       \
    CHECK_TEXT(hattn_last_error(), what);    \
    CHECK(is_about(what));                   \
    CHECK(!speaks_rust());                   \
    CHECK_TEXT(hattn_last_error(), got);     \
    CHECK_TEXT(hattn_last_error(), allowed); \
  } while (0)

#endif
