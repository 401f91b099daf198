/* What the library refuses of a backward pass on the CPU, as errors.c for the forward. What both read with the same
   code, such as a tensor, is spoilt there in every way and here in one. */
#include "errors.h"

/* One problem with its memory: a test spoils something in it and looks at what comes back. */
static struct {
  float k[K_SIZE], gap[Q_SIZE], q[Q_SIZE], v[V_SIZE], o[O_SIZE], lse[LSE_SIZE], d_o[O_SIZE], d_lse[LSE_SIZE];
  float d_q[Q_SIZE], d_k[K_SIZE], d_v[V_SIZE];
} memory;
static hattn_backward_problem problem;
static hattn_backward_plan* plan;
static hattn_tensor q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v;
static hattn_backward_args args;

/* The forward problem of which these are the gradients. */
static hattn_forward_problem forward_problem(void) {
  hattn_forward_problem forward = HATTN_FORWARD_PROBLEM_INIT;
  forward.dtype = problem.dtype;
  forward.mask = problem.mask, forward.corner = problem.corner;
  forward.lse = 1;
  forward.batch = problem.batch;
  forward.seqlen_q = problem.seqlen_q, forward.seqlen_kv = problem.seqlen_kv;
  forward.heads_q = problem.heads_q, forward.heads_kv = problem.heads_kv;
  forward.head_dim_qk = problem.head_dim_qk, forward.head_dim_vo = problem.head_dim_vo;
  forward.window_left = problem.window_left, forward.window_right = problem.window_right;
  forward.softmax_scale = problem.softmax_scale;
  return forward;
}

/* Computes O and the log-sum-exp, which a backward pass reads. */
static void compute_forward(void) {
  const hattn_forward_problem forward = forward_problem();
  hattn_forward_args forward_args = HATTN_FORWARD_ARGS_INIT;
  hattn_forward_plan* made = NULL;
  forward_args.q = &q, forward_args.k = &k, forward_args.v = &v, forward_args.o = &o, forward_args.lse = &lse;
  CHECK(hattn_forward_plan_create(&forward, HATTN_CPU, &made) == HATTN_OK);
  CHECK(hattn_forward_run(made, &forward_args, NULL) == HATTN_OK);
  hattn_forward_plan_destroy(made);
}

/* Everything right. */
static void reset(void) {
  const hattn_backward_problem no_problem = HATTN_BACKWARD_PROBLEM_INIT;
  const hattn_backward_args no_args = HATTN_BACKWARD_ARGS_INIT;
  problem = no_problem;
  problem.dtype = HATTN_F32;
  problem.d_lse = 1;
  problem.batch = BATCH;
  problem.seqlen_q = SEQLEN_Q, problem.seqlen_kv = SEQLEN_KV;
  problem.heads_q = HEADS_Q, problem.heads_kv = HEADS_KV;
  problem.head_dim_qk = DIM_QK, problem.head_dim_vo = DIM_VO;
  reference_fill(memory.q, Q_SIZE, 1);
  reference_fill(memory.k, K_SIZE, 2);
  reference_fill(memory.v, V_SIZE, 3);
  reference_fill(memory.o, O_SIZE, 4);
  reference_fill(memory.lse, LSE_SIZE, 5);
  reference_fill(memory.d_o, O_SIZE, 6);
  reference_fill(memory.d_lse, LSE_SIZE, 7);
  memset(memory.d_q, POISON, sizeof(memory.d_q));
  memset(memory.d_k, POISON, sizeof(memory.d_k));
  memset(memory.d_v, POISON, sizeof(memory.d_v));
  q = tensor(memory.q, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK);
  k = tensor(memory.k, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK);
  v = tensor(memory.v, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO);
  o = tensor(memory.o, BATCH, SEQLEN_Q, HEADS_Q, DIM_VO);
  lse = row_values(memory.lse);
  d_o = o, d_o.data = memory.d_o;
  d_lse = row_values(memory.d_lse);
  d_q = q, d_q.data = memory.d_q;
  d_k = k, d_k.data = memory.d_k;
  d_v = v, d_v.data = memory.d_v;
  args = no_args;
  args.q = &q, args.k = &k, args.v = &v, args.o = &o, args.lse = &lse;
  args.d_o = &d_o, args.d_lse = &d_lse;
  args.d_q = &d_q, args.d_k = &d_k, args.d_v = &d_v;
}

