/* What the library refuses of a forward pass on the CPU: each wrong argument has its status and a text that says what,
   got and allowed, and leaves the outputs as they were. What only a GPU refuses is in tests/tests/gpu/capi.rs at the
   root. */
#include "errors.h"

static hattn_forward_problem problem;
static hattn_forward_args args;
static hattn_tensor q, k, v, o, lse;

static const operand operands[] = {OPERAND(q, READ, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK),
                                   OPERAND(k, READ, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK),
                                   OPERAND(v, READ, OF_KEYS, 4, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO),
                                   OPERAND(o, WRITTEN, OF_QUERIES, 4, BATCH, SEQLEN_Q, HEADS_Q, DIM_VO),
                                   OPERAND(lse, WRITTEN, OF_QUERIES, 3, BATCH, HEADS_Q, SEQLEN_Q)};

static void vary(int i) { (void)i; }
static void prepare(void) {}
static double distance(void) { return reference_distance(&problem, &args); }

#define PASS(name) hattn_forward_##name
#define INIT(name) HATTN_FORWARD_##name##_INIT
#define SUITE "errors"
#define DESCRIBED "forward f32"
#define ARGS_LEAST 64
#define DTYPES "HATTN_F16 (1), HATTN_BF16 (2), HATTN_E4M3 (4), on the CPU also HATTN_F32 (3)"
#define OPTIONAL lse
#define TOLERANCE 1e-6
#include "errors_pass.h"

static void the_lse_is_wanted_or_not(void) {
  NO_PLAN(problem.lse = 2, HATTN_ERROR_ARGUMENT, "lse", "2", "0 (not wanted), 1 (wanted)");
}

static void gaps_are_filled_where_sequences_have_lengths(void) {
  NO_PLAN(problem.fill_gaps = 2, HATTN_ERROR_ARGUMENT, "fill_gaps", "2", "0 (not wanted)");
  NO_PLAN(problem.fill_gaps = 1, HATTN_ERROR_VALUE, "fill_gaps", "asked for", "packed tensors or used lengths");
  NO_PLAN(problem.max_seqlen_q = 5, HATTN_ERROR_VALUE, "max_seqlen_q", "5", "packed queries");
  NO_PLAN(problem.cu_seqlens_q = 2, HATTN_ERROR_ARGUMENT, "cu_seqlens_q", "2", "0 (not wanted)");
}

static void what_e4m3_operands_have_is_refused_of_others(void) {
  hattn_tensor number = lse;
  number.ndim = 1;
  number.shape[0] = number.stride[0] = 1;
  NO_PLAN(problem.scaling = HATTN_PER_HEAD, HATTN_ERROR_VALUE, "scaling", "per-head, with f32 operands",
          "with e4m3 operands only");
  NO_PLAN(problem.output = 9, HATTN_ERROR_ARGUMENT, "output", "output: 9;", "allowed: 0, HATTN_F32 (3)");
  NO_PLAN(problem.output = HATTN_F16, HATTN_ERROR_DTYPE, "o", "f16", "f32, the operands'");
  NO_PLAN(problem.amax = 1, HATTN_ERROR_VALUE, "amax", "f32 operands", "with e4m3 operands only");
  REFUSED(args.amax = &number, HATTN_ERROR_VALUE, "amax", "given", "made without amax");
  REFUSED(args.descale_v = &lse, HATTN_ERROR_VALUE, "descale_v", "given", "made without e4m3 operands");
}

static void tunings_are_read_or_refused(void) {
  static const char text[] = "# fine\n0.1.0\tcard\tshape\tkernel\n";
  hattn_tuning* tuning = NULL;
  hattn_forward_plan* made = NULL;
  CHECK(hattn_tuning_create(text, sizeof(text) - 1, &tuning) == HATTN_OK && tuning != NULL);
  CHECK(hattn_forward_plan_create_tuned(&problem, HATTN_CPU, tuning, &made) == HATTN_OK && made != NULL);
  hattn_tuning_destroy(tuning);
  CHECK(hattn_forward_run(made, &args, NULL) == HATTN_OK);
  CHECK(reference_distance(&problem, &args) < 1e-6);
  hattn_forward_plan_destroy(made);

  made = plan;
  CHECK(hattn_forward_plan_create_tuned(&problem, HATTN_CPU, NULL, &made) == HATTN_ERROR_ARGUMENT && made == NULL);
  SAYS("tuning", "null", "hattn_tuning_create");
  tuning = (hattn_tuning*)plan;
  CHECK(hattn_tuning_create(text, sizeof(text) - 9, &tuning) == HATTN_ERROR_VALUE && tuning == NULL);
  SAYS("tuning", "line 2 with 3 fields", "version, card, shape and row between tabs");
  CHECK(hattn_tuning_create("\xff", 1, &tuning) == HATTN_ERROR_ARGUMENT);
  SAYS("text", "utf-8", "UTF-8");
  CHECK(hattn_tuning_create(NULL, 1, &tuning) == HATTN_ERROR_ARGUMENT);
  SAYS("text", "null", "allowed");
  CHECK(hattn_tuning_create(text, 0, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("tuning", "null", "allowed");
  CHECK(hattn_tuning_create(NULL, 0, &tuning) == HATTN_OK && tuning != NULL);
  hattn_tuning_destroy(tuning);
  hattn_tuning_destroy(NULL);
}

int main(void) {
  if (!run_what_passes_share()) return 1;
  FRESH(the_lse_is_wanted_or_not);
  FRESH(gaps_are_filled_where_sequences_have_lengths);
  FRESH(what_e4m3_operands_have_is_refused_of_others);
  FRESH(tunings_are_read_or_refused);
  hattn_forward_plan_destroy(plan);
  return check_result();
}
