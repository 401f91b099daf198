/* Attention by plain double loops over f32 tensors in host memory: what the results are compared with. C99 and C++17.
 */
#ifndef HATTN_TESTS_REFERENCE_H
#define HATTN_TESTS_REFERENCE_H

#include <hopper_attention.h>
#include <math.h>

/* d is 0 where there are three dimensions, of which the fourth stride says nothing. */
static double reference_at(const hattn_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t last = d == 0 ? 0 : d * t->stride[3];
  return (double)((const float*)t->data)[a * t->stride[0] + b * t->stride[1] + c * t->stride[2] + last];
}

/* The tensors of a run with ALiBi slopes and lists of blocks. A test sets them before it compares. */
typedef struct reference_tensors {
  const hattn_tensor *slopes, *counts, *indices, *bits, *full_counts, *full_indices;
} reference_tensors;

static reference_tensors reference_given;

static int32_t reference_number(const hattn_tensor* t, int64_t b, int64_t h, int64_t row, int64_t last) {
  const int64_t at = (t->shape[0] == 1 ? 0 : b * t->stride[0]) + (t->shape[1] == 1 ? 0 : h * t->stride[1]);
  return ((const int32_t*)t->data)[at + row * t->stride[2] + (t->ndim == 4 ? last * t->stride[3] : 0)];
}

/* Whether the lists keep a pair: a full block has its key, or a partial one that has its bit. */
static int reference_lists_keep(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t query, int64_t key) {
  const reference_tensors* const t = &reference_given;
  const int64_t row = query / 128, word = query % 128 * 4 + key % 128 / 32;
  int64_t i;
  if (p->block_mask == HATTN_BLOCK_MASK_NONE) return 1;
  for (i = 0; t->full_counts != NULL && i < reference_number(t->full_counts, b, h, row, 0); ++i) {
    if (reference_number(t->full_indices, b, h, row, i) == key / 128) return 1;
  }
  for (i = 0; i < reference_number(t->counts, b, h, row, 0); ++i) {
    if (reference_number(t->indices, b, h, row, i) != key / 128) continue;
    return (int)((uint32_t)reference_number(t->bits, b, h, row, i * 512 + word) >> (key % 32) & 1U);
  }
  return 0;
}

static int reference_mask_keeps(const hattn_forward_problem* p, int64_t query, int64_t key) {
  const int64_t own = query + (p->corner == HATTN_TOP_LEFT ? 0 : p->seqlen_kv - p->seqlen_q);
  if (p->mask == HATTN_MASK_CAUSAL) return key <= own;
  if (p->mask == HATTN_MASK_PREFIX) return key < p->window_left || key <= own;
  if (p->mask == HATTN_MASK_CHUNKED) return key <= own && key / p->window_left == own / p->window_left;
  if (p->mask != HATTN_MASK_WINDOW) return 1;
  return (p->window_left == HATTN_UNBOUNDED || key >= own - p->window_left) &&
         (p->window_right == HATTN_UNBOUNDED || key <= own + p->window_right);
}

static int reference_keeps(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t query, int64_t key) {
  return reference_mask_keeps(p, query, key) && reference_lists_keep(p, b, h, query, key);
}

static double reference_scale(const hattn_forward_problem* p) {
  return p->softmax_scale != 0.0F ? (double)p->softmax_scale : 1.0 / sqrt((double)p->head_dim_qk);
}

/* What a score loses by ALiBi. */
static double reference_bias(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const hattn_tensor* const t = reference_given.slopes;
  const int top_left = p->corner == HATTN_TOP_LEFT && p->mask != HATTN_MASK_FULL;
  const double distance = fabs((double)(i + (top_left ? 0 : p->seqlen_kv - p->seqlen_q) - j));
  if (p->alibi == HATTN_ALIBI_NONE) return 0.0;
  return distance * (double)((const float*)t->data)[t->ndim == 2 ? b * t->stride[0] + h * t->stride[1]
                                                                 : h * t->stride[0]];
}

/* A score after scale and cap, before ALiBi. */
static double reference_capped(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k, int64_t b,
                               int64_t h, int64_t i, int64_t j) {
  const int64_t h_kv = h / (p->heads_q / p->heads_kv);
  double dot = 0.0;
  int64_t d;
  for (d = 0; d < p->head_dim_qk; ++d) dot += reference_at(q, b, i, h, d) * reference_at(k, b, j, h_kv, d);
  dot *= reference_scale(p);
  return p->softcap == 0.0F ? dot : (double)p->softcap * tanh(dot / (double)p->softcap);
}

static double reference_score(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k, int64_t b,
                              int64_t h, int64_t i, int64_t j) {
  return reference_capped(p, q, k, b, h, i, j) - reference_bias(p, b, h, i, j);
}

/* The derivative of a capped score, by the score. */
static inline double reference_slope(const hattn_forward_problem* p, double score) {
  const double t = p->softcap == 0.0F ? 0.0 : score / (double)p->softcap;
  return 1.0 - t * t;
}

/* What the softmax of a row divides by, exp(highest) taken out. Without keys: -infinity and 0. */
typedef struct reference_row {
  double highest, sum;
} reference_row;

static reference_row reference_softmax(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k,
                                       int64_t b, int64_t h, int64_t i) {
  reference_row row = {-INFINITY, 0.0};
  int64_t j;
  for (j = 0; j < p->seqlen_kv; ++j) {
    if (reference_keeps(p, b, h, i, j)) row.highest = fmax(row.highest, reference_score(p, q, k, b, h, i, j));
  }
  for (j = 0; j < p->seqlen_kv; ++j) {
    if (reference_keeps(p, b, h, i, j)) row.sum += exp(reference_score(p, q, k, b, h, i, j) - row.highest);
  }
  return row;
}