static int poisoned(void) {
  return all_poison(memory.d_q, Q_SIZE) && all_poison(memory.d_k, K_SIZE) && all_poison(memory.d_v, V_SIZE);
}

/* The spoilt arguments are refused, nothing is written, and everything is right again afterwards. */
#define REFUSED(status, what, got, allowed)                                  \
  do {                                                                       \
    const hattn_status refused_with = hattn_backward_run(plan, &args, NULL); \
    CHECK(refused_with == (status));                                         \
    SAYS(what, got, allowed);                                                \
    CHECK(poisoned());                                                       \
    reset();                                                                 \
  } while (0)

/* The same for the spoilt problem: by both that take one, and no plan comes of it. */
#define NO_PLAN(status, what, got, allowed)                                       \
  do {                                                                            \
    hattn_backward_plan* no_plan = plan;                                          \
    CHECK(hattn_backward_supported(&problem, HATTN_CPU) == (status));             \
    CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &no_plan) == (status)); \
    CHECK(no_plan == NULL);                                                       \
    SAYS(what, got, allowed);                                                     \
    reset();                                                                      \
  } while (0)

static double distance(void) {
  const hattn_forward_problem forward = forward_problem();
  return reference_gradient_distance(&forward, &args);
}

static void what_is_right_is_computed(void) {
  const int masks[] = {HATTN_MASK_FULL, HATTN_MASK_CAUSAL, HATTN_MASK_WINDOW};
  size_t i;
  for (i = 0; i < 6; ++i) {
    hattn_backward_plan* made = NULL;
    problem.mask = masks[i % 3];
    problem.window_left = 1, problem.window_right = HATTN_UNBOUNDED;
    problem.corner = i % 3 == 2 ? HATTN_TOP_LEFT : HATTN_BOTTOM_RIGHT;
    problem.softmax_scale = i == 3 ? 0.5F : 0.0F;
    /* The second time without a gradient of the log-sum-exp. */
    problem.d_lse = i < 3;
    args.d_lse = i < 3 ? &d_lse : NULL;
    problem.deterministic = i % 2 == 1;
    compute_forward();
    CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &made) == HATTN_OK);
    CHECK(hattn_backward_run(made, &args, NULL) == HATTN_OK);
    CHECK(distance() < 1e-5);
    hattn_backward_plan_destroy(made);
  }
  /* The distance sees one wrong element, and the gradient of the log-sum-exp. */
  memory.d_k[K_SIZE - 1] += 0.01F;
  CHECK(distance() > 1e-3);
  memory.d_k[K_SIZE - 1] -= 0.01F;
  args.d_lse = &d_lse;
  CHECK(distance() > 1e-3);
}

static void a_struct_has_a_size_and_a_version(void) {
  problem.struct_size = 103;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "struct_size 103", "sizeof(hattn_backward_problem)");
  problem.struct_size = 0xFFFFFFFF;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "struct_size 4294967295", "104");
  problem.abi_version = 2;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "abi_version 2", "allowed: 1");
  args.struct_size = 103;
  REFUSED(HATTN_ERROR_ABI, "args", "struct_size 103", "104 to 4096 (sizeof(hattn_backward_args))");
  args.abi_version = 7;
  REFUSED(HATTN_ERROR_ABI, "args", "abi_version 7", "allowed: 1");
  d_v.struct_size = 95;
  REFUSED(HATTN_ERROR_ABI, "d_v", "struct_size 95", "96");
  d_lse.abi_version = 0;
  REFUSED(HATTN_ERROR_ABI, "d_lse", "abi_version 0", "allowed: 1");
}

/* A caller of the first header knows of no arch: what lies behind its struct is not looked at. */
static void older_structs_are_taken(void) {
  problem.struct_size = 104;
  problem.arch = 70;
  CHECK(hattn_backward_supported(&problem, HATTN_CPU) == HATTN_OK);
  reset();
}

