/* Attention by plain double loops over f32 tensors in host memory: what the results are compared with. C99 and C++17.
 */
#ifndef HATTN_TESTS_REFERENCE_H
#define HATTN_TESTS_REFERENCE_H

#include <hopper_attention.h>
#include <math.h>
#include <string.h>

/* d is 0 where there are three dimensions, of which the fourth stride says nothing. */
static double reference_at(const hattn_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t last = d == 0 ? 0 : d * t->stride[3];
  return (double)((const float*)t->data)[a * t->stride[0] + b * t->stride[1] + c * t->stride[2] + last];
}

/* The tensors of a run with ALiBi slopes, lists of blocks, a bias and dropout. A test sets them before it compares. */
typedef struct reference_tensors {
  const hattn_tensor *slopes, *counts, *indices, *bits, *full_counts, *full_indices, *bias, *state;
} reference_tensors;

static reference_tensors reference_given;

/* The first batch entry that is compared (reference_packed.h). */
static int64_t reference_first;

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

/* An element of a bias or its gradient, of any of its types. A dimension of 1 is shared. */
static double reference_biased_at(const hattn_tensor* t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t at = (t->shape[0] == 1 ? 0 : b * t->stride[0]) + (t->shape[1] == 1 ? 0 : h * t->stride[1]) +
                     (t->shape[2] == 1 ? 0 : i * t->stride[2]) + j * t->stride[3];
  uint32_t bits;
  float number;
  if (t->dtype == HATTN_F32) return (double)((const float*)t->data)[at];
  bits = ((const uint16_t*)t->data)[at];
  if (t->dtype == HATTN_F16) {
    const int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
    const double size = exponent == 31  ? (mantissa == 0 ? (double)INFINITY : (double)NAN)
                        : exponent == 0 ? ldexp(mantissa, -24)
                                        : ldexp(mantissa + 1024, exponent - 25);
    return bits >> 15 != 0 ? -size : size;
  }
  bits <<= 16;
  memcpy(&number, &bits, sizeof(number));
  return (double)number;
}

/* What a bias adds to a score. */
static double reference_bias(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t i, int64_t j) {
  return p->bias == 0 ? 0.0 : reference_biased_at(reference_given.bias, b, h, i, j);
}

/* A bias of -infinity hides its pair. */
static int reference_keeps(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t query, int64_t key) {
  return reference_mask_keeps(p, query, key) && reference_lists_keep(p, b, h, query, key) &&
         reference_bias(p, b, h, query, key) != -(double)INFINITY;
}

/* The parts of 32768 that dropout drops. */
static uint32_t reference_dropped(const hattn_forward_problem* p) { return (uint32_t)roundf(p->dropout * 32768.0F); }

/* What dropout multiplies the weight of a pair by: docs/numerics.md says which pairs are dropped. */
static double reference_kept(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const uint32_t dropped = reference_dropped(p);
  uint32_t at[4], key[2], bits, state[4];
  int round;
  if (dropped == 0) return 1.0;
  memcpy(state, reference_given.state->data, sizeof(state));
  key[0] = state[0], key[1] = state[1] ^ state[3];
  at[0] = (uint32_t)(j / 32 * 8 + j % 8), at[1] = (uint32_t)(i / 16 * 8 + i % 8);
  at[2] = (uint32_t)(b * p->heads_q + h), at[3] = state[2];
  for (round = 0; round < 7; ++round) {
    const uint64_t first = (uint64_t)0xD2511F53U * at[0], second = (uint64_t)0xCD9E8D57U * at[2];
    at[0] = (uint32_t)(second >> 32) ^ at[1] ^ key[0], at[1] = (uint32_t)second;
    at[2] = (uint32_t)(first >> 32) ^ at[3] ^ key[1], at[3] = (uint32_t)first;
    key[0] += 0x9E3779B9U, key[1] += 0xBB67AE85U;
  }
  bits = at[j / 8 % 4] >> (i / 8 % 2 == 0 ? 0 : 16) & 0x7fffU;
  return bits < dropped ? 0.0 : 32768.0 / (32768.0 - (double)dropped);
}

static double reference_scale(const hattn_forward_problem* p) {
  return p->softmax_scale != 0.0F ? (double)p->softmax_scale : 1.0 / sqrt((double)p->head_dim_qk);
}