static double reference_weight(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k, int64_t b,
                               int64_t h, int64_t i, int64_t j, reference_row row) {
  return reference_keeps(p, b, h, i, j) ? exp(reference_score(p, q, k, b, h, i, j) - row.highest) / row.sum : 0.0;
}

static double reference_output(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k,
                               const hattn_tensor* v, int64_t b, int64_t h, int64_t i, int64_t d, reference_row row) {
  double sum = 0.0;
  int64_t j;
  for (j = 0; j < p->seqlen_kv; ++j) {
    sum += reference_weight(p, q, k, b, h, i, j, row) * reference_at(v, b, j, h / (p->heads_q / p->heads_kv), d);
  }
  return sum;
}

/* The larger of a distance and that of got from want; infinity where that is NaN. */
static double reference_worse(double worst, double got, double want) {
  const double distance = isinf(want) && want == got ? 0.0 : fabs(got - want);
  return isnan(distance) ? INFINITY : fmax(worst, distance);
}

/* The largest distance of O, and of the log-sum-exp where there is one, from the plain computation; infinity where one
   of them is NaN. A row without keys is 0, and its log-sum-exp -infinity. */
static inline double reference_distance(const hattn_forward_problem* p, const hattn_forward_args* args) {
  double worst = 0.0;
  int64_t b, h, i, d;
  for (b = 0; b < p->batch; ++b) {
    for (h = 0; h < p->heads_q; ++h) {
      for (i = 0; i < p->seqlen_q; ++i) {
        const reference_row row = reference_softmax(p, args->q, args->k, b, h, i);
        for (d = 0; d < p->head_dim_vo; ++d) {
          worst = reference_worse(worst, reference_at(args->o, b, i, h, d),
                                  reference_output(p, args->q, args->k, args->v, b, h, i, d, row));
        }
        if (args->lse != NULL) {
          worst = reference_worse(worst, reference_at(args->lse, b, h, i, 0), row.highest + log(row.sum));
        }
      }
    }
  }
  return worst;
}

/* The gradient of the score of query i and key j, of one head: P (dO V^T - delta), where delta is O dO less the
   log-sum-exp's gradient, times the derivative of the cap. */
static inline double reference_d_score(const hattn_forward_problem* p, const hattn_backward_args* args, int64_t b,
                                       int64_t h, int64_t i, int64_t j) {
  const reference_row row = reference_softmax(p, args->q, args->k, b, h, i);
  double d_weight = args->d_lse != NULL ? reference_at(args->d_lse, b, h, i, 0) : 0.0;
  int64_t d;
  if (!reference_keeps(p, b, h, i, j)) return 0.0;
  for (d = 0; d < p->head_dim_vo; ++d) {
    const double o = reference_output(p, args->q, args->k, args->v, b, h, i, d, row);
    d_weight +=
        reference_at(args->d_o, b, i, h, d) * (reference_at(args->v, b, j, h / (p->heads_q / p->heads_kv), d) - o);
  }
  d_weight *= reference_slope(p, reference_capped(p, args->q, args->k, b, h, i, j));
  return reference_weight(p, args->q, args->k, b, h, i, j, row) * d_weight;
}

/* The largest distance of dQ, dK and dV from the plain computation, which looks at neither the O nor the log-sum-exp
   that is given; infinity where one of them is NaN. p is the forward problem. */
static inline double reference_gradient_distance(const hattn_forward_problem* p, const hattn_backward_args* args) {
  const int64_t group = p->heads_q / p->heads_kv;
  double worst = 0.0;
  int64_t b, h, i, j, d;
  for (b = 0; b < p->batch; ++b) {
    for (h = 0; h < p->heads_q; ++h) {
      for (i = 0; i < p->seqlen_q; ++i) {
        for (d = 0; d < p->head_dim_qk; ++d) {
          double want = 0.0;
          for (j = 0; j < p->seqlen_kv; ++j) {
            want += reference_d_score(p, args, b, h, i, j) * reference_at(args->k, b, j, h / group, d);
          }
          worst = reference_worse(worst, reference_at(args->d_q, b, i, h, d), reference_scale(p) * want);
        }
      }
    }
    for (h = 0; h < p->heads_kv; ++h) {
      for (j = 0; j < p->seqlen_kv; ++j) {
        for (d = 0; d < p->head_dim_qk; ++d) {
          double want = 0.0;
          int64_t of;
          for (of = h * group; of < (h + 1) * group; ++of) {
            for (i = 0; i < p->seqlen_q; ++i) {
              want += reference_d_score(p, args, b, of, i, j) * reference_at(args->q, b, i, of, d);
            }
          }
          worst = reference_worse(worst, reference_at(args->d_k, b, j, h, d), reference_scale(p) * want);
        }
        for (d = 0; d < p->head_dim_vo; ++d) {
          double want = 0.0;
          int64_t of;
          for (of = h * group; of < (h + 1) * group; ++of) {
            for (i = 0; i < p->seqlen_q; ++i) {
              const reference_row row = reference_softmax(p, args->q, args->k, b, of, i);
              want += reference_weight(p, args->q, args->k, b, of, i, j, row) * reference_at(args->d_o, b, i, of, d);
            }
          }
          worst = reference_worse(worst, reference_at(args->d_v, b, j, h, d), want);
        }
      }
    }
  }
  return worst;
}

/* Made-up numbers between -1 and 1: the same ones on every machine. */
static inline void reference_fill(float* data, size_t count, uint32_t seed) {
  size_t i;
  for (i = 0; i < count; ++i) {
    seed = seed * 1664525U + 1013904223U;
    data[i] = (float)(seed >> 8) / 8388608.0F - 1.0F;
  }
}

#endif