/* A caller of a newer header hands in more than this library knows. */
static void newer_structs_are_taken_while_their_new_fields_are_0(void) {
  struct {
    hattn_backward_problem known;
    int64_t unknown;
  } newer;
  struct {
    hattn_backward_args known;
    int64_t unknown;
  } newer_args;
  newer.known = problem;
  newer.known.struct_size = (uint32_t)sizeof(newer);
  newer.unknown = 0;
  CHECK(hattn_backward_supported(&newer.known, HATTN_CPU) == HATTN_OK);
  newer.unknown = 1;
  CHECK(hattn_backward_supported(&newer.known, HATTN_CPU) == HATTN_ERROR_ABI);
  SAYS("problem", "struct_size 120", "112");
  newer_args.known = args;
  newer_args.known.struct_size = (uint32_t)sizeof(newer_args);
  newer_args.unknown = 1;
  CHECK(hattn_backward_run(plan, &newer_args.known, NULL) == HATTN_ERROR_ABI);
  SAYS("args", "struct_size 112", "104");
  CHECK(poisoned());
  newer_args.unknown = 0;
  CHECK(hattn_backward_run(plan, &newer_args.known, NULL) == HATTN_OK);
}

static void null_pointers_are_refused(void) {
  const hattn_tensor** const given[] = {&args.q,   &args.k,   &args.v,   &args.o,  &args.lse,
                                        &args.d_o, &args.d_q, &args.d_k, &args.d_v};
  const char* const names[] = {"q: a null",   "k: a null",   "v: a null",   "o: a null",  "lse: a null",
                               "d_o: a null", "d_q: a null", "d_k: a null", "d_v: a null"};
  hattn_backward_plan* no_plan = plan;
  size_t i, bytes = 7, length = 7;
  char text[4] = "abc";
  CHECK(hattn_backward_supported(NULL, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "null", "hattn_backward_problem");
  CHECK(hattn_backward_plan_create(NULL, HATTN_CPU, &no_plan) == HATTN_ERROR_ARGUMENT && no_plan == NULL);
  CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", "where to write the plan");
  CHECK(hattn_backward_plan_workspace_size(NULL, &bytes) == HATTN_ERROR_ARGUMENT && bytes == 7);
  SAYS("plan", "null", "hattn_backward_plan_create");
  CHECK(hattn_backward_plan_workspace_size(plan, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("bytes", "null", "allowed");
  CHECK(hattn_backward_plan_describe(NULL, text, sizeof(text), &length) == HATTN_ERROR_ARGUMENT);
  CHECK(length == 7 && strcmp(text, "abc") == 0);
  CHECK(hattn_backward_plan_describe(plan, NULL, 4, &length) == HATTN_ERROR_ARGUMENT);
  SAYS("text", "null", "allowed");
  CHECK(hattn_backward_run(NULL, &args, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", "hattn_backward_plan_create");
  CHECK(hattn_backward_run(plan, NULL, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "null", "hattn_backward_args");
  for (i = 0; i < 9; ++i) {
    *given[i] = NULL;
    REFUSED(HATTN_ERROR_ARGUMENT, names[i], "null", "hattn_tensor");
  }
  d_o.data = NULL;
  REFUSED(HATTN_ERROR_LAYOUT, "d_o", "address 0x0", "multiples of 4 bytes");
  d_q.data = NULL;
  REFUSED(HATTN_ERROR_LAYOUT, "d_q", "address 0x0", "multiples of 4 bytes");
}

static void misaligned_pointers_are_refused(void) {
  /* Room for a struct that begins 4 bytes past a multiple of 8. */
  static int64_t room[20];
  const void* odd = (const char*)(void*)room + 4;
  CHECK(hattn_backward_supported((const hattn_backward_problem*)odd, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "address 0x", "multiples of 8");
  CHECK(hattn_backward_run(plan, (const hattn_backward_args*)odd, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "address 0x", "multiples of 8");
  args.d_o = (const hattn_tensor*)odd;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_o", "address 0x", "multiples of 8");
  d_o.data = (char*)(void*)memory.d_o + 2;
  REFUSED(HATTN_ERROR_LAYOUT, "d_o", "address 0x", "multiples of 4 bytes");
  d_v.data = (char*)(void*)memory.d_v + 1;
  REFUSED(HATTN_ERROR_LAYOUT, "d_v", "address 0x", "multiples of 4 bytes");
  d_lse.data = (char*)(void*)memory.d_lse + 2;
  REFUSED(HATTN_ERROR_LAYOUT, "d_lse", "address 0x", "multiples of 4 bytes");
}

static void strides_are_refused(void) {
  d_o.stride[3] = 2;
  REFUSED(HATTN_ERROR_LAYOUT, "d_o", "[48, 16, 4, 2]", "stride 1 in the innermost dimension");
  o.stride[1] = -16;
  REFUSED(HATTN_ERROR_LAYOUT, "o", "-16", "0 and above");
  d_lse.stride[2] = 4;
  REFUSED(HATTN_ERROR_LAYOUT, "d_lse", "[12, 3, 4]", "stride 1 in the innermost dimension");
  d_q.stride[1] = 0;
  REFUSED(HATTN_ERROR_LAYOUT, "d_q:", "uses elements twice", "step over each other");
  d_k.stride[0] = 0;
  REFUSED(HATTN_ERROR_LAYOUT, "d_k:", "uses elements twice", "step over each other");
  d_v.stride[2] = 0;
  REFUSED(HATTN_ERROR_LAYOUT, "d_v:", "uses elements twice", "step over each other");
}

static void devices_are_refused(void) {
  hattn_tensor* const tensors[] = {&q, &k, &v, &o, &lse, &d_o, &d_lse, &d_q, &d_k, &d_v};
  const char* const names[] = {"q: on cuda:0",   "k: on cuda:0",   "v: on cuda:0",     "o: on cuda:0",
                               "lse: on cuda:0", "d_o: on cuda:0", "d_lse: on cuda:0", "d_q: on cuda:0",
                               "d_k: on cuda:0", "d_v: on cuda:0"};
  hattn_backward_plan* no_plan = plan;
  int32_t count = -1;
  size_t i;
  for (i = 0; i < 10; ++i) {
    tensors[i]->device = 0;
    REFUSED(HATTN_ERROR_DEVICE, names[i], "cuda:0", "cpu");
  }
  d_q.device = -2;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_q", "-2", "HATTN_CPU");
  CHECK(hattn_backward_supported(&problem, -2) == HATTN_ERROR_ARGUMENT);
  SAYS("device", "-2", "HATTN_CPU");
  CHECK(hattn_device_count(&count) == HATTN_OK && count >= 0);
  CHECK(hattn_backward_supported(&problem, count) == HATTN_ERROR_NO_DEVICE);
  CHECK(hattn_backward_plan_create(&problem, count, &no_plan) == HATTN_ERROR_NO_DEVICE);
  CHECK(no_plan == NULL);
  SAYS("no device", "cuda:", ";");
}

static void shapes_are_refused(void) {
  o.shape[1] = SEQLEN_Q + 1;
  REFUSED(HATTN_ERROR_SHAPE, "o", "[2, 4, 4, 4]", "[2, 3, 4, 4]");
  lse.shape[1] = HEADS_KV;
  REFUSED(HATTN_ERROR_SHAPE, "lse", "[2, 2, 3]", "[batch, heads, seqlen]");
  d_o.shape[3] = DIM_QK;
  REFUSED(HATTN_ERROR_SHAPE, "d_o", "[2, 3, 4, 8]", "[2, 3, 4, 4]");
  d_lse.shape[2] = SEQLEN_KV;
  REFUSED(HATTN_ERROR_SHAPE, "d_lse", "[2, 4, 5]", "[2, 4, 3]");
  d_q.shape[2] = HEADS_KV;
  REFUSED(HATTN_ERROR_SHAPE, "d_q", "[2, 3, 2, 8]", "[2, 3, 4, 8]");
  d_k.shape[2] = HEADS_Q;
  REFUSED(HATTN_ERROR_SHAPE, "d_k", "[2, 5, 4, 8]", "[2, 5, 2, 8]");
  d_v.shape[0] = 0;
  REFUSED(HATTN_ERROR_SHAPE, "d_v", "[0, 5, 2, 4]", "[2, 5, 2, 4]");
  d_o.ndim = 3;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_o", "ndim 3", "4, [batch, seqlen, heads, head_dim]");
  d_lse.ndim = 4;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_lse", "ndim 4", "3, [batch, heads, seqlen]");
  d_k.shape[1] = -1;
  REFUSED(HATTN_ERROR_LAYOUT, "d_k", "-1", "0 and above");
}

static void dtypes_are_refused(void) {
  hattn_tensor* const tensors[] = {&q, &k, &v, &o, &lse, &d_o, &d_lse, &d_q, &d_k, &d_v};
  const char* const names[] = {"q: dtype",   "k: dtype",     "v: dtype",   "o: dtype",   "lse: dtype",
                               "d_o: dtype", "d_lse: dtype", "d_q: dtype", "d_k: dtype", "d_v: dtype"};
  size_t i;
  for (i = 0; i < 10; ++i) {
    tensors[i]->dtype = HATTN_BF16;
    REFUSED(HATTN_ERROR_DTYPE, names[i], "bf16", "f32");
  }
  d_o.dtype = 0;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_o", "dtype 0", "HATTN_F16 (1)");
  problem.dtype = HATTN_E4M3;
  NO_PLAN(HATTN_ERROR_DTYPE, "q, k and v", "e4m3", "bf16, f16, f32");
  problem.dtype = 0;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "dtype", "0", "HATTN_F16 (1)");
}

static void outputs_have_memory_of_their_own(void) {
  d_q.data = memory.q;
  REFUSED(HATTN_ERROR_LAYOUT, "d_q", "meet those of q", "its own");
  /* It begins in the last element of the other one, and ends in the gap behind it. */
  d_q.data = memory.k + K_SIZE - 1;
  REFUSED(HATTN_ERROR_LAYOUT, "d_q", "meet those of k", "its own");
  d_v.data = memory.o;
  REFUSED(HATTN_ERROR_LAYOUT, "d_v", "meet those of o", "its own");
  d_k.data = memory.d_q;
  REFUSED(HATTN_ERROR_LAYOUT, "d_k", "meet those of d_q", "its own");
}

static void the_gradient_of_the_lse_is_given_exactly_when_it_was_announced(void) {
  hattn_backward_plan* without = NULL;
  args.d_lse = NULL;
  REFUSED(HATTN_ERROR_VALUE, "d_lse", "missing", "allowed");
  problem.d_lse = 0;
  CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &without) == HATTN_OK);
  CHECK(hattn_backward_run(without, &args, NULL) == HATTN_ERROR_VALUE);
  SAYS("d_lse", "given", "none");
  CHECK(poisoned());
  hattn_backward_plan_destroy(without);
}

static void reserved_fields_are_0(void) {
  problem.reserved = 1;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "problem", "reserved", "0");
  d_q.reserved = -1;
  REFUSED(HATTN_ERROR_ARGUMENT, "d_q", "reserved", "0");
}

static void numbers_of_a_problem_are_refused(void) {
  problem.arch = 70;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "arch", "70", "HATTN_ARCH_SM80 (80)");
  problem.arch = HATTN_ARCH_SM80;
  NO_PLAN(HATTN_ERROR_UNSUPPORTED, "unsupported", "sm80 kernels on the CPU", "sm_80 and later");
  problem.mask = 3;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "mask", "3", "HATTN_MASK_FULL (0)");
  problem.corner = -1;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "corner", "-1", "HATTN_BOTTOM_RIGHT (0)");
  problem.d_lse = 2;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "d_lse", "2", "0 (not given), 1 (given)");
  problem.deterministic = -1;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "deterministic", "-1", "0 (not wanted), 1 (wanted)");
  problem.batch = -1;
  NO_PLAN(HATTN_ERROR_VALUE, "batch", "-1", "0 and above");
  problem.seqlen_q = INT64_MIN;
  NO_PLAN(HATTN_ERROR_VALUE, "seqlen_q", "-9223372036854775808", "0 and above");
  problem.seqlen_kv = INT64_MAX;
  NO_PLAN(HATTN_ERROR_VALUE, "seqlen_q + seqlen_kv", "9223372036854775807", "below 2^30");
  problem.heads_q = 3;
  NO_PLAN(HATTN_ERROR_VALUE, "heads_q", "3 with heads_kv 2", "a multiple of heads_kv");
  problem.heads_kv = 0;
  NO_PLAN(HATTN_ERROR_VALUE, "heads_kv", "0", "1 and above");
  problem.head_dim_qk = 0;
  NO_PLAN(HATTN_ERROR_VALUE, "head_dim_qk", "0", "1 to 2^31 - 1");
  problem.head_dim_vo = -8;
  NO_PLAN(HATTN_ERROR_VALUE, "head_dim_vo", "-8", "0 and above");
  problem.softmax_scale = -1.0F;
  NO_PLAN(HATTN_ERROR_VALUE, "softmax_scale", "-1", "finite and above 0");
  problem.mask = HATTN_MASK_WINDOW, problem.window_left = -2;
  NO_PLAN(HATTN_ERROR_VALUE, "window_left", "-2", "HATTN_UNBOUNDED (-1)");
  problem.mask = HATTN_MASK_WINDOW, problem.window_right = INT64_MIN;
  NO_PLAN(HATTN_ERROR_VALUE, "window_right", "-9223372036854775808", "HATTN_UNBOUNDED (-1)");
}

