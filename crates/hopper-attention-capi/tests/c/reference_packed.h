/* Packed sequences and used lengths by the plain computation of reference.h: one sequence after the other, each as a
   problem of its own. The lists are those of the arguments, and right. C99 and C++17. */
#ifndef HATTN_TESTS_REFERENCE_PACKED_H
#define HATTN_TESTS_REFERENCE_PACKED_H

#include "reference.h"

/* The lists of a run. NULL for each that the problem does not have. */
typedef struct reference_lengths {
  const hattn_tensor* offsets[2]; /* of Q; of K and V */
  const hattn_tensor* used[2];
} reference_lengths;

/* The lists in the arguments of a pass. */
#define REFERENCE_LENGTHS(args)                                                              \
  {                                                                                          \
    {(args)->cu_seqlens_q, (args)->cu_seqlens_kv}, { (args)->seqused_q, (args)->seqused_kv } \
  }

enum { REFERENCE_Q = 0, REFERENCE_KV = 1 };

/* The rows of one sequence on one side: the first one, and how many. */
typedef struct reference_rows {
  int64_t sequence, begin, count;
  int is_packed;
} reference_rows;

static int64_t reference_entry(const hattn_tensor* list, int64_t at) {
  return ((const int32_t*)list->data)[at * list->stride[0]];
}

static reference_rows reference_rows_of(const hattn_forward_problem* p, const reference_lengths* lengths, int side,
                                        int64_t sequence) {
  const hattn_tensor* const offsets = lengths->offsets[side];
  reference_rows rows = {sequence, 0, side == REFERENCE_Q ? p->seqlen_q : p->seqlen_kv, offsets != NULL};
  if (offsets != NULL) {
    rows.begin = reference_entry(offsets, sequence);
    rows.count = reference_entry(offsets, sequence + 1) - rows.begin;
  }
  if (lengths->used[side] != NULL) rows.count = reference_entry(lengths->used[side], sequence);
  return rows;
}

static int64_t reference_bytes(hattn_dtype dtype) {
  return dtype == HATTN_F32 || dtype == HATTN_I32 ? 4 : dtype == HATTN_E4M3 ? 1 : 2;
}

/* These rows of a tensor, with a batch of stride 0. axis is the dimension of the rows in a tensor with a batch: 1, or 2
   of a log-sum-exp. */
static hattn_tensor reference_part(const hattn_tensor* t, reference_rows rows, int axis) {
  hattn_tensor part = *t;
  int64_t first = 0;
  int i;
  if (rows.is_packed) {
    for (i = 3; i > 0; --i) part.shape[i] = t->shape[i - 1], part.stride[i] = t->stride[i - 1];
    part.ndim = t->ndim + 1;
  }
  /* In a dimension of size 1 the stride may be anything. */
  if (rows.count > 0) first = rows.is_packed ? rows.begin * part.stride[axis] : rows.sequence * t->stride[0];
  if (first != 0) part.data = (char*)t->data + first * reference_bytes(t->dtype);
  part.shape[0] = 1, part.stride[0] = 0, part.shape[axis] = rows.count;
  return part;
}

/* A sequence as the last batch entry of a problem. reference_first is its number meanwhile. */
static hattn_forward_problem reference_sequence(const hattn_forward_problem* p, reference_rows q, reference_rows kv) {
  hattn_forward_problem own = *p;
  own.batch = q.sequence + 1, own.seqlen_q = q.count, own.seqlen_kv = kv.count;
  reference_first = q.sequence;
  return own;
}

/* As reference_distance. */
static inline double reference_packed_distance(const hattn_forward_problem* p, const hattn_forward_args* args) {
  const reference_lengths lengths = REFERENCE_LENGTHS(args);
  double worst = 0.0;
  int64_t s;
  for (s = 0; s < p->batch; ++s) {
    const reference_rows of_q = reference_rows_of(p, &lengths, REFERENCE_Q, s);
    const reference_rows of_kv = reference_rows_of(p, &lengths, REFERENCE_KV, s);
    const hattn_forward_problem own = reference_sequence(p, of_q, of_kv);
    const hattn_tensor q = reference_part(args->q, of_q, 1), o = reference_part(args->o, of_q, 1);
    const hattn_tensor k = reference_part(args->k, of_kv, 1), v = reference_part(args->v, of_kv, 1);
    hattn_forward_args of_own = *args;
    hattn_tensor lse;
    of_own.q = &q, of_own.k = &k, of_own.v = &v, of_own.o = &o;
    if (args->lse != NULL) lse = reference_part(args->lse, of_q, 2), of_own.lse = &lse;
    worst = fmax(worst, reference_distance(&own, &of_own));
  }
  reference_first = 0;
  return worst;
}

