/* What the library refuses of a forward pass on the CPU: each wrong argument has its status and a text that says what,
   got and allowed, and leaves the outputs as they were. What only a GPU refuses is in tests/tests/gpu/capi.rs at the
   root. */
#include "errors.h"

/* One problem with its memory: a test spoils something in it and looks at what comes back. */
static struct { float k[K_SIZE], gap[O_SIZE], q[Q_SIZE], v[V_SIZE], o[O_SIZE], lse[LSE_SIZE]; } memory;
static hattn_forward_problem problem;
static hattn_forward_plan* plan;
static hattn_tensor q, k, v, o, lse;
static hattn_forward_args args;

/* Everything right. */
static void reset(void) {
  const hattn_forward_problem no_problem = HATTN_FORWARD_PROBLEM_INIT;
  const hattn_forward_args no_args = HATTN_FORWARD_ARGS_INIT;
  problem = no_problem;
  problem.dtype = HATTN_F32;
  problem.lse = 1;
  problem.batch = BATCH;
  problem.seqlen_q = SEQLEN_Q, problem.seqlen_kv = SEQLEN_KV;
  problem.heads_q = HEADS_Q, problem.heads_kv = HEADS_KV;
  problem.head_dim_qk = DIM_QK, problem.head_dim_vo = DIM_VO;
  reference_fill(memory.q, Q_SIZE, 1);
  reference_fill(memory.k, K_SIZE, 2);
  reference_fill(memory.v, V_SIZE, 3);
  memset(memory.o, POISON, sizeof(memory.o));
  memset(memory.lse, POISON, sizeof(memory.lse));
  q = tensor(memory.q, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK);
  k = tensor(memory.k, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK);
  v = tensor(memory.v, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO);
  o = tensor(memory.o, BATCH, SEQLEN_Q, HEADS_Q, DIM_VO);
  lse = row_values(memory.lse);
  args = no_args;
  args.q = &q, args.k = &k, args.v = &v, args.o = &o, args.lse = &lse;
}

static int poisoned(void) { return all_poison(memory.o, O_SIZE) && all_poison(memory.lse, LSE_SIZE); }

/* The spoilt arguments are refused, nothing is written, and everything is right again afterwards. */
#define REFUSED(status, what, got, allowed)                                 \
  do {                                                                      \
    const hattn_status refused_with = hattn_forward_run(plan, &args, NULL); \
    CHECK(refused_with == (status));                                        \
    SAYS(what, got, allowed);                                               \
    CHECK(poisoned());                                                      \
    reset();                                                                \
  } while (0)

/* The same for the spoilt problem: by both that take one, and no plan comes of it. */
#define NO_PLAN(status, what, got, allowed)                                      \
  do {                                                                           \
    hattn_forward_plan* no_plan = plan;                                          \
    CHECK(hattn_forward_supported(&problem, HATTN_CPU) == (status));             \
    CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &no_plan) == (status)); \
    CHECK(no_plan == NULL);                                                      \
    SAYS(what, got, allowed);                                                    \
    reset();                                                                     \
  } while (0)

static void there_is_no_text_before_a_failure(void) { CHECK(strcmp(hattn_last_error(), "") == 0); }

static void what_is_right_is_computed(void) {
  const int masks[] = {HATTN_MASK_FULL, HATTN_MASK_CAUSAL, HATTN_MASK_WINDOW};
  size_t i;
  for (i = 0; i < 3; ++i) {
    hattn_forward_plan* made = NULL;
    problem.mask = masks[i];
    problem.window_left = 1, problem.window_right = HATTN_UNBOUNDED;
    problem.corner = i == 2 ? HATTN_TOP_LEFT : HATTN_BOTTOM_RIGHT;
    CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &made) == HATTN_OK);
    CHECK(hattn_forward_run(made, &args, NULL) == HATTN_OK);
    CHECK(reference_distance(&problem, &args) < 1e-6);
    hattn_forward_plan_destroy(made);
  }
  /* The same as a plan without the log-sum-exp, which is then left alone. */
  memset(memory.lse, POISON, sizeof(memory.lse));
  problem.lse = 0;
  args.lse = NULL;
  {
    hattn_forward_plan* made = NULL;
    CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &made) == HATTN_OK);
    memset(memory.o, POISON, sizeof(memory.o));
    CHECK(hattn_forward_run(made, &args, NULL) == HATTN_OK);
    CHECK(reference_distance(&problem, &args) < 1e-6);
    hattn_forward_plan_destroy(made);
  }
  memset(memory.o, POISON, sizeof(memory.o));
  CHECK(poisoned());
}

