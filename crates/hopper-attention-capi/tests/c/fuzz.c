/* Random calls of every function on the CPU, legal ones and malformed ones. For each of them:

   - It returns a status that has a name, and that is not a bug of the library. A failure has a text.
   - It does not crash, hang or print.
   - A call that is refused writes nothing. One that is not writes the elements of its outputs and nothing else.
   - A legal call is computed, and its results are right.

   The calls are made in a process of their own, so that this one can say which call it was that ended it. Environment:
     HATTN_FUZZ_SEED     seed of the random numbers
     HATTN_FUZZ_SECONDS  how long to go on
     HATTN_FUZZ_FIRST, HATTN_FUZZ_CALLS  the number of the first call and how many to make: one call again, alone */
#define _DEFAULT_SOURCE
#include "fuzz.h"

#include <errno.h>
#include <hopper_attention_lists.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fuzz_lists.h"
#include "fuzz_packed.h"

enum { PASSES = 3, HANG_SECONDS = 120, STATUSES = 32 };
typedef enum pass { FORWARD, BACKWARD, QUANTIZE } pass;

/* What the process that makes the calls tells this one. */
typedef struct report {
  volatile uint64_t number; /* of the call that is being made */
  uint64_t calls, computed[PASSES], refused[PASSES], statuses[STATUSES];
  uint64_t of_lengths[PASSES]; /* computed, with packed sequences or used lengths */
  int failed_line;
  char failed[256], last_error[512];
} report;

static report* shared;

