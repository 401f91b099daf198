/* Attention by plain double loops over f32 tensors in host memory: what the results are compared with. C99 and C++17.
 */
#ifndef HATTN_TESTS_REFERENCE_H
#define HATTN_TESTS_REFERENCE_H

#include <hopper_attention.h>
#include <math.h>

static double reference_at(const hattn_tensor* t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return (double)((const float*)t->data)[a * t->stride[0] + b * t->stride[1] + c * t->stride[2] + d * t->stride[3]];
}

static int reference_keeps(const hattn_forward_problem* p, int64_t query, int64_t key) {
  const int64_t own = query + (p->corner == HATTN_TOP_LEFT ? 0 : p->seqlen_kv - p->seqlen_q);
  if (p->mask == HATTN_MASK_CAUSAL) return key <= own;
  if (p->mask != HATTN_MASK_WINDOW) return 1;
  return (p->window_left == HATTN_UNBOUNDED || key >= own - p->window_left) &&
         (p->window_right == HATTN_UNBOUNDED || key <= own + p->window_right);
}

static double reference_score(const hattn_forward_problem* p, const hattn_tensor* q, const hattn_tensor* k, int64_t b,
                              int64_t h, int64_t i, int64_t j) {
  const double scale = p->softmax_scale != 0.0F ? (double)p->softmax_scale : 1.0 / sqrt((double)p->head_dim_qk);
  const int64_t h_kv = h / (p->heads_q / p->heads_kv);
  double dot = 0.0;
  int64_t d;
  for (d = 0; d < p->head_dim_qk; ++d) dot += reference_at(q, b, i, h, d) * reference_at(k, b, j, h_kv, d);
  return scale * dot;
}

/* The largest distance of O, and of the log-sum-exp where there is one, from the plain computation; infinity where one
   of them is NaN. A row without keys is 0, and its log-sum-exp -infinity. */
static double reference_distance(const hattn_forward_problem* p, const hattn_forward_args* args) {
  double worst = 0.0;
  int64_t b, h, i, j, d;
  for (b = 0; b < p->batch; ++b) {
    for (h = 0; h < p->heads_q; ++h) {
      for (i = 0; i < p->seqlen_q; ++i) {
        double highest = -INFINITY, sum = 0.0;
        for (j = 0; j < p->seqlen_kv; ++j) {
          if (reference_keeps(p, i, j)) highest = fmax(highest, reference_score(p, args->q, args->k, b, h, i, j));
        }
        for (j = 0; j < p->seqlen_kv; ++j) {
          if (reference_keeps(p, i, j)) sum += exp(reference_score(p, args->q, args->k, b, h, i, j) - highest);
        }
        for (d = 0; d < p->head_dim_vo; ++d) {
          double want = 0.0, distance;
          for (j = 0; j < p->seqlen_kv; ++j) {
            if (reference_keeps(p, i, j)) {
              want += exp(reference_score(p, args->q, args->k, b, h, i, j) - highest) / sum *
                      reference_at(args->v, b, j, h / (p->heads_q / p->heads_kv), d);
            }
          }
          distance = fabs(reference_at(args->o, b, i, h, d) - want);
          if (!(distance <= worst)) worst = isnan(distance) ? INFINITY : distance;
        }
        if (args->lse != NULL) {
          const hattn_tensor* t = args->lse;
          const double got = (double)((const float*)t->data)[b * t->stride[0] + h * t->stride[1] + i * t->stride[2]];
          const double want = highest + log(sum);
          const double distance = isinf(want) && want == got ? 0.0 : fabs(got - want);
          if (!(distance <= worst)) worst = isnan(distance) ? INFINITY : distance;
        }
      }
    }
  }
  return worst;
}

/* Made-up numbers between -1 and 1: the same ones on every machine. */
static void reference_fill(float* data, size_t count, uint32_t seed) {
  size_t i;
  for (i = 0; i < count; ++i) {
    seed = seed * 1664525U + 1013904223U;
    data[i] = (float)(seed >> 8) / 8388608.0F - 1.0F;
  }
}

#endif