static void a_struct_has_a_size_and_a_version(void) {
  problem.struct_size = 0;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "struct_size 0", "104");
  problem.struct_size = 103;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "struct_size 103", "sizeof(hattn_forward_problem)");
  problem.struct_size = 0xFFFFFFFF;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "struct_size 4294967295", "104");
  problem.abi_version = 0;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "abi_version 0", "allowed: 1");
  problem.abi_version = 2;
  NO_PLAN(HATTN_ERROR_ABI, "problem", "abi_version 2", "allowed: 1");
  args.struct_size = 8;
  REFUSED(HATTN_ERROR_ABI, "args", "struct_size 8", "64");
  args.abi_version = 7;
  REFUSED(HATTN_ERROR_ABI, "args", "abi_version 7", "allowed: 1");
  v.struct_size = 95;
  REFUSED(HATTN_ERROR_ABI, "v", "struct_size 95", "96");
  lse.abi_version = 0;
  REFUSED(HATTN_ERROR_ABI, "lse", "abi_version 0", "allowed: 1");
}

/* A caller of a newer header hands in more than this library knows. */
static void a_newer_struct_is_taken_while_its_new_fields_are_0(void) {
  struct {
    hattn_forward_problem known;
    int64_t unknown;
  } newer;
  newer.known = problem;
  newer.known.struct_size = (uint32_t)sizeof(newer);
  newer.unknown = 0;
  CHECK(hattn_forward_supported(&newer.known, HATTN_CPU) == HATTN_OK);
  newer.unknown = 1;
  CHECK(hattn_forward_supported(&newer.known, HATTN_CPU) == HATTN_ERROR_ABI);
  SAYS("problem", "struct_size 128", "120");
}