/* What a score loses by ALiBi. */
static double reference_alibi(const hattn_forward_problem* p, int64_t b, int64_t h, int64_t i, int64_t j) {
  const hattn_tensor* const t = reference_given.slopes;
  const int top_left = p->corner == HATTN_TOP_LEFT && p->mask != HATTN_MASK_FULL;
  const double distance = fabs((double)(i + (top_left ? 0 : p->seqlen_kv - p->seqlen_q) - j));
  if (p->alibi == HATTN_ALIBI_NONE) return 0.0;
  return distance *
         (double)((const float*)t->data)[t->ndim == 2 ? b * t->stride[0] + h * t->stride[1] : h * t->stride[0]];
}

/* A score after scale and cap, before bias and ALiBi. */
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
  return reference_capped(p, q, k, b, h, i, j) + reference_bias(p, b, h, i, j) - reference_alibi(p, b, h, i, j);
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
    sum += reference_weight(p, q, k, b, h, i, j, row) * reference_kept(p, b, h, i, j) *
           reference_at(v, b, j, h / (p->heads_q / p->heads_kv), d);
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
  for (b = reference_first; b < p->batch; ++b) {
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

/* The gradient of the biased score of query i and key j, of one head: P (Z dO V^T - delta), where delta is O dO less
   the log-sum-exp's gradient, and Z what dropout multiplies the weight by. */
static inline double reference_d_biased(const hattn_forward_problem* p, const hattn_backward_args* args, int64_t b,
                                        int64_t h, int64_t i, int64_t j) {
  const reference_row row = reference_softmax(p, args->q, args->k, b, h, i);
  double d_weight = args->d_lse != NULL ? reference_at(args->d_lse, b, h, i, 0) : 0.0;
  int64_t d;
  double kept;
  if (!reference_keeps(p, b, h, i, j)) return 0.0;
  kept = reference_kept(p, b, h, i, j);
  for (d = 0; d < p->head_dim_vo; ++d) {
    const double o = reference_output(p, args->q, args->k, args->v, b, h, i, d, row);
    d_weight += reference_at(args->d_o, b, i, h, d) *
                (kept * reference_at(args->v, b, j, h / (p->heads_q / p->heads_kv), d) - o);
  }
  return reference_weight(p, args->q, args->k, b, h, i, j, row) * d_weight;
}

/* The same of the score before the cap. */
static inline double reference_d_score(const hattn_forward_problem* p, const hattn_backward_args* args, int64_t b,
                                       int64_t h, int64_t i, int64_t j) {
  if (!reference_keeps(p, b, h, i, j)) return 0.0;
  return reference_d_biased(p, args, b, h, i, j) *
         reference_slope(p, reference_capped(p, args->q, args->k, b, h, i, j));
}

/* Half a unit in the last place of a bias, as a share of its number. f32 is compared as it is. */
static inline double reference_bias_rounding(const hattn_tensor* t) {
  return t->dtype == HATTN_F32 ? 0.0 : ldexp(1.0, t->dtype == HATTN_BF16 ? -8 : -11);
}

/* The largest distance of the gradient of the bias, beyond half a unit in the last place of its type. */
static inline double reference_bias_distance(const hattn_forward_problem* p, const hattn_backward_args* args) {
  const hattn_tensor* const t = args->dbias;
  const double rounding = reference_bias_rounding(t);
  const int64_t batches = t->shape[0] == 1 ? p->batch : 1, heads = t->shape[1] == 1 ? p->heads_q : 1;
  const int64_t queries = t->shape[2] == 1 ? p->seqlen_q : 1;
  double worst = 0.0;
  int64_t b, h, i, j, n;
  for (b = 0; b < t->shape[0]; ++b) {
    for (h = 0; h < t->shape[1]; ++h) {
      for (i = 0; i < t->shape[2]; ++i) {
        for (j = 0; j < t->shape[3]; ++j) {
          double want = 0.0, distance;
          /* Of all that share the number. */
          for (n = 0; n < batches * heads * queries; ++n) {
            want += reference_d_biased(p, args, b + n / (heads * queries), h + n / queries % heads, i + n % queries, j);
          }
          distance = reference_worse(0.0, reference_biased_at(t, b, h, i, j), want);
          worst = fmax(worst, distance - rounding * fabs(want));
        }
      }
    }
  }
  return worst;
}

/* The largest distance of dQ, dK and dV from the plain computation, which looks at neither the O nor the log-sum-exp
   that is given; infinity where one of them is NaN. p is the forward problem. */
static inline double reference_gradient_distance(const hattn_forward_problem* p, const hattn_backward_args* args) {
  const int64_t group = p->heads_q / p->heads_kv;
  double worst = 0.0;
  int64_t b, h, i, j, d;
  for (b = reference_first; b < p->batch; ++b) {
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
              want += reference_weight(p, args->q, args->k, b, of, i, j, row) * reference_kept(p, b, of, i, j) *
                      reference_at(args->d_o, b, i, of, d);
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