#define HOLDS(condition)                                                                  \
  do {                                                                                    \
    if (!(condition) && shared->failed_line == 0) {                                       \
      shared->failed_line = __LINE__;                                                     \
      snprintf(shared->failed, sizeof(shared->failed), "%s", #condition);                 \
      snprintf(shared->last_error, sizeof(shared->last_error), "%s", hattn_last_error()); \
    }                                                                                     \
  } while (0)

/* -- a call's structs */

static int is_legal; /* whether nothing was spoilt */
static hattn_forward_problem* forward;
static hattn_backward_problem* backward;
static hattn_quantize_problem* quantize;
static hattn_forward_args* forward_args;
static hattn_backward_args* backward_args;
static hattn_quantize_args* quantize_args;

#define ENTER(type, value) ((type*)enter(#type, &(value), sizeof(value)))

/* Sizes and options that problems of all passes have. */
#define SET_NUMBERS(p, long_rows)                                                                         \
  do {                                                                                                    \
    (p).mask = (hattn_mask)below(5), (p).corner = (hattn_corner)below(2);                                 \
    (p).batch = one_in(16) ? 0 : 1 + ((long_rows) ? 0 : below(2));                                        \
    (p).seqlen_q = (long_rows) ? 120 + below(20) : one_in(8) ? 0 : below(9);                              \
    (p).seqlen_kv = (long_rows) ? 120 + below(20) : one_in(8) ? 0 : below(9);                             \
    (p).heads_kv = 1 + below(2), (p).heads_q = (p).heads_kv * (1 + below(2));                             \
    (p).head_dim_qk = 1 + below((long_rows) ? 4 : 17), (p).head_dim_vo = 1 + below((long_rows) ? 4 : 17); \
    (p).window_left = below(8) + ((p).mask > 2 ? 1 : -1), (p).window_right = below(8) - 1;                \
    (p).softmax_scale = one_in(2) ? 0.0F : 0.25F;                                                         \
    (p).sm_margin = one_in(4) ? (int32_t)below(200) : 0;                                                  \
    (p).workspace_limit = one_in(4) ? 1 + (uint64_t)below(100000) : 0;                                    \
    /* Nothing to compute, whatever the other numbers are. */                                             \
    if ((p).batch == 0 && one_in(2)) {                                                                    \
      (p).heads_kv <<= 20, (p).heads_q <<= 20;                                                            \
    }                                                                                                     \
  } while (0)

/* Packed sequences and used lengths of a problem. (Too many heads have none: packed tensors of no sequence have rows.)
 */
#define SET_LENGTHS(p, is_long)                                                                  \
  do {                                                                                           \
    if ((p).heads_q < 100 && one_in(3)) {                                                        \
      if ((p).batch > 0 && !(is_long)) (p).batch = 1 + below(MOST_SEQUENCES);                    \
      draw_side(REFERENCE_Q, (p).batch, &(p).seqlen_q, is_long);                                 \
      draw_side(REFERENCE_KV, (p).batch, &(p).seqlen_kv, is_long);                               \
      (p).cu_seqlens_q = sides[0].is_packed, (p).cu_seqlens_kv = sides[1].is_packed;             \
      (p).seqused_q = sides[0].has_used, (p).seqused_kv = sides[1].has_used;                     \
      (p).max_seqlen_q = sides[0].hint, (p).max_seqlen_kv = sides[1].hint;                       \
      (p).fill_gaps = has_lengths() && one_in(2);                                                \
      if ((p).bias != 0 && sides[0].is_packed && one_in(2)) (p).bias_queries = sides[0].longest; \
      if ((p).bias != 0 && sides[1].is_packed && one_in(2)) (p).bias_keys = sides[1].longest;    \
    }                                                                                            \
  } while (0)
#define ADD_LENGTHS(p, a)                                                              \
  do {                                                                                 \
    add_side(REFERENCE_Q, (p)->batch), add_side(REFERENCE_KV, (p)->batch);             \
    (a)->cu_seqlens_q = sides[0].cu_seqlens, (a)->cu_seqlens_kv = sides[1].cu_seqlens; \
    (a)->seqused_q = sides[0].seqused, (a)->seqused_kv = sides[1].seqused;             \
  } while (0)

#define Q_ROWS(p) (p)->cu_seqlens_q, (p)->batch, (p)->seqlen_q, (p)->heads_q
#define KV_ROWS(p) (p)->cu_seqlens_kv, (p)->batch, (p)->seqlen_kv, (p)->heads_kv
#define LSE_ROWS(p) (p)->cu_seqlens_q, (p)->batch, (p)->heads_q, (p)->seqlen_q
/* For how many queries and keys a bias has numbers. */
#define COVERED(p) \
  ((p)->bias_queries != 0 ? (p)->bias_queries : (p)->seqlen_q), ((p)->bias_keys != 0 ? (p)->bias_keys : (p)->seqlen_kv)

static hattn_tensor* add_factors(use of, int is_packed, int64_t seqlen, int64_t heads) {
  switch (forward->scaling) {
    case HATTN_PER_TENSOR:
      return add_tensor(of, HATTN_F32, 3, 1, 1, 1, 0);
    case HATTN_PER_HEAD:
      return add_tensor(of, HATTN_F32, 3, forward->batch, forward->heads_kv, 1, 0);
    default:
      if (is_packed) return add_tensor(of, HATTN_F32, 2, heads, (seqlen + 127 * forward->batch) / 128, 0, 0);
      return add_tensor(of, HATTN_F32, 3, forward->batch, heads, (seqlen + 127) / 128, 0);
  }
}

/* Slopes, lists, bias and dropout of a problem, and their tensors in the arguments of a run. Too many heads have none.
 */
#define SET_LISTS(p, wanted)                                                                               \
  do {                                                                                                     \
    const int64_t columns = ((p).seqlen_kv + BLOCK - 1) / BLOCK;                                           \
    if ((p).heads_q < 100 && one_in(3)) (p).alibi = (hattn_alibi)below(3);                                 \
    if ((p).heads_q < 100 && (wanted)) {                                                                   \
      (p).block_mask = HATTN_BLOCK_MASK_LISTS | (hattn_block_mask)(below(8) * HATTN_BLOCK_MASK_PER_BATCH); \
      (p).block_mask_most_partial = (int32_t)below(columns + 1);                                           \
    }                                                                                                      \
    if ((p).heads_q < 100 && one_in(3)) {                                                                  \
      (p).bias = (hattn_dtype)(1 + below(3)), (p).bias_dims = (hattn_bias_dims)below(8);                   \
    }                                                                                                      \
    if (one_in(3)) (p).dropout = one_in(2) ? 0.1F : 0.5F;                                                  \
  } while (0)
#define ADD_LISTS(p, a)                                                                                    \
  do {                                                                                                     \
    const lists added = add_lists((p)->block_mask, (p)->block_mask_most_partial, (p)->batch, (p)->heads_q, \
                                  (p)->seqlen_q, (p)->seqlen_kv);                                          \
    (a)->bias = add_bias((p)->bias, (p)->bias_dims, (p)->batch, (p)->heads_q, COVERED(p));                 \
    (a)->dropout_state = add_state((p)->dropout);                                                          \
    (a)->alibi_slopes = add_slopes((p)->alibi, (p)->batch, (p)->heads_q);                                  \
    (a)->mask_block_cnt = added.counts, (a)->mask_block_idx = added.indices, (a)->mask_bits = added.bits;  \
    (a)->full_block_cnt = added.full_counts, (a)->full_block_idx = added.full_indices;                     \
  } while (0)
#define USE_LISTS(a)                                                                                       \
  do {                                                                                                     \
    reference_given.slopes = (a)->alibi_slopes, reference_given.counts = (a)->mask_block_cnt;              \
    reference_given.indices = (a)->mask_block_idx, reference_given.bits = (a)->mask_bits;                  \
    reference_given.bias = (a)->bias, reference_given.state = (a)->dropout_state;                          \
    reference_given.full_counts = (a)->full_block_cnt, reference_given.full_indices = (a)->full_block_idx; \
  } while (0)

static void make_forward_problem(hattn_dtype dtype) {
  hattn_forward_problem p = HATTN_FORWARD_PROBLEM_INIT;
  const int has_lists = dtype != HATTN_E4M3 && one_in(3);
  const int is_long = has_lists ? one_in(4) : dtype == HATTN_E4M3 && one_in(16);
  SET_NUMBERS(p, is_long);
  p.dtype = dtype;
  p.lse = (int32_t)below(2);
  p.softcap = one_in(3) ? 1.5F : 0.0F;
  if (dtype != HATTN_E4M3) p.max_logits = p.heads_q < 100 && one_in(3);
  if (dtype != HATTN_E4M3) SET_LISTS(p, has_lists);
  if (p.block_mask == 0) SET_LENGTHS(p, is_long);
  if (dtype == HATTN_E4M3) {
    static const hattn_dtype outputs[] = {0, HATTN_F16, HATTN_BF16, HATTN_E4M3};
    p.output = outputs[below(4)];
    p.scaling = (hattn_scaling)below(3);
    p.amax = (int32_t)below(2), p.half_scores = (int32_t)below(2);
  }
  forward = ENTER(hattn_forward_problem, p);
}

static void make_forward(void) {
  hattn_forward_args a = HATTN_FORWARD_ARGS_INIT;
  hattn_dtype dtype, output;
  make_forward_problem((hattn_dtype)(1 + below(4)));
  dtype = forward->dtype;
  output = dtype != HATTN_E4M3 ? dtype : forward->output == 0 ? HATTN_BF16 : forward->output;
  a.q = add_rows(READ, dtype, Q_ROWS(forward), forward->head_dim_qk);
  a.k = add_rows(READ, dtype, KV_ROWS(forward), forward->head_dim_qk);
  a.v = add_rows(READ, dtype, KV_ROWS(forward), forward->head_dim_vo);
  a.o = add_rows(WRITTEN, output, Q_ROWS(forward), forward->head_dim_vo);
  if (forward->lse) a.lse = add_row_values(WRITTEN, LSE_ROWS(forward));
  if (forward->max_logits) a.max_logits = add_tensor(WRITTEN, HATTN_F32, 1, forward->heads_q, 0, 0, 0);
  if (dtype == HATTN_E4M3) {
    a.descale_q = add_factors(FACTOR, forward->cu_seqlens_q, forward->seqlen_q, forward->heads_q);
    a.descale_k = add_factors(FACTOR, forward->cu_seqlens_kv, forward->seqlen_kv, forward->heads_kv);
    a.descale_v = add_factors(FACTOR, forward->cu_seqlens_kv, forward->seqlen_kv, forward->heads_kv);
    if (output == HATTN_E4M3) a.scale_o = add_tensor(FACTOR, HATTN_F32, 1, 1, 0, 0, 0);
    if (forward->amax) a.amax = add_tensor(WRITTEN, HATTN_F32, 1, 1, 0, 0, 0);
  }
  ADD_LISTS(forward, &a);
  ADD_LENGTHS(forward, &a);
  hide_gaps(forward, a.q, REFERENCE_Q, 1);
  hide_gaps(forward, a.k, REFERENCE_KV, 1), hide_gaps(forward, a.v, REFERENCE_KV, 1);
  forward_args = ENTER(hattn_forward_args, a);
}

/* The forward problem of a backward one. */
static hattn_forward_problem forward_of(const hattn_backward_problem* p) {
  hattn_forward_problem of = HATTN_FORWARD_PROBLEM_INIT;
  of.dtype = p->dtype, of.mask = p->mask, of.corner = p->corner, of.lse = 1;
  of.batch = p->batch, of.seqlen_q = p->seqlen_q, of.seqlen_kv = p->seqlen_kv;
  of.heads_q = p->heads_q, of.heads_kv = p->heads_kv, of.head_dim_qk = p->head_dim_qk, of.head_dim_vo = p->head_dim_vo;
  of.window_left = p->window_left, of.window_right = p->window_right, of.softmax_scale = p->softmax_scale;
  of.softcap = p->softcap, of.alibi = p->alibi;
  of.bias = p->bias, of.bias_dims = p->bias_dims, of.dropout = p->dropout;
  of.block_mask = p->block_mask, of.block_mask_most_partial = p->block_mask_most_partial;
  of.cu_seqlens_q = p->cu_seqlens_q, of.cu_seqlens_kv = p->cu_seqlens_kv, of.fill_gaps = p->fill_gaps;
  of.seqused_q = p->seqused_q, of.seqused_kv = p->seqused_kv;
  of.max_seqlen_q = p->max_seqlen_q, of.max_seqlen_kv = p->max_seqlen_kv;
  of.bias_queries = p->bias_queries, of.bias_keys = p->bias_keys;
  return of;
}

static void make_backward(void) {
  hattn_backward_problem p = HATTN_BACKWARD_PROBLEM_INIT;
  hattn_backward_args a = HATTN_BACKWARD_ARGS_INIT;
  hattn_forward_problem of;
  hattn_forward_args of_args = HATTN_FORWARD_ARGS_INIT;
  hattn_forward_plan* plan = NULL;
  SET_NUMBERS(p, 0);
  p.dtype = (hattn_dtype)(1 + below(3));
  p.d_lse = (int32_t)below(2), p.deterministic = (int32_t)below(2);
  p.softcap = one_in(3) ? 1.5F : 0.0F;
  SET_LISTS(p, one_in(3));
  if (p.block_mask == 0) SET_LENGTHS(p, 0);
  p.d_bias = p.bias != 0 && one_in(2);
  backward = ENTER(hattn_backward_problem, p);
  of = forward_of(&p);
  a.q = add_rows(READ, p.dtype, Q_ROWS(&p), p.head_dim_qk);
  a.k = add_rows(READ, p.dtype, KV_ROWS(&p), p.head_dim_qk);
  a.v = add_rows(READ, p.dtype, KV_ROWS(&p), p.head_dim_vo);
  a.o = add_rows(RESULT, p.dtype, Q_ROWS(&p), p.head_dim_vo);
  a.lse = add_row_values(RESULT, LSE_ROWS(&p));
  a.d_o = add_rows(READ, p.dtype, Q_ROWS(&p), p.head_dim_vo);
  if (p.d_lse) a.d_lse = add_row_values(READ, LSE_ROWS(&p));
  a.d_q = add_rows(WRITTEN, p.dtype, Q_ROWS(&p), p.head_dim_qk);
  a.d_k = add_rows(WRITTEN, p.dtype, KV_ROWS(&p), p.head_dim_qk);
  a.d_v = add_rows(WRITTEN, p.dtype, KV_ROWS(&p), p.head_dim_vo);
  ADD_LISTS(&p, &a);
  if (p.d_bias) {
    a.dbias = add_bias_tensor(WRITTEN, p.bias, p.bias_dims, p.batch, p.heads_q, COVERED(&p));
  }
  ADD_LENGTHS(&p, &a);
  hide_gaps(&of, a.q, REFERENCE_Q, 1);
  hide_gaps(&of, a.k, REFERENCE_KV, 1), hide_gaps(&of, a.v, REFERENCE_KV, 1);
  hide_gaps(&of, a.d_o, REFERENCE_Q, 1), hide_gaps(&of, a.d_lse, REFERENCE_Q, 2);
  hide_gaps(&of, a.o, REFERENCE_Q, 1), hide_gaps(&of, a.lse, REFERENCE_Q, 2);
  backward_args = ENTER(hattn_backward_args, a);
  /* What the forward pass gives. */
  of_args.q = a.q, of_args.k = a.k, of_args.v = a.v, of_args.o = a.o, of_args.lse = a.lse;
  of_args.bias = a.bias, of_args.dropout_state = a.dropout_state;
  of_args.alibi_slopes = a.alibi_slopes, of_args.mask_block_cnt = a.mask_block_cnt;
  of_args.mask_block_idx = a.mask_block_idx, of_args.mask_bits = a.mask_bits;
  of_args.full_block_cnt = a.full_block_cnt, of_args.full_block_idx = a.full_block_idx;
  of_args.cu_seqlens_q = a.cu_seqlens_q, of_args.cu_seqlens_kv = a.cu_seqlens_kv;
  of_args.seqused_q = a.seqused_q, of_args.seqused_kv = a.seqused_kv;
  HOLDS(hattn_forward_plan_create(&of, HATTN_CPU, &plan) == HATTN_OK);
  HOLDS(hattn_forward_run(plan, &of_args, NULL) == HATTN_OK);
  hattn_forward_plan_destroy(plan);
}

static void make_quantize(void) {
  hattn_quantize_problem p = HATTN_QUANTIZE_PROBLEM_INIT;
  hattn_quantize_args a = HATTN_QUANTIZE_ARGS_INIT;
  int i;
  make_forward_problem(HATTN_E4M3);
  p.forward = forward;
  p.source = (hattn_dtype)(1 + below(3));
  p.hadamard = (int32_t)below(2), p.seed = random_bits();
  for (i = 0; i < 3; ++i) {
    hattn_quantize_tensor one = HATTN_QUANTIZE_TENSOR_INIT;
    const hattn_forward_problem* f = forward;
    const int64_t seqlen = i == 0 ? f->seqlen_q : f->seqlen_kv, heads = i == 0 ? f->heads_q : f->heads_kv;
    const int64_t dim = i == 2 ? f->head_dim_vo : f->head_dim_qk;
    const int is_packed = i == 0 ? f->cu_seqlens_q : f->cu_seqlens_kv;
    if (one_in(4)) continue;
    one.given = (int32_t)below(2);
    one.values = add_rows(READ, p.source, is_packed, f->batch, seqlen, heads, dim);
    one.stored = add_rows(WRITTEN, HATTN_E4M3, is_packed, f->batch, seqlen, heads, dim);
    one.descale = add_factors(one.given ? FACTOR : WRITTEN, is_packed, seqlen, heads);
    *(i == 0 ? &a.q : i == 1 ? &a.k : &a.v) = ENTER(hattn_quantize_tensor, one);
  }
  if (one_in(2)) a.counts = add_tensor(WRITTEN, HATTN_F32, 2, 3, 2, 0, 0);
  ADD_LENGTHS(forward, &a);
  if (a.q != NULL) hide_gaps(forward, a.q->values, REFERENCE_Q, 1);
  if (a.k != NULL) hide_gaps(forward, a.k->values, REFERENCE_KV, 1);
  if (a.v != NULL) hide_gaps(forward, a.v->values, REFERENCE_KV, 1);
  quantize = ENTER(hattn_quantize_problem, p);
  quantize_args = ENTER(hattn_quantize_args, a);
}

/* -- what a run may have written, and what is right */

static void mark(const hattn_tensor* t, unsigned char* at, void* to) {
  (void)to;
  memset(may_change + (at - memory), 1, (size_t)bytes_of(t->dtype));
}

static void mark_all(const hattn_tensor* t) {
  if (t != NULL) each_element(t, mark, NULL);
}

/* The rows that a legal call writes. The lists of another one may not be what they were. */
static void mark_rows(const hattn_forward_problem* p, const hattn_tensor* t, int of, int axis) {
  if (is_legal && !p->fill_gaps) {
    each_of_sequences(p, t, of, axis, mark, NULL);
  } else {
    mark_all(t);
  }
}

static void mark_outputs(pass of) {
  if (of == FORWARD) {
    mark_rows(forward, forward_args->o, REFERENCE_Q, 1);
    if (forward->lse) mark_rows(forward, forward_args->lse, REFERENCE_Q, 2);
    /* An older struct ends before these pointers. */
    if (forward_args->struct_size > offsetof(hattn_forward_args, amax)) mark_all(forward_args->amax);
    if (forward_args->struct_size > offsetof(hattn_forward_args, max_logits)) mark_all(forward_args->max_logits);
  } else if (of == BACKWARD) {
    const hattn_forward_problem p = forward_of(backward);
    mark_rows(&p, backward_args->d_q, REFERENCE_Q, 1);
    mark_rows(&p, backward_args->d_k, REFERENCE_KV, 1), mark_rows(&p, backward_args->d_v, REFERENCE_KV, 1);
    if (backward_args->struct_size > offsetof(hattn_backward_args, dbias)) mark_all(backward_args->dbias);
  } else {
    const hattn_quantize_tensor* const all[] = {quantize_args->q, quantize_args->k, quantize_args->v};
    int i;
    for (i = 0; i < 3; ++i) {
      if (all[i] == NULL) continue;
      mark_rows(forward, all[i]->stored, i == 0 ? REFERENCE_Q : REFERENCE_KV, 1);
      if (!all[i]->given) mark_all(all[i]->descale);
    }
    mark_all(quantize_args->counts);
  }
}

/* The largest magnitude of a tensor; infinity where an element is not finite. */
static void take_largest(const hattn_tensor* t, unsigned char* at, void* to) {
  const double magnitude = fabs(number_at(at, t->dtype));
  double* const largest = (double*)to;
  *largest = isfinite(magnitude) ? fmax(*largest, magnitude) : INFINITY;
}

static double largest_of(const hattn_tensor* t) {
  double largest = 0.0;
  if (t != NULL) each_element(t, take_largest, &largest);
  return largest;
}

/* The same of the rows of sequences. */
static double largest_of_rows(const hattn_forward_problem* p, const hattn_tensor* t, int of) {
  double largest = 0.0;
  each_of_sequences(p, t, of, 1, take_largest, &largest);
  return largest;
}

static void is_no_nan(const hattn_tensor* t, unsigned char* at, void* to) {
  (void)to;
  HOLDS(number_at(at, t->dtype) < 200.0); /* -infinity too */
}

static void forward_is_right(void) {
  const hattn_forward_args* a = forward_args;
  /* What dropout keeps is multiplied by this. */
  const double factor = 32768.0 / (32768.0 - (double)reference_dropped(forward));
  /* O is a mean of values. P is rounded in FP8, by up to 1/16; so is O, in its own type. */
  const double largest_v = largest_of_rows(forward, a->v, REFERENCE_KV);
  const double largest_o = largest_of_rows(forward, a->o, REFERENCE_Q);
  const double most = factor * largest_v * (a->descale_v != NULL ? 1.15 * largest_of(a->descale_v) : 1.01);
  each_of_sequences(forward, a->lse, REFERENCE_Q, 2, is_no_nan, NULL);
  if (a->o->dtype == HATTN_E4M3) {
    /* Small numbers are 2^-9 apart, so that rounding adds up to half of that. */
    HOLDS(largest_o <= fmin(448.0, most * largest_of(a->scale_o) * 1.1 + 1.0 / 1024.0));
  } else {
    HOLDS(largest_o <= most);
  }
  HOLDS(largest_of(a->amax) <= most);
  USE_LISTS(a);
  if (forward->fill_gaps) {
    HOLDS(gaps_are(forward, a->o, REFERENCE_Q, 1, 0.0));
    HOLDS(gaps_are(forward, a->lse, REFERENCE_Q, 2, -(double)INFINITY));
  }
  if (forward->dtype == HATTN_F32) {
    HOLDS((has_lengths() ? reference_packed_distance : reference_distance)(forward, a) < 5e-5 * factor);
  }
}

static void backward_is_right(void) {
  const hattn_forward_problem of = forward_of(backward);
  const hattn_backward_args* a = backward_args;
  HOLDS(isfinite(largest_of_rows(&of, a->d_q, REFERENCE_Q)) && isfinite(largest_of_rows(&of, a->d_k, REFERENCE_KV)));
  HOLDS(isfinite(largest_of_rows(&of, a->d_v, REFERENCE_KV)));
  if (of.fill_gaps) {
    HOLDS(gaps_are(&of, a->d_q, REFERENCE_Q, 1, 0.0));
    HOLDS(gaps_are(&of, a->d_k, REFERENCE_KV, 1, 0.0) && gaps_are(&of, a->d_v, REFERENCE_KV, 1, 0.0));
  }
  USE_LISTS(a);
  if (of.dtype != HATTN_F32) return;
  HOLDS((has_lengths() ? reference_packed_gradient_distance : reference_gradient_distance)(&of, a) < 1e-3);
  if (backward->d_bias) {
    HOLDS((has_lengths() ? reference_packed_bias_distance : reference_bias_distance)(&of, a) < 1e-3);
  }
}

static void quantised_is_right(void) {
  const hattn_quantize_tensor* const all[] = {quantize_args->q, quantize_args->k, quantize_args->v};
  int i;
  for (i = 0; i < 3; ++i) {
    const hattn_quantize_tensor* one = all[i];
    const double most_stored = i < 2 && forward->half_scores ? 14.0 : 448.0;
    const int whose = i == 0 ? REFERENCE_Q : REFERENCE_KV;
    double largest;
    if (one == NULL) continue;
    HOLDS(largest_of_rows(forward, one->stored, whose) <= most_stored);
    HOLDS(!forward->fill_gaps || gaps_are(forward, one->stored, whose, 1, 0.0));
    largest = largest_of_rows(forward, one->values, whose);
    if (one->given || (i < 2 && quantize->hadamard) || forward->scaling != HATTN_PER_TENSOR || largest == 0.0) continue;
    /* The largest value becomes the largest that may be stored. */
    HOLDS(largest_of_rows(forward, one->stored, whose) == most_stored);
    HOLDS(fabs(largest_of(one->descale) * most_stored - largest) <= 1e-5 * largest);
  }
  HOLDS(isfinite(largest_of(quantize_args->counts)));
}

/* -- calls */

static hattn_status counted(hattn_status status) {
  HOLDS(strcmp(hattn_status_name(status), "HATTN_ERROR_?") != 0 && status != HATTN_ERROR_INTERNAL);
  HOLDS(status == HATTN_OK || strstr(hattn_last_error(), ": ") != NULL || strstr(hattn_last_error(), "; ") != NULL);
  if (status >= 0 && status < STATUSES) ++shared->statuses[status];
  return status;
}

static hattn_device any_device(void) {
  static const hattn_device wrong[] = {-2, INT32_MIN, INT32_MAX, 1000};
  if (is_legal || !one_in(8)) return HATTN_CPU;
  return wrong[below(4)];
}

static void call_dropout_mask(void) {
  static const float probabilities[] = {0.0F, 0.25F, 0.999F, 1.0F, -1.0F, NAN};
  uint8_t keep[4 * 4 * 4 * 4 + 8];
  int64_t sizes[4];
  size_t bytes = 1, i;
  for (i = 0; i < 4; ++i) sizes[i] = below(5), bytes *= (size_t)sizes[i];
  if (one_in(8)) sizes[below(4)] = nasty(1);
  memset(keep, 0xA5, sizeof(keep));
  const hattn_status status =
      counted(hattn_dropout_mask(probabilities[below(6)], random_bits(), random_bits(), sizes[0], sizes[1], sizes[2],
                                 sizes[3], one_in(16) ? NULL : keep, one_in(16) ? bytes + 1 : bytes));
  for (i = 0; i < sizeof(keep); ++i) HOLDS(status == HATTN_OK && i < bytes ? keep[i] <= 1 : keep[i] == 0xA5);
}

static void call_small_functions(void) {
  static const char pieces[] = "\t\t\t\n#0.2.0 card\xff\xc3\xa9 sm90";
  char text[64];
  const size_t length = (size_t)below(sizeof(text));
  hattn_tuning* tuning = NULL;
  hattn_tensor any = HATTN_TENSOR_INIT, given;
  int32_t count = -1;
  size_t i;
  any.ndim = (int32_t)below(6);
  for (i = 0; i < 4; ++i) any.shape[i] = one_in(4) ? nasty(1) : below(9), any.stride[i] = below(9);
  given = any;
  if (counted(hattn_tensor_contiguous(&any)) == HATTN_OK) {
    HOLDS(any.stride[any.ndim - 1] == 1);
    memcpy(any.stride, given.stride, sizeof(any.stride));
  }
  HOLDS(memcmp(&any, &given, sizeof(any)) == 0);
  for (i = 0; i < length; ++i) text[i] = pieces[below(sizeof(pieces))];
  HOLDS((counted(hattn_tuning_create(one_in(8) ? NULL : text, length, &tuning)) == HATTN_OK) == (tuning != NULL));
  hattn_tuning_destroy(tuning);
  HOLDS(counted(hattn_tuning_create(text, length, NULL)) == HATTN_ERROR_ARGUMENT);
  HOLDS(hattn_status_name((hattn_status)random_bits()) != NULL && hattn_last_error() != NULL);
  HOLDS(hattn_abi_version() == HATTN_ABI_VERSION && hattn_version() != NULL);
  call_dropout_mask();
  HOLDS(counted(hattn_device_count(NULL)) == HATTN_ERROR_ARGUMENT);
  HOLDS(counted(hattn_device_count(&count)) == HATTN_OK && count >= 0);
}

/* A size that is refused before anything is read by it, or the right one. */
static int64_t size_or_wrong(int64_t size) {
  static const int64_t wrong[] = {HATTN_UNSET, -2, INT64_MIN, INT64_MAX};
  return one_in(24) ? wrong[below(4)] : size;
}

/* Numbers from `least` on, most of them below `end`. NULL now and then. */
static const int32_t* some_numbers(int32_t* numbers, int64_t count, int64_t least, int64_t end) {
  int64_t i;
  for (i = 0; i < count; ++i) {
    numbers[i] = one_in(1024) ? (int32_t)random_bits() : (int32_t)(least + below(end - least));
  }
  return one_in(24) ? NULL : numbers;
}

/* Ranges in order, most of them. */
static const int32_t* some_ranges(int32_t* numbers, int64_t count, int64_t seqlen) {
  const int32_t* const made = some_numbers(numbers, 2 * count, 0, seqlen + 1);
  int64_t i;
  for (i = 0; i < count; ++i) {
    const int32_t first = numbers[2 * i];
    if (first > numbers[2 * i + 1] && !one_in(64)) numbers[2 * i] = numbers[2 * i + 1], numbers[2 * i + 1] = first;
  }
  return made;
}

/* What a function that makes lists has given. */
static void lists_were_made(hattn_status status, hattn_block_lists* const* place) {
  hattn_block_lists* const made = *place;
  hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;
  HOLDS((counted(status) == HATTN_OK) == (made != NULL));
  if (one_in(8)) arrays.struct_size = (uint32_t)below(200);
  if (counted(hattn_block_lists_arrays(made, one_in(16) ? NULL : &arrays)) == HATTN_OK) {
    int64_t i, most = 0;
    HOLDS(made != NULL && arrays.cnt_elements == arrays.shape[0] * arrays.shape[1] * arrays.shape[2]);
    HOLDS(arrays.idx_elements == arrays.cnt_elements * arrays.shape[3]);
    HOLDS(arrays.bits_elements == arrays.cnt_elements * arrays.bits_shape[3]);
    for (i = 0; i < arrays.cnt_elements; ++i) {
      HOLDS(arrays.mask_block_cnt[i] >= 0 && arrays.full_block_cnt[i] >= 0);
      HOLDS(arrays.mask_block_cnt[i] + arrays.full_block_cnt[i] <= arrays.shape[3]);
      if (arrays.mask_block_cnt[i] > most) most = arrays.mask_block_cnt[i];
    }
    HOLDS(most == arrays.block_mask_most_partial && arrays.bits_shape[3] == most * BLOCK_WORDS);
  }
  hattn_block_lists_destroy(made);
}

/* Lists of random descriptions, whose arrays have as many elements as their sizes say. */
static void call_list_makers(void) {
  enum { MOST_BATCH = 3, MOST_LENGTH = 150, MOST_NUMBERS = MOST_BATCH * MOST_LENGTH };
  static int32_t some[MOST_NUMBERS], others[MOST_NUMBERS], kinds[4];
  static uint8_t kept[4 * 16 * 16];
  const int64_t batch = below(MOST_BATCH + 1), seqlen_q = below(one_in(2) ? MOST_LENGTH + 1 : 9);
  const int64_t seqlen_kv = below(one_in(2) ? MOST_LENGTH + 1 : 9), count = below(4);
  hattn_block_lists* made = (hattn_block_lists*)(void*)slots;
  if (one_in(2)) {
    hattn_slices p = HATTN_SLICES_INIT;
    p.seqlen_q = size_or_wrong(seqlen_q), p.seqlen_kv = size_or_wrong(seqlen_kv), p.count = size_or_wrong(count);
    p.q_ranges = some_ranges(some, count, seqlen_q), p.k_ranges = some_ranges(others, count, seqlen_kv);
    p.types = some_numbers(kinds, count, 0, one_in(8) ? 6 : 4);
    lists_were_made(hattn_block_lists_from_slices(one_in(32) ? NULL : &p, &made), &made);
  } else if (one_in(2)) {
    hattn_documents p = HATTN_DOCUMENTS_INIT;
    p.batch = size_or_wrong(batch), p.seqlen_q = size_or_wrong(seqlen_q), p.seqlen_kv = size_or_wrong(seqlen_kv);
    p.q_ids = some_numbers(some, batch * seqlen_q, -1, 2), p.kv_ids = some_numbers(others, batch * seqlen_kv, -1, 2);
    lists_were_made(hattn_block_lists_from_documents(one_in(32) ? NULL : &p, &made), &made);
  } else if (one_in(2)) {
    hattn_prefixes p = HATTN_PREFIXES_INIT;
    p.batch = size_or_wrong(batch), p.seqlen_q = size_or_wrong(seqlen_q), p.seqlen_kv = size_or_wrong(seqlen_kv);
    p.prefixes = some_numbers(some, batch, 0, seqlen_kv + 1);
    p.mask = (hattn_mask)below(6), p.corner = (hattn_corner)below(3), p.window_left = nasty(0);
    p.window_right = nasty(0);
    lists_were_made(hattn_block_lists_from_prefixes(one_in(32) ? NULL : &p, &made), &made);
  } else if (one_in(2)) {
    hattn_spans p = HATTN_SPANS_INIT;
    int64_t i, all = 0;
    for (i = 0; i < batch; ++i) kinds[i] = (int32_t)below(9), all += kinds[i];
    p.batch = size_or_wrong(batch), p.seqlen_q = size_or_wrong(seqlen_q), p.seqlen_kv = size_or_wrong(seqlen_kv);
    p.spans = some_ranges(some, all, seqlen_kv);
    if (batch > 0 && one_in(24)) kinds[below(batch)] = -1 - (int32_t)below(9);
    p.counts = one_in(24) ? NULL : kinds;
    p.mask = (hattn_mask)below(6), p.window_left = nasty(0), p.window_right = nasty(0);
    p.within = (hattn_mask)below(6), p.within_left = nasty(0), p.within_right = nasty(0);
    p.corner = (hattn_corner)below(2), p.within_corner = (hattn_corner)below(3);
    lists_were_made(hattn_block_lists_from_spans(one_in(32) ? NULL : &p, &made), &made);
  } else {
    hattn_dense_mask p = HATTN_DENSE_MASK_INIT;
    size_t i;
    for (i = 0; i < sizeof(kept); ++i) kept[i] = (uint8_t)below(one_in(4096) ? 3 : 2);
    p.batch = size_or_wrong(below(3)), p.heads_q = size_or_wrong(below(3));
    p.seqlen_q = size_or_wrong(below(17)), p.seqlen_kv = size_or_wrong(below(17));
    p.kept = one_in(24) ? NULL : kept;
    lists_were_made(hattn_block_lists_from_dense_mask(one_in(32) ? NULL : &p, &made), &made);
  }
}

/* The calls of one pass with the structs as they stand. Gives the status of the run, or of what refused it before. */
#define CALLS(pass, problem, args)                                                                              \
  static hattn_status call_##pass(                                                                              \
      hattn_status (*create)(const hattn_##pass##_problem*, hattn_device, hattn_##pass##_plan**)) {             \
    const hattn_device device = any_device();                                                                   \
    hattn_##pass##_plan* plan = (hattn_##pass##_plan*)(void*)slots;                                             \
    char text[66];                                                                                              \
    const size_t capacity = (size_t)below(sizeof(text) - 1);                                                    \
    size_t length = 0, bytes = 99;                                                                              \
    const hattn_status supported = counted(hattn_##pass##_supported(problem, device));                          \
    hattn_status status = counted(create(problem, device, &plan));                                              \
    HOLDS(status == supported && (status == HATTN_OK) == (plan != NULL));                                       \
    if (status != HATTN_OK) return status;                                                                      \
    memset(text, POISON, sizeof(text));                                                                         \
    HOLDS(counted(hattn_##pass##_plan_describe(plan, text, capacity, one_in(4) ? NULL : &length)) == HATTN_OK); \
    HOLDS((unsigned char)text[capacity] == POISON && (capacity == 0 || memchr(text, 0, capacity) != NULL));     \
    HOLDS(counted(hattn_##pass##_plan_workspace_size(plan, &bytes)) == HATTN_OK && bytes == 0);                 \
    if (one_in(16)) {                                                                                           \
      HOLDS(counted(create(problem, HATTN_CPU, NULL)) == HATTN_ERROR_ARGUMENT);                                 \
      HOLDS(counted(hattn_##pass##_supported(NULL, HATTN_CPU)) == HATTN_ERROR_ARGUMENT);                        \
      HOLDS(counted(hattn_##pass##_plan_describe(plan, NULL, 8, &length)) == HATTN_ERROR_ARGUMENT);             \
      HOLDS(counted(hattn_##pass##_plan_workspace_size(NULL, &bytes)) == HATTN_ERROR_ARGUMENT && bytes == 0);   \
      HOLDS(counted(hattn_##pass##_run(NULL, args, NULL)) == HATTN_ERROR_ARGUMENT);                             \
      HOLDS(counted(hattn_##pass##_run(plan, NULL, NULL)) == HATTN_ERROR_ARGUMENT);                             \
      hattn_##pass##_plan_destroy(NULL);                                                                        \
    }                                                                                                           \
    /* On the CPU the stream may be anything. */                                                                \
    status = counted(hattn_##pass##_run(plan, args, one_in(2) ? NULL : (struct CUstream_st*)(void*)memory));    \
    hattn_##pass##_plan_destroy(plan);                                                                          \
    return status;                                                                                              \
  }
CALLS(forward, forward, forward_args)
CALLS(backward, backward, backward_args)
CALLS(quantize, quantize, quantize_args)

static hattn_status create_tuned(const hattn_forward_problem* problem, hattn_device device, hattn_forward_plan** plan) {
  hattn_tuning* tuning = NULL;
  hattn_status status;
  HOLDS(hattn_tuning_create(NULL, 0, &tuning) == HATTN_OK);
  status = hattn_forward_plan_create_tuned(problem, device, tuning, plan);
  hattn_tuning_destroy(tuning);
  return status;
}

static void spoil_lists(const hattn_tensor* a, const hattn_tensor* b) { spoil_list(one_in(2) ? a : b); }

static void one_call(void) {
  const pass of = (pass)below(PASSES);
  int64_t i;
  hattn_status status;
  memset(memory, POISON, (size_t)used); /* of the call before */
  slot_count = 0;
  used = 0;
  memset(sides, 0, sizeof(sides));
  is_legal = one_in(4);
  if (of == FORWARD) make_forward();
  if (of == BACKWARD) make_backward();
  if (of == QUANTIZE) make_quantize();
  used += 256;
  if (!is_legal) {
    if (of == FORWARD && one_in(4)) spoil_list(forward_args->dropout_state);
    if (of == FORWARD && one_in(2)) spoil_lists(forward_args->mask_block_cnt, forward_args->full_block_idx);
    if (of == BACKWARD && one_in(2)) spoil_lists(backward_args->mask_block_idx, backward_args->full_block_cnt);
    if (one_in(2)) spoil_lengths();
    for (i = 1 + below(3); i > 0; --i) spoil();
    keep_promise();
  }
  memcpy(before, memory, (size_t)used);
  memset(may_change, 0, (size_t)used);
  if (one_in(16)) call_small_functions();
  if (one_in(16)) call_list_makers();
  status = of == FORWARD    ? call_forward(one_in(4) ? create_tuned : hattn_forward_plan_create)
           : of == BACKWARD ? call_backward(hattn_backward_plan_create)
                            : call_quantize(hattn_quantize_plan_create);
  if (status == HATTN_OK) mark_outputs(of);
  for (i = 0; i < used; ++i) HOLDS(memory[i] == before[i] || may_change[i]);
  HOLDS(!is_legal || status == HATTN_OK);
  ++(status == HATTN_OK ? shared->computed : shared->refused)[of];
  shared->of_lengths[of] += status == HATTN_OK && has_lengths();
  if (is_legal && of == FORWARD) forward_is_right();
  if (is_legal && of == BACKWARD) backward_is_right();
  if (is_legal && of == QUANTIZE) quantised_is_right();
}

/* -- the process that makes the calls, and the one that watches it */

static uint64_t setting(const char* name, uint64_t usual) {
  const char* text = getenv(name);
  return text != NULL ? strtoull(text, NULL, 10) : usual;
}

static uint64_t seed, first, most, seconds;

static void make_calls(void) {
  const time_t end = time(NULL) + (time_t)seconds;
  memset(memory, POISON, sizeof(memory));
  for (shared->number = first; shared->calls < most && time(NULL) < end && shared->failed_line == 0; ++shared->number) {
    seed_call(seed, shared->number);
    one_call();
    ++shared->calls;
  }
}

/* Waits for a process. 0 if it has ended well. Ends it if one call takes too long. */
static int watch(pid_t child, char* how, size_t how_capacity) {
  uint64_t last = 0;
  time_t since = time(NULL);
  int status = 0;
  pid_t ended;
  while ((ended = waitpid(child, &status, WNOHANG)) == 0 || (ended < 0 && errno == EINTR)) {
    if (shared->number != last) last = shared->number, since = time(NULL);
    if (time(NULL) - since > HANG_SECONDS) {
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      snprintf(how, how_capacity, "no end after %d s", (int)HANG_SECONDS);
      return 1;
    }
    usleep(20000);
  }
  if (WIFSIGNALED(status)) snprintf(how, how_capacity, "signal %d", WTERMSIG(status));
  if (WIFEXITED(status)) snprintf(how, how_capacity, "exit %d", WEXITSTATUS(status));
  return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

static void calls_return_a_status_and_write_their_outputs_only(void) {
  FILE* const printed = tmpfile();
  char how[64] = "", text[2048] = "";
  int is_bad, i, kinds = 0;
  size_t length;
  pid_t child;
  CHECK(printed != NULL);
  fflush(stdout);
  child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    dup2(fileno(printed), STDOUT_FILENO);
    dup2(fileno(printed), STDERR_FILENO);
    make_calls();
    exit(0);
  }
  is_bad = watch(child, how, sizeof(how));
  rewind(printed);
  length = fread(text, 1, sizeof(text) - 1, printed);
  text[length] = '\0';
  fclose(printed);
  for (i = 0; i < STATUSES; ++i) kinds += shared->statuses[i] != 0;
  printf("fuzz: seed %llu, %llu calls", (unsigned long long)seed, (unsigned long long)shared->calls);
  for (i = 0; i < PASSES; ++i) {
    static const char* const names[] = {"forward", "backward", "quantize"};
    printf("; %s: %llu computed, %llu of them with lengths, %llu refused", names[i],
           (unsigned long long)shared->computed[i], (unsigned long long)shared->of_lengths[i],
           (unsigned long long)shared->refused[i]);
  }
  printf("; %d kinds of status\n", kinds);
  if (is_bad || shared->failed_line != 0 || length != 0) {
    /* The number has gone on after a call that returned. */
    const uint64_t number = shared->failed_line != 0 ? shared->number - 1 : shared->number;
    printf("call %llu of seed %llu: %s\nprinted: %s\n", (unsigned long long)number, (unsigned long long)seed, how,
           text);
    if (shared->failed_line != 0) {
      printf("%s:%d: does not hold: %s\nlast error: %s\n", __FILE__, shared->failed_line, shared->failed,
             shared->last_error);
    }
    printf("again: HATTN_FUZZ_SEED=%llu HATTN_FUZZ_FIRST=%llu HATTN_FUZZ_CALLS=1\n", (unsigned long long)seed,
           (unsigned long long)number);
  }
  CHECK(!is_bad && shared->failed_line == 0 && length == 0);
  if (check_broken || shared->calls < 1000) return;
  /* So many calls are of all kinds. */
  for (i = 0; i < PASSES; ++i) CHECK(shared->computed[i] > 0 && shared->refused[i] > 0 && shared->of_lengths[i] > 0);
  CHECK(kinds >= 8);
}

int main(void) {
  seed = setting("HATTN_FUZZ_SEED", 1);
  seconds = setting("HATTN_FUZZ_SECONDS", 15);
  first = setting("HATTN_FUZZ_FIRST", 0);
  most = setting("HATTN_FUZZ_CALLS", UINT64_MAX);
  shared = (report*)mmap(NULL, sizeof(report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  RUN("fuzz", calls_return_a_status_and_write_their_outputs_only);
  return check_result();
}