static void null_pointers_are_refused(void) {
  hattn_forward_plan* no_plan = plan;
  size_t bytes = 7, length = 7;
  char text[4] = "abc";
  CHECK(hattn_forward_supported(NULL, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "null", "hattn_forward_problem");
  CHECK(hattn_forward_plan_create(NULL, HATTN_CPU, &no_plan) == HATTN_ERROR_ARGUMENT && no_plan == NULL);
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", "allowed");
  CHECK(hattn_forward_plan_workspace_size(NULL, &bytes) == HATTN_ERROR_ARGUMENT && bytes == 7);
  SAYS("plan", "null", "hattn_forward_plan_create");
  CHECK(hattn_forward_plan_workspace_size(plan, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("bytes", "null", "allowed");
  CHECK(hattn_forward_plan_describe(NULL, text, sizeof(text), &length) == HATTN_ERROR_ARGUMENT);
  CHECK(length == 7 && strcmp(text, "abc") == 0);
  CHECK(hattn_forward_plan_describe(plan, NULL, 4, &length) == HATTN_ERROR_ARGUMENT);
  SAYS("text", "null", "allowed");
  CHECK(hattn_device_count(NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("count", "null", "allowed");
  CHECK(hattn_forward_run(NULL, &args, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", "hattn_forward_plan_create");
  CHECK(hattn_forward_run(plan, NULL, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "null", "hattn_forward_args");
  args.q = NULL;
  REFUSED(HATTN_ERROR_ARGUMENT, "q", "null", "hattn_tensor");
  args.k = NULL;
  REFUSED(HATTN_ERROR_ARGUMENT, "k", "null", "hattn_tensor");
  args.v = NULL;
  REFUSED(HATTN_ERROR_ARGUMENT, "v", "null", "hattn_tensor");
  args.o = NULL;
  REFUSED(HATTN_ERROR_ARGUMENT, "o", "null", "hattn_tensor");
  k.data = NULL;
  REFUSED(HATTN_ERROR_LAYOUT, "k", "address 0x0", "multiples of 4 bytes");
  o.data = NULL;
  REFUSED(HATTN_ERROR_LAYOUT, "o", "address 0x0", "multiples of 4 bytes");
}

static void misaligned_pointers_are_refused(void) {
  /* Room for a struct that begins 4 bytes past a multiple of 8. */
  static int64_t room[20];
  const void* odd = (const char*)(void*)room + 4;
  CHECK(hattn_forward_supported((const hattn_forward_problem*)odd, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "address 0x", "multiples of 8");
  args.q = (const hattn_tensor*)odd;
  REFUSED(HATTN_ERROR_ARGUMENT, "q", "address 0x", "multiples of 8");
  CHECK(hattn_forward_run(plan, (const hattn_forward_args*)odd, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "address 0x", "multiples of 8");
  q.data = (char*)(void*)memory.q + 2;
  REFUSED(HATTN_ERROR_LAYOUT, "q", "address 0x", "multiples of 4 bytes");
  o.data = (char*)(void*)memory.o + 1;
  REFUSED(HATTN_ERROR_LAYOUT, "o", "address 0x", "multiples of 4 bytes");
  lse.data = (char*)(void*)memory.lse + 2;
  REFUSED(HATTN_ERROR_LAYOUT, "lse", "address 0x", "multiples of 4 bytes");
}

static void strides_are_refused(void) {
  q.stride[3] = 2;
  REFUSED(HATTN_ERROR_LAYOUT, "q", "[96, 32, 8, 2]", "stride 1 in the innermost dimension");
  k.stride[1] = -16;
  REFUSED(HATTN_ERROR_LAYOUT, "k", "-16", "0 and above");
  v.stride[0] = INT64_MAX;
  REFUSED(HATTN_ERROR_LAYOUT, "v", "9223372036854775807", "2^63");
  v.stride[0] = INT64_MAX / 4;
  REFUSED(HATTN_ERROR_LAYOUT, "v", "address 0x", "address space");
  o.stride[1] = 0;
  REFUSED(HATTN_ERROR_LAYOUT, "o:", "uses elements twice", "step over each other");
  lse.stride[1] = 1;
  REFUSED(HATTN_ERROR_LAYOUT, "lse:", "uses elements twice", "step over each other");
  lse.stride[2] = 4;
  REFUSED(HATTN_ERROR_LAYOUT, "lse", "[12, 3, 4]", "stride 1 in the innermost dimension");
}

static void devices_are_refused(void) {
  hattn_tensor* const tensors[] = {&q, &k, &v, &o, &lse};
  const char* const names[] = {"q: on cuda:0", "k: on cuda:0", "v: on cuda:0", "o: on cuda:0", "lse: on cuda:0"};
  hattn_forward_plan* no_plan = plan;
  int32_t count = -1;
  size_t i;
  for (i = 0; i < 5; ++i) {
    tensors[i]->device = 0;
    REFUSED(HATTN_ERROR_DEVICE, names[i], "cuda:0", "cpu");
  }
  q.device = -2;
  REFUSED(HATTN_ERROR_ARGUMENT, "q", "-2", "HATTN_CPU");
  CHECK(hattn_forward_supported(&problem, -2) == HATTN_ERROR_ARGUMENT);
  SAYS("device", "-2", "HATTN_CPU");
  CHECK(hattn_device_count(&count) == HATTN_OK && count >= 0);
  CHECK(hattn_forward_supported(&problem, count) == HATTN_ERROR_NO_DEVICE);
  CHECK(hattn_forward_plan_create(&problem, count, &no_plan) == HATTN_ERROR_NO_DEVICE);
  CHECK(no_plan == NULL);
  SAYS("no device", "cuda:", ";");
}

static void shapes_are_refused(void) {
  q.shape[1] = SEQLEN_Q + 1;
  REFUSED(HATTN_ERROR_SHAPE, "q", "[2, 4, 4, 8]", "[2, 3, 4, 8]");
  k.shape[2] = HEADS_Q;
  REFUSED(HATTN_ERROR_SHAPE, "k", "[2, 5, 4, 8]", "[2, 5, 2, 8]");
  v.shape[3] = DIM_QK;
  REFUSED(HATTN_ERROR_SHAPE, "v", "[2, 5, 2, 8]", "[2, 5, 2, 4]");
  o.shape[0] = 0;
  REFUSED(HATTN_ERROR_SHAPE, "o", "[0, 3, 4, 4]", "[2, 3, 4, 4]");
  lse.shape[1] = HEADS_KV;
  REFUSED(HATTN_ERROR_SHAPE, "lse", "[2, 2, 3]", "[batch, heads, seqlen]");
  q.ndim = 3;
  REFUSED(HATTN_ERROR_ARGUMENT, "q", "ndim 3", "4, [batch, seqlen, heads, head_dim]");
  lse.ndim = 4;
  REFUSED(HATTN_ERROR_ARGUMENT, "lse", "ndim 4", "3, [batch, heads, seqlen]");
  q.shape[0] = -1;
  REFUSED(HATTN_ERROR_LAYOUT, "q", "-1", "0 and above");
}

static void dtypes_are_refused(void) {
  hattn_tensor number = lse;
  number.ndim = 1;
  number.shape[0] = number.stride[0] = 1;
  q.dtype = HATTN_BF16;
  REFUSED(HATTN_ERROR_DTYPE, "q", "bf16", "f32");
  o.dtype = HATTN_F16;
  REFUSED(HATTN_ERROR_DTYPE, "o", "f16", "f32");
  lse.dtype = HATTN_BF16;
  REFUSED(HATTN_ERROR_DTYPE, "lse", "bf16", "f32");
  v.dtype = 0;
  REFUSED(HATTN_ERROR_ARGUMENT, "v", "dtype 0", "HATTN_F16 (1)");
  k.dtype = 5;
  REFUSED(HATTN_ERROR_ARGUMENT, "k", "dtype 5", "HATTN_F16 (1)");
  problem.scaling = HATTN_PER_HEAD;
  NO_PLAN(HATTN_ERROR_VALUE, "scaling", "per-head, with f32 operands", "with e4m3 operands only");
  problem.output = HATTN_F16;
  NO_PLAN(HATTN_ERROR_DTYPE, "o", "f16", "f32, the operands'");
  problem.amax = 1;
  NO_PLAN(HATTN_ERROR_VALUE, "amax", "f32 operands", "with e4m3 operands only");
  args.amax = &number;
  REFUSED(HATTN_ERROR_VALUE, "amax", "given", "made without amax(true)");
  args.descale_v = &lse;
  REFUSED(HATTN_ERROR_VALUE, "descale_v", "given", "made without e4m3 operands");
  problem.dtype = 0;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "dtype", "0", "HATTN_F16 (1)");
}

static void outputs_have_memory_of_their_own(void) {
  o.data = memory.q;
  REFUSED(HATTN_ERROR_LAYOUT, "o", "meet those of q", "its own");
  /* It begins in the last element of the other one, and ends in the gap behind it. */
  o.data = memory.k + K_SIZE - 1;
  REFUSED(HATTN_ERROR_LAYOUT, "o", "meet those of k", "its own");
  lse.data = memory.v;
  REFUSED(HATTN_ERROR_LAYOUT, "lse", "meet those of v", "its own");
  lse.data = memory.o + 1;
  REFUSED(HATTN_ERROR_LAYOUT, "lse", "meet those of o", "its own");
}

static void the_lse_is_given_exactly_when_it_was_asked_for(void) {
  hattn_forward_plan* without = NULL;
  args.lse = NULL;
  REFUSED(HATTN_ERROR_VALUE, "lse", "missing", "allowed");
  problem.lse = 0;
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &without) == HATTN_OK);
  CHECK(hattn_forward_run(without, &args, NULL) == HATTN_ERROR_VALUE);
  SAYS("lse", "given", "none");
  CHECK(poisoned());
  hattn_forward_plan_destroy(without);
}

static void reserved_fields_are_0(void) {
  o.reserved = -1;
  REFUSED(HATTN_ERROR_ARGUMENT, "o", "reserved", "0");
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
  problem.lse = 2;
  NO_PLAN(HATTN_ERROR_ARGUMENT, "lse", "2", "1 (wanted)");
  problem.batch = -1;
  NO_PLAN(HATTN_ERROR_VALUE, "batch", "-1", "0 and above");
  problem.seqlen_q = INT64_MIN;
  NO_PLAN(HATTN_ERROR_VALUE, "seqlen_q", "-9223372036854775808", "0 and above");
  problem.seqlen_kv = INT64_MAX;
  NO_PLAN(HATTN_ERROR_VALUE, "seqlen_q + seqlen_kv", "9223372036854775807", "below 2^30");
  problem.heads_kv = 0;
  NO_PLAN(HATTN_ERROR_VALUE, "heads_kv", "0", "1 and above");
  problem.heads_kv = 3;
  NO_PLAN(HATTN_ERROR_VALUE, "heads_q", "4 with heads_kv 3", "a multiple of heads_kv");
  problem.head_dim_qk = 0;
  NO_PLAN(HATTN_ERROR_VALUE, "head_dim_qk", "0", "1 to 2^31 - 1");
  problem.head_dim_vo = -8;
  NO_PLAN(HATTN_ERROR_VALUE, "head_dim_vo", "-8", "0 and above");
  problem.softmax_scale = -1.0F;
  NO_PLAN(HATTN_ERROR_VALUE, "softmax_scale", "-1", "finite and above 0");
  problem.softmax_scale = NAN;
  NO_PLAN(HATTN_ERROR_VALUE, "softmax_scale", "NaN", "finite and above 0");
  problem.mask = HATTN_MASK_WINDOW, problem.window_left = -2;
  NO_PLAN(HATTN_ERROR_VALUE, "window_left", "-2", "HATTN_UNBOUNDED (-1)");
  problem.mask = HATTN_MASK_WINDOW, problem.window_right = INT64_MIN;
  NO_PLAN(HATTN_ERROR_VALUE, "window_right", "-9223372036854775808", "HATTN_UNBOUNDED (-1)");
}

static void a_plan_describes_itself_into_any_room(void) {
  char whole[512], part[6] = "?????";
  size_t length = 0, again = 0;
  CHECK(hattn_forward_plan_describe(plan, NULL, 0, &length) == HATTN_OK && length > 10 && length < sizeof(whole));
  CHECK(hattn_forward_plan_describe(plan, whole, sizeof(whole), &again) == HATTN_OK && again == length);
  CHECK(strlen(whole) == length);
  CHECK_TEXT(whole, "forward f32");
  CHECK(hattn_forward_plan_describe(plan, part, 5, NULL) == HATTN_OK);
  CHECK(memcmp(part, "forw\0", 6) == 0);
  CHECK(hattn_forward_plan_workspace_size(plan, &length) == HATTN_OK && length == 0);
}

static void what_has_no_elements_needs_no_memory(void) {
  hattn_forward_plan* keyless = NULL;
  size_t i;
  problem.seqlen_kv = 0;
  k.shape[1] = v.shape[1] = 0;
  k.data = v.data = NULL;
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &keyless) == HATTN_OK);
  CHECK(hattn_forward_run(keyless, &args, NULL) == HATTN_OK);
  for (i = 0; i < O_SIZE; ++i) CHECK(memory.o[i] == 0.0F);
  for (i = 0; i < LSE_SIZE; ++i) CHECK(memory.lse[i] == -INFINITY);
  hattn_forward_plan_destroy(keyless);
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

/* A test that forgot to fill something in would otherwise go unnoticed by the next one. */
#define FRESH(test)      \
  do {                   \
    reset();             \
    RUN("errors", test); \
  } while (0)

int main(void) {
  RUN("errors", there_is_no_text_before_a_failure);
  reset();
  if (hattn_forward_plan_create(&problem, HATTN_CPU, &plan) != HATTN_OK) {
    printf("no plan: %s\n", hattn_last_error());
    return 1;
  }
  FRESH(what_is_right_is_computed);
  FRESH(a_struct_has_a_size_and_a_version);
  FRESH(a_newer_struct_is_taken_while_its_new_fields_are_0);
  FRESH(misaligned_pointers_are_refused);
  FRESH(strides_are_refused);
  FRESH(devices_are_refused);
  FRESH(shapes_are_refused);
  FRESH(dtypes_are_refused);
  FRESH(outputs_have_memory_of_their_own);
  FRESH(the_lse_is_given_exactly_when_it_was_asked_for);
  FRESH(reserved_fields_are_0);
  FRESH(numbers_of_a_problem_are_refused);
  FRESH(a_plan_describes_itself_into_any_room);
  FRESH(what_has_no_elements_needs_no_memory);
  FRESH(null_pointers_are_refused);
  FRESH(tunings_are_read_or_refused);
  hattn_forward_plan_destroy(plan);
  return check_result();
}