static void a_plan_describes_itself_into_any_room(void) {
  char whole[512], part[6] = "?????";
  size_t length = 0, again = 0;
  CHECK(hattn_backward_plan_describe(plan, NULL, 0, &length) == HATTN_OK && length > 10 && length < sizeof(whole));
  CHECK(hattn_backward_plan_describe(plan, whole, sizeof(whole), &again) == HATTN_OK && again == length);
  CHECK(strlen(whole) == length);
  CHECK_TEXT(whole, "backward f32");
  CHECK_TEXT(whole, " d_lse: cpu");
  CHECK(hattn_backward_plan_describe(plan, part, 5, NULL) == HATTN_OK);
  CHECK(memcmp(part, "back\0", 6) == 0);
  CHECK(hattn_backward_plan_workspace_size(plan, &length) == HATTN_OK && length == 0);
}

/* Without pairs of a query and a key the gradients are 0. */
static void what_has_no_elements_needs_no_memory(void) {
  hattn_backward_plan* made = NULL;
  size_t i;
  problem.seqlen_kv = 0;
  k.shape[1] = v.shape[1] = d_k.shape[1] = d_v.shape[1] = 0;
  k.data = v.data = d_k.data = d_v.data = NULL;
  CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &made) == HATTN_OK);
  CHECK(hattn_backward_run(made, &args, NULL) == HATTN_OK);
  for (i = 0; i < Q_SIZE; ++i) CHECK(memory.d_q[i] == 0.0F);
  hattn_backward_plan_destroy(made);

  reset();
  problem.seqlen_q = 0;
  q.shape[1] = o.shape[1] = d_o.shape[1] = d_q.shape[1] = lse.shape[2] = d_lse.shape[2] = 0;
  q.data = o.data = d_o.data = d_q.data = lse.data = d_lse.data = NULL;
  CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &made) == HATTN_OK);
  CHECK(hattn_backward_run(made, &args, NULL) == HATTN_OK);
  for (i = 0; i < K_SIZE; ++i) CHECK(memory.d_k[i] == 0.0F);
  for (i = 0; i < V_SIZE; ++i) CHECK(memory.d_v[i] == 0.0F);
  hattn_backward_plan_destroy(made);
}

