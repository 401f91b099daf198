/* What the library refuses of a backward pass on the CPU, as errors.c for the forward. */
#include "errors.h"

static hattn_backward_problem problem;
static hattn_backward_args args;
static hattn_tensor q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v;

static const operand operands[] = {OPERAND(q, READ, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK),
                                   OPERAND(k, READ, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK),
                                   OPERAND(v, READ, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO),
                                   OPERAND(o, READ, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_VO),
                                   OPERAND(lse, READ, OF_QUERIES, 3, BATCH, HEADS_Q, SEQLEN_Q),
                                   OPERAND(d_o, READ, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_VO),
                                   OPERAND(d_lse, READ, OF_QUERIES, 3, BATCH, HEADS_Q, SEQLEN_Q),
                                   OPERAND(d_q, WRITTEN, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK),
                                   OPERAND(d_k, WRITTEN, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK),
                                   OPERAND(d_v, WRITTEN, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO)};

/* The forward problem of which these are the gradients. */
static hattn_forward_problem forward_problem(void) {
  hattn_forward_problem forward = HATTN_FORWARD_PROBLEM_INIT;
  forward.dtype = problem.dtype;
  forward.mask = problem.mask, forward.corner = problem.corner;
  forward.lse = 1;
  SET_SIZES(forward, DIM_QK, DIM_VO);
  forward.window_left = problem.window_left, forward.window_right = problem.window_right;
  forward.softmax_scale = problem.softmax_scale;
  forward.softcap = problem.softcap;
  forward.alibi = problem.alibi;
  forward.dropout = problem.dropout;
  forward.block_mask = problem.block_mask, forward.block_mask_most_partial = problem.block_mask_most_partial;
  forward.bias = problem.bias, forward.bias_dims = problem.bias_dims;
  return forward;
}

static void vary(int i) { problem.deterministic = i % 2; }

/* O and the log-sum-exp, which a backward pass reads. */
static void prepare(void) {
  const hattn_forward_problem forward = forward_problem();
  hattn_forward_args forward_args = HATTN_FORWARD_ARGS_INIT;
  hattn_forward_plan* made = NULL;
  forward_args.q = &q, forward_args.k = &k, forward_args.v = &v, forward_args.o = &o, forward_args.lse = &lse;
  CHECK(hattn_forward_plan_create(&forward, HATTN_CPU, &made) == HATTN_OK);
  CHECK(hattn_forward_run(made, &forward_args, NULL) == HATTN_OK);
  hattn_forward_plan_destroy(made);
}

static double distance(void) {
  const hattn_forward_problem forward = forward_problem();
  return reference_gradient_distance(&forward, &args);
}

#define PASS(name) hattn_backward_##name
#define INIT(name) HATTN_BACKWARD_##name##_INIT
#define SUITE "errors_backward"
#define DESCRIBED "backward f32"
#define ARGS_LEAST 104
#define DTYPES "HATTN_F16 (1), HATTN_BF16 (2), on the CPU also HATTN_F32 (3)"
#define OPTIONAL d_lse
#define TOLERANCE 1e-5
#include "errors_pass.h"

static void the_distance_sees_what_is_wrong(void) {
  float* const last = (float*)d_k.data + K_SIZE - 1;
  prepare();
  problem.d_lse = 0;
  args.d_lse = NULL;
  computes();
  /* One element, and the gradient of the log-sum-exp. */
  *last += 0.01F;
  CHECK(distance() > 1e-3);
  *last -= 0.01F;
  args.d_lse = &d_lse;
  CHECK(distance() > 1e-3);
}

static void options_are_0_or_1(void) {
  NO_PLAN(problem.d_lse = 2, HATTN_ERROR_ARGUMENT, "d_lse", "2", "0 (not given), 1 (given)");
  NO_PLAN(problem.deterministic = -1, HATTN_ERROR_ARGUMENT, "deterministic", "-1", "0 (not wanted), 1 (wanted)");
}

static void there_are_no_gradients_of_e4m3(void) {
  NO_PLAN(problem.dtype = HATTN_E4M3, HATTN_ERROR_DTYPE, "q, k and v", "e4m3", "bf16, f16, f32");
}

int main(void) {
  if (!run_what_passes_share()) return 1;
  FRESH(the_distance_sees_what_is_wrong);
  FRESH(options_are_0_or_1);
  FRESH(there_are_no_gradients_of_e4m3);
  hattn_backward_plan_destroy(plan);
  return check_result();
}