/* The tensors of a backward pass that belong to one sequence, and arguments that point to them. */
typedef struct reference_backward {
  hattn_tensor q, k, v, o, d_o, d_lse, d_q, d_k, d_v;
  hattn_backward_args args;
} reference_backward;

static inline void reference_backward_part(reference_backward* own, const hattn_backward_args* args,
                                           reference_rows of_q, reference_rows of_kv) {
  own->args = *args;
  own->q = reference_part(args->q, of_q, 1), own->args.q = &own->q;
  own->k = reference_part(args->k, of_kv, 1), own->args.k = &own->k;
  own->v = reference_part(args->v, of_kv, 1), own->args.v = &own->v;
  own->o = reference_part(args->o, of_q, 1), own->args.o = &own->o;
  own->d_o = reference_part(args->d_o, of_q, 1), own->args.d_o = &own->d_o;
  if (args->d_lse != NULL) own->d_lse = reference_part(args->d_lse, of_q, 2), own->args.d_lse = &own->d_lse;
  own->d_q = reference_part(args->d_q, of_q, 1), own->args.d_q = &own->d_q;
  own->d_k = reference_part(args->d_k, of_kv, 1), own->args.d_k = &own->d_k;
  own->d_v = reference_part(args->d_v, of_kv, 1), own->args.d_v = &own->d_v;
}

/* As reference_gradient_distance. p is the forward problem. */
static inline double reference_packed_gradient_distance(const hattn_forward_problem* p,
                                                        const hattn_backward_args* args) {
  const reference_lengths lengths = REFERENCE_LENGTHS(args);
  double worst = 0.0;
  int64_t s;
  for (s = 0; s < p->batch; ++s) {
    const reference_rows of_q = reference_rows_of(p, &lengths, REFERENCE_Q, s);
    const reference_rows of_kv = reference_rows_of(p, &lengths, REFERENCE_KV, s);
    const hattn_forward_problem own = reference_sequence(p, of_q, of_kv);
    reference_backward part;
    reference_backward_part(&part, args, of_q, of_kv);
    worst = fmax(worst, reference_gradient_distance(&own, &part.args));
  }
  reference_first = 0;
  return worst;
}

/* As reference_bias_distance: a number of the bias may be shared by rows of several sequences. */
static inline double reference_packed_bias_distance(const hattn_forward_problem* p, const hattn_backward_args* args) {
  const reference_lengths lengths = REFERENCE_LENGTHS(args);
  const hattn_tensor* const t = args->dbias;
  const double rounding = reference_bias_rounding(t);
  double worst = 0.0;
  int64_t b, h, i, j, s, of, row;
  for (b = 0; b < t->shape[0]; ++b) {
    for (h = 0; h < t->shape[1]; ++h) {
      for (i = 0; i < t->shape[2]; ++i) {
        for (j = 0; j < t->shape[3]; ++j) {
          double want = 0.0, distance;
          /* Of all that share the number: sequences, heads and queries. */
          for (s = 0; s < p->batch; ++s) {
            const reference_rows of_q = reference_rows_of(p, &lengths, REFERENCE_Q, s);
            const reference_rows of_kv = reference_rows_of(p, &lengths, REFERENCE_KV, s);
            const hattn_forward_problem own = reference_sequence(p, of_q, of_kv);
            reference_backward part;
            if (j >= of_kv.count || ((p->bias_dims & HATTN_BIAS_PER_BATCH) != 0 && s != b)) continue;
            reference_backward_part(&part, args, of_q, of_kv);
            for (of = 0; of < p->heads_q; ++of) {
              if ((p->bias_dims & HATTN_BIAS_PER_HEAD) != 0 && of != h) continue;
              for (row = 0; row < of_q.count; ++row) {
                if ((p->bias_dims & HATTN_BIAS_PER_QUERY) != 0 && row != i) continue;
                want += reference_d_biased(&own, &part.args, s, of, row, j);
              }
            }
          }
          distance = reference_worse(0.0, reference_biased_at(t, b, h, i, j), want);
          worst = fmax(worst, distance - rounding * fabs(want));
        }
      }
    }
  }
  reference_first = 0;
  return worst;
}

#endif