/* A test that forgot to fill something in would otherwise go unnoticed by the next one. */
#define FRESH(test)               \
  do {                            \
    reset();                      \
    RUN("errors_backward", test); \
  } while (0)

int main(void) {
  reset();
  if (hattn_backward_plan_create(&problem, HATTN_CPU, &plan) != HATTN_OK) {
    printf("no plan: %s\n", hattn_last_error());
    return 1;
  }
  FRESH(what_is_right_is_computed);
  FRESH(a_struct_has_a_size_and_a_version);
  FRESH(newer_structs_are_taken_while_their_new_fields_are_0);
  FRESH(null_pointers_are_refused);
  FRESH(misaligned_pointers_are_refused);
  FRESH(strides_are_refused);
  FRESH(devices_are_refused);
  FRESH(shapes_are_refused);
  FRESH(dtypes_are_refused);
  FRESH(outputs_have_memory_of_their_own);
  FRESH(the_gradient_of_the_lse_is_given_exactly_when_it_was_announced);
  FRESH(older_structs_are_taken);
  FRESH(reserved_fields_are_0);
  FRESH(numbers_of_a_problem_are_refused);
  FRESH(a_plan_describes_itself_into_any_room);
  FRESH(what_has_no_elements_needs_no_memory);
  hattn_backward_plan_destroy(plan);
  return check_result();
}
