/* What the forward and the backward pass refuse alike. Each program of the two includes this once, after it has said of
   its pass:
     PASS(name), INIT(NAME)  a struct or function of the pass, and the initialiser of a struct
     SUITE, DESCRIBED        what its tests are called; how the description of a plan begins
     ARGS_LEAST              the size that the arguments came with
     DTYPES                  the types of operands that an error lists
     OPTIONAL                the tensor that is given exactly when the problem's field of the same name is 1
     problem, args           the variables that a test spoils
     operands                a row for each tensor
     vary(i)                 sets options that only this pass has, others for each i
     prepare()               computes what the pass reads
     distance(), TOLERANCE   how far the results are from the plain computation, and how far they may be */
#ifndef HATTN_TESTS_ERRORS_PASS_H
#define HATTN_TESTS_ERRORS_PASS_H

#include "errors.h"

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

/* The problems of both passes came with the same size. */
enum { OPERANDS = sizeof(operands) / sizeof(operands[0]), PROBLEM_LEAST = 104 };

static PASS(plan) * plan;
/* Each operand lies at the beginning of a row. The gap behind it is as long as the longest operand. */
static float memory[OPERANDS][2 * Q_SIZE];

static float* memory_of(const operand* op) { return memory[op - operands]; }

static size_t size_of(const operand* op) {
  size_t size = 1;
  int axis;
  for (axis = 0; axis < op->rank; ++axis) size *= (size_t)op->shape[axis];
  return size;
}

static int untouched(const operand* op) { return all_poison(memory_of(op), size_of(op)); }

/* Everything right. */
static void reset(void) {
  const PASS(problem) no_problem = INIT(PROBLEM);
  const PASS(args) no_args = INIT(ARGS);
  const operand* op;
  problem = no_problem;
  problem.dtype = HATTN_F32;
  problem.OPTIONAL = 1;
  SET_SIZES(problem, DIM_QK, DIM_VO);
  args = no_args;
  memset(memory, POISON, sizeof(memory));
  for (op = operands; op < operands + OPERANDS; ++op) {
    const int64_t* shape = op->shape;
    if (!op->written) reference_fill(memory_of(op), size_of(op), (uint32_t)(op - operands) + 1);
    *op->tensor =
        op->rank == 4 ? tensor(memory_of(op), shape[0], shape[1], shape[2], shape[3]) : row_values(memory_of(op));
    *op->given = op->tensor;
  }
}

static int poisoned(void) {
  const operand* op;
  for (op = operands; op < operands + OPERANDS; ++op) {
    if (op->written && !untouched(op)) return 0;
  }
  return 1;
}

/* What is spoilt of the arguments is refused, nothing is written, and everything is right again afterwards. Texts are
   made while it is still spoilt. */
#define REFUSED(spoilt, status, what, got, allowed)             \
  do {                                                          \
    spoilt;                                                     \
    CHECK_STATUS(PASS(run)(plan, &args, NULL), (status), what); \
    SAYS(what, got, allowed);                                   \
    CHECK(poisoned());                                          \
    reset();                                                    \
  } while (0)

/* The same for what is spoilt of the problem: by both that take one, and no plan comes of it. */
#define NO_PLAN(spoilt, status, what, got, allowed)                                 \
  do {                                                                              \
    PASS(plan)* no_plan = plan;                                                     \
    spoilt;                                                                         \
    CHECK_STATUS(PASS(supported)(&problem, HATTN_CPU), (status), what);             \
    CHECK_STATUS(PASS(plan_create)(&problem, HATTN_CPU, &no_plan), (status), what); \
    CHECK(no_plan == NULL);                                                         \
    SAYS(what, got, allowed);                                                       \
    reset();                                                                        \
  } while (0)

/* Parts of texts: a word and a number, which stand until the next call, and a list of numbers. */
static const char* number_text(const char* word, long long number) {
  static char text[64];
  snprintf(text, sizeof(text), "%s %lld", word, number);
  return text;
}

static const char* list_text(char text[128], const int64_t* numbers, int count) {
  char* end = text;
  int i;
  for (i = 0; i < count; ++i) end += sprintf(end, "%s%lld", i == 0 ? "[" : ", ", (long long)numbers[i]);
  strcpy(end, "]");
  return text;
}

static void there_is_no_text_before_a_failure(void) { CHECK(strcmp(hattn_last_error(), "") == 0); }

/* A plan of the problem as it stands computes the arguments as they stand. */
static void computes(void) {
  PASS(plan)* made = NULL;
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, &made) == HATTN_OK);
  CHECK(PASS(run)(made, &args, NULL) == HATTN_OK);
  CHECK(distance() < TOLERANCE);
  PASS(plan_destroy)(made);
}

static void what_is_right_is_computed(void) {
  const int masks[] = {HATTN_MASK_FULL, HATTN_MASK_CAUSAL, HATTN_MASK_WINDOW};
  const operand* op;
  int i;
  for (i = 0; i < 6; ++i) {
    reset();
    problem.mask = masks[i % 3];
    problem.window_left = 1, problem.window_right = HATTN_UNBOUNDED;
    problem.corner = i % 3 == 2 ? HATTN_TOP_LEFT : HATTN_BOTTOM_RIGHT;
    problem.softmax_scale = i == 3 ? 0.5F : 0.0F;
    problem.softcap = i > 2 ? 0.25F : 0.0F;
    /* The second time without the optional tensor, which is then left alone. */
    problem.OPTIONAL = i < 3;
    args.OPTIONAL = i < 3 ? &OPTIONAL : NULL;
    vary(i);
    prepare();
    computes();
    for (op = operands; op < operands + OPERANDS; ++op) {
      CHECK(*op->given != NULL || !op->written || untouched(op));
    }
  }
}

static void a_struct_has_a_size_and_a_version(void) {
  static const uint32_t sizes[] = {0, PROBLEM_LEAST - 1, 0xFFFFFFFF};
  static const uint32_t versions[] = {0, 2, 7};
  const operand* op;
  int i;
  for (i = 0; i < 3; ++i) {
    NO_PLAN(problem.struct_size = sizes[i], HATTN_ERROR_ABI, "problem", number_text("struct_size", sizes[i]),
            "(sizeof(" TEXT(PASS(problem)) "))");
    NO_PLAN(problem.abi_version = versions[i], HATTN_ERROR_ABI, "problem", number_text("abi_version", versions[i]),
            "allowed: 1");
    REFUSED(args.abi_version = versions[i], HATTN_ERROR_ABI, "args", number_text("abi_version", versions[i]),
            "allowed: 1");
  }
  for (op = operands; op < operands + OPERANDS; ++op) {
    REFUSED(op->tensor->struct_size = 95, HATTN_ERROR_ABI, op->name, "struct_size 95", "96");
    REFUSED(op->tensor->abi_version = 0, HATTN_ERROR_ABI, op->name, "abi_version 0", "allowed: 1");
  }
}

/* A size that ends inside of a field would cut a number or a pointer in two. */
static void a_size_inside_of_a_field_is_refused(void) {
  uint32_t size;
  const operand* op;
  for (size = 0; size < sizeof(problem); ++size) {
    if (size >= PROBLEM_LEAST && size % 8 == 0) continue;
    NO_PLAN(problem.struct_size = size, HATTN_ERROR_ABI, "problem", number_text("struct_size", size),
            number_text("", sizeof(problem)));
  }
  for (size = 0; size < sizeof(args); ++size) {
    if (size >= ARGS_LEAST && size % 8 == 0) continue;
    REFUSED(args.struct_size = size, HATTN_ERROR_ABI, "args", number_text("struct_size", size), TEXT(ARGS_LEAST));
  }
  for (op = operands; op < operands + OPERANDS; ++op) {
    for (size = 0; size < sizeof(hattn_tensor); size += 5) {
      REFUSED(op->tensor->struct_size = size, HATTN_ERROR_ABI, op->name, number_text("struct_size", size), "96");
    }
  }
}

/* A caller of the first header knows less: what lies behind its structs is not looked at. */
static void older_structs_are_taken(void) {
  problem.struct_size = PROBLEM_LEAST;
  memset((char*)&problem + PROBLEM_LEAST, POISON, sizeof(problem) - PROBLEM_LEAST);
  CHECK(PASS(supported)(&problem, HATTN_CPU) == HATTN_OK);
  args.struct_size = ARGS_LEAST;
  memset((char*)&args + ARGS_LEAST, POISON, sizeof(args) - ARGS_LEAST);
  CHECK(PASS(run)(plan, &args, NULL) == HATTN_OK);
}

/* A caller of a newer header hands in more than this library knows. */
static void newer_structs_are_taken_while_their_new_fields_are_0(void) {
  struct {
    PASS(problem) known;
    int64_t unknown;
  } newer;
  struct {
    PASS(args) known;
    int64_t unknown;
  } newer_args;
  newer.known = problem;
  newer.known.struct_size = (uint32_t)sizeof(newer);
  newer.unknown = 0;
  CHECK(PASS(supported)(&newer.known, HATTN_CPU) == HATTN_OK);
  newer.unknown = 1;
  CHECK(PASS(supported)(&newer.known, HATTN_CPU) == HATTN_ERROR_ABI);
  SAYS("problem", number_text("struct_size", sizeof(newer)), number_text("", sizeof(problem)));
  newer_args.known = args;
  newer_args.known.struct_size = (uint32_t)sizeof(newer_args);
  newer_args.unknown = 1;
  CHECK(PASS(run)(plan, &newer_args.known, NULL) == HATTN_ERROR_ABI);
  SAYS("args", number_text("struct_size", sizeof(newer_args)), number_text("", sizeof(args)));
  CHECK(poisoned());
  newer_args.unknown = 0;
  CHECK(PASS(run)(plan, &newer_args.known, NULL) == HATTN_OK);
}

static void null_pointers_are_refused(void) {
  static const char from[] = TEXT(PASS(plan_create));
  PASS(plan)* no_plan = plan;
  size_t bytes = 7, length = 7;
  char text[4] = "abc";
  const operand* op;
  CHECK(PASS(supported)(NULL, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "null", TEXT(PASS(problem)));
  CHECK(PASS(plan_create)(NULL, HATTN_CPU, &no_plan) == HATTN_ERROR_ARGUMENT && no_plan == NULL);
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", "allowed: where to write the plan");
  CHECK(PASS(plan_workspace_size)(NULL, &bytes) == HATTN_ERROR_ARGUMENT && bytes == 7);
  SAYS("plan", "null", from);
  CHECK(PASS(plan_workspace_size)(plan, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("bytes", "null", "allowed");
  CHECK(PASS(plan_describe)(NULL, text, sizeof(text), &length) == HATTN_ERROR_ARGUMENT);
  CHECK(length == 7 && strcmp(text, "abc") == 0);
  CHECK(PASS(plan_describe)(plan, NULL, 4, &length) == HATTN_ERROR_ARGUMENT);
  SAYS("text", "null", "allowed");
  CHECK(PASS(run)(NULL, &args, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "null", from);
  CHECK(PASS(run)(plan, NULL, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "null", TEXT(PASS(args)));
  CHECK(hattn_device_count(NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("count", "null", "allowed");
  for (op = operands; op < operands + OPERANDS; ++op) {
    if (op->tensor != &OPTIONAL) {
      REFUSED(*op->given = NULL, HATTN_ERROR_ARGUMENT, op->name, "a null pointer", "hattn_tensor");
    }
    REFUSED(op->tensor->data = NULL, HATTN_ERROR_LAYOUT, op->name, "address 0x0", "multiples of 4 bytes");
  }
}

static void misaligned_pointers_are_refused(void) {
  /* A buffer for a struct that begins 4 bytes past a multiple of 8. */
  static int64_t buffer[20];
  const void* odd = (const char*)(void*)buffer + 4;
  const operand* op;
  int bytes;
  CHECK(PASS(supported)((const PASS(problem)*)odd, HATTN_CPU) == HATTN_ERROR_ARGUMENT);
  SAYS("problem", "address 0x", "multiples of 8");
  CHECK(PASS(run)(plan, (const PASS(args)*)odd, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("args", "address 0x", "multiples of 8");
  for (op = operands; op < operands + OPERANDS; ++op) {
    REFUSED(*op->given = (const hattn_tensor*)odd, HATTN_ERROR_ARGUMENT, op->name, "address 0x", "multiples of 8");
    for (bytes = 1; bytes < 4; ++bytes) {
      REFUSED(op->tensor->data = (char*)(void*)memory_of(op) + bytes, HATTN_ERROR_LAYOUT, op->name, "address 0x",
              "multiples of 4 bytes");
    }
  }
}

static void strides_are_refused(void) {
  const operand* op;
  char strides[128];
  int axis, i;
  REFUSED(v.stride[0] = INT64_MAX, HATTN_ERROR_LAYOUT, "v", "9223372036854775807", "2^63");
  REFUSED(v.stride[0] = INT64_MAX / 4, HATTN_ERROR_LAYOUT, "v", "address 0x", "address space");
  for (op = operands; op < operands + OPERANDS; ++op) {
    int64_t* const stride = op->tensor->stride;
    for (i = 2; i <= 4; i += 2) {
      REFUSED(stride[op->rank - 1] = i, HATTN_ERROR_LAYOUT, op->name, list_text(strides, stride, op->rank),
              "stride 1 in the innermost dimension");
    }
    for (axis = 0; axis + 1 < op->rank; ++axis) {
      REFUSED(stride[axis] = -stride[axis], HATTN_ERROR_LAYOUT, op->name, list_text(strides, stride, op->rank),
              "0 and above");
      /* What is written has no element in two places. */
      for (i = 0; i < 2 && op->written; ++i) {
        REFUSED(stride[axis] = i, HATTN_ERROR_LAYOUT, op->name, "uses elements twice", "step over each other");
      }
    }
  }
}

static void devices_are_refused(void) {
  PASS(plan)* no_plan = plan;
  const operand* op;
  int32_t count = -1;
  for (op = operands; op < operands + OPERANDS; ++op) {
    REFUSED(op->tensor->device = 0, HATTN_ERROR_DEVICE, op->name, "on device cuda:0", "device cpu, the plan's");
    REFUSED(op->tensor->device = -2, HATTN_ERROR_ARGUMENT, op->name, ": device -2;",
            "HATTN_CPU (-1), or the ordinal of a GPU, 0 and above");
  }
  CHECK(PASS(supported)(&problem, -2) == HATTN_ERROR_ARGUMENT);
  SAYS("device", ": -2;", "HATTN_CPU (-1), or the ordinal of a GPU, 0 and above");
  CHECK(hattn_device_count(&count) == HATTN_OK && count >= 0);
  CHECK(PASS(supported)(&problem, count) == HATTN_ERROR_NO_DEVICE);
  CHECK(PASS(plan_create)(&problem, count, &no_plan) == HATTN_ERROR_NO_DEVICE);
  CHECK(no_plan == NULL);
  SAYS("no device", "cuda:", ";");
}

static void shapes_are_refused(void) {
  /* None, and what other dimensions have. */
  static const int64_t sizes[] = {0, HEADS_KV, SEQLEN_Q, HEADS_Q, SEQLEN_KV, DIM_QK};
  const operand* op;
  char got[128], want[128];
  int axis, i;
  for (op = operands; op < operands + OPERANDS; ++op) {
    const char* axes = op->rank == 4 ? "4, [batch, seqlen, heads, head_dim]" : "3, [batch, heads, seqlen]";
    int64_t* const shape = op->tensor->shape;
    list_text(want, op->shape, op->rank);
    for (axis = 0; axis < op->rank; ++axis) {
      for (i = 0; i < 6; ++i) {
        if (sizes[i] == op->shape[axis]) continue;
        REFUSED(shape[axis] = sizes[i], HATTN_ERROR_SHAPE, op->name, list_text(got, shape, op->rank), want);
        CHECK_TEXT(hattn_last_error(), strchr(axes, '['));
      }
      REFUSED(shape[axis] = -1, HATTN_ERROR_LAYOUT, op->name, "-1", "0 and above");
    }
    REFUSED(op->tensor->ndim = 7 - op->rank, HATTN_ERROR_ARGUMENT, op->name, number_text("ndim", 7 - op->rank), axes);
  }
}

static void dtypes_are_refused(void) {
  static const struct {
    hattn_dtype dtype;
    hattn_status status;
    const char *got, *allowed;
  } wrong[] = {{HATTN_F16, HATTN_ERROR_DTYPE, "dtype f16", "f32"},
               {HATTN_BF16, HATTN_ERROR_DTYPE, "dtype bf16", "f32"},
               {HATTN_E4M3, HATTN_ERROR_DTYPE, "dtype e4m3", "f32"},
               {0, HATTN_ERROR_ARGUMENT, "dtype 0", "allowed: HATTN_F32 (3)"},
               {HATTN_I32, HATTN_ERROR_DTYPE, "dtype i32", "f32"},
               {9, HATTN_ERROR_ARGUMENT, "dtype 9", "allowed: HATTN_F32 (3)"}};
  const operand* op;
  int i;
  for (op = operands; op < operands + OPERANDS; ++op) {
    for (i = 0; i < 6; ++i) {
      REFUSED(op->tensor->dtype = wrong[i].dtype, wrong[i].status, op->name, wrong[i].got, wrong[i].allowed);
    }
  }
  NO_PLAN(problem.dtype = 0, HATTN_ERROR_ARGUMENT, "dtype", "dtype: 0;", "allowed: " DTYPES);
  NO_PLAN(problem.dtype = 9, HATTN_ERROR_ARGUMENT, "dtype", "dtype: 9;", "allowed: " DTYPES);
}

static void outputs_have_memory_of_their_own(void) {
  const operand *op, *other;
  char meet[64];
  int i;
  for (op = operands; op < operands + OPERANDS; ++op) {
    for (other = operands; op->written && other < operands + OPERANDS; ++other) {
      /* Where two outputs meet, the later one is refused. */
      if (other->written && other >= op) continue;
      sprintf(meet, "meet those of %s;", other->name);
      for (i = 0; i < 3; ++i) {
        /* The last time it begins in the last element of the other one, and ends in the gap behind that. */
        REFUSED(op->tensor->data = memory_of(other) + (i < 2 ? i : (int)size_of(other) - 1), HATTN_ERROR_LAYOUT,
                op->name, meet, "its own");
      }
    }
  }
}

static void the_optional_tensor_is_given_exactly_when_the_problem_says_so(void) {
  PASS(plan)* without = NULL;
  REFUSED(args.OPTIONAL = NULL, HATTN_ERROR_VALUE, TEXT(OPTIONAL), "missing", "allowed");
  problem.OPTIONAL = 0;
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, &without) == HATTN_OK);
  CHECK(PASS(run)(without, &args, NULL) == HATTN_ERROR_VALUE);
  SAYS(TEXT(OPTIONAL), "given", "none");
  CHECK(poisoned());
  PASS(plan_destroy)(without);
}

static void reserved_fields_are_0(void) {
  const operand* op;
  for (op = operands; op < operands + OPERANDS; ++op) {
    REFUSED(op->tensor->reserved = -1, HATTN_ERROR_ARGUMENT, op->name, "reserved", "0");
  }
}

static void numbers_of_a_problem_are_refused(void) {
  NO_PLAN(problem.arch = 70, HATTN_ERROR_ARGUMENT, "arch", "70", "HATTN_ARCH_SM80 (80)");
  NO_PLAN(problem.arch = HATTN_ARCH_SM80, HATTN_ERROR_UNSUPPORTED, "unsupported", "sm80 kernels on the CPU",
          "sm_80 and later");
  NO_PLAN(problem.sm_margin = -1, HATTN_ERROR_VALUE, "sm_margin", "-1", "0 and above");
  NO_PLAN(problem.sm_margin = INT32_MIN, HATTN_ERROR_VALUE, "sm_margin", "-2147483648", "0 and above");
  NO_PLAN(problem.mask = 5, HATTN_ERROR_ARGUMENT, "mask", "5", "HATTN_MASK_FULL (0)");
  NO_PLAN(problem.corner = -1, HATTN_ERROR_ARGUMENT, "corner", "-1", "HATTN_BOTTOM_RIGHT (0)");
  NO_PLAN(problem.batch = -2, HATTN_ERROR_VALUE, "batch", "-2", "0 and above");
  NO_PLAN(problem.seqlen_q = INT64_MIN, HATTN_ERROR_VALUE, "seqlen_q", "-9223372036854775808", "0 and above");
  NO_PLAN(problem.seqlen_kv = INT64_MAX, HATTN_ERROR_VALUE, "seqlen_q + seqlen_kv", "9223372036854775807",
          "below 2^30");
  NO_PLAN(problem.heads_q = 3, HATTN_ERROR_VALUE, "heads_q", "3 with heads_kv 2", "a multiple of heads_kv");
  NO_PLAN(problem.heads_kv = 3, HATTN_ERROR_VALUE, "heads_q", "4 with heads_kv 3", "a multiple of heads_kv");
  NO_PLAN(problem.heads_kv = 0, HATTN_ERROR_VALUE, "heads_kv", "0", "1 and above");
  NO_PLAN(problem.head_dim_qk = 0, HATTN_ERROR_VALUE, "head_dim_qk", "0", "1 to 2^31 - 1");
  NO_PLAN(problem.head_dim_vo = -8, HATTN_ERROR_VALUE, "head_dim_vo", "-8", "1 to 2^31 - 1");
  NO_PLAN(problem.head_dim_vo = INT64_MIN, HATTN_ERROR_VALUE, "head_dim_vo", "-9", "1 to 2^31 - 1");
  NO_PLAN(problem.heads_q = -1, HATTN_ERROR_VALUE, "heads_q", "-1", "1 and above");
  NO_PLAN(problem.softmax_scale = -1.0F, HATTN_ERROR_VALUE, "softmax_scale", "-1", "finite and above 0");
  NO_PLAN(problem.softmax_scale = NAN, HATTN_ERROR_VALUE, "softmax_scale", "NaN", "finite and above 0");
  NO_PLAN(problem.softcap = -1.0F, HATTN_ERROR_VALUE, "softcap", "-1", "0 (none), or finite and above 0");
  NO_PLAN(problem.softcap = NAN, HATTN_ERROR_VALUE, "softcap", "NaN", "finite and above 0");
  NO_PLAN(problem.alibi = 3, HATTN_ERROR_ARGUMENT, "alibi", "3", "HATTN_ALIBI_PER_BATCH (2)");
  NO_PLAN(problem.dropout = 1.0F, HATTN_ERROR_VALUE, "dropout", "1", "0 to below 1");
  NO_PLAN(problem.dropout = NAN, HATTN_ERROR_VALUE, "dropout", "NaN", "0 to below 1");
  NO_PLAN(problem.block_mask = 2, HATTN_ERROR_ARGUMENT, "block_mask", "2", "HATTN_BLOCK_MASK_LISTS (1)");
  NO_PLAN(problem.block_mask = 17, HATTN_ERROR_ARGUMENT, "block_mask", "17", "HATTN_BLOCK_MASK_FULL_BLOCKS (8)");
  NO_PLAN(problem.block_mask = -1, HATTN_ERROR_ARGUMENT, "block_mask", "-1", "HATTN_BLOCK_MASK_LISTS (1)");
  NO_PLAN(problem.block_mask_most_partial = 1, HATTN_ERROR_VALUE, "block_mask_most_partial", "1",
          "0 without a block_mask");
  problem.block_mask = HATTN_BLOCK_MASK_LISTS;
  NO_PLAN(problem.block_mask_most_partial = -1, HATTN_ERROR_VALUE, "block_mask_most_partial", "-1", "0 and above");
  problem.block_mask = HATTN_BLOCK_MASK_LISTS;
  NO_PLAN(problem.block_mask_most_partial = 9, HATTN_ERROR_VALUE, "block_mask.most_partial", "9", "the blocks of keys");
  NO_PLAN(problem.bias = 4, HATTN_ERROR_ARGUMENT, "bias", "4", "HATTN_F32 (3)");
  NO_PLAN(problem.bias_dims = 1, HATTN_ERROR_ARGUMENT, "bias_dims", "1", "with a bias");
  problem.bias = HATTN_F32;
  NO_PLAN(problem.bias_dims = 8, HATTN_ERROR_ARGUMENT, "bias_dims", "8", "HATTN_BIAS_PER_QUERY (4)");
  NO_PLAN(problem.softcap = INFINITY, HATTN_ERROR_VALUE, "softcap", "inf", "finite and above 0");
  problem.mask = HATTN_MASK_WINDOW;
  NO_PLAN(problem.window_left = -2, HATTN_ERROR_VALUE, "window_left", "-2", "HATTN_UNBOUNDED (-1)");
  problem.mask = HATTN_MASK_WINDOW;
  NO_PLAN(problem.window_right = INT64_MIN, HATTN_ERROR_VALUE, "window_right", "-9223372036854775808",
          "HATTN_UNBOUNDED (-1)");
  problem.mask = HATTN_MASK_CHUNKED;
  NO_PLAN(problem.window_left = 0, HATTN_ERROR_VALUE, "window_left", "0", "1 and above with this mask");
  problem.mask = HATTN_MASK_PREFIX;
  NO_PLAN(problem.window_left = -1, HATTN_ERROR_VALUE, "window_left", "-1", "0 and above with this mask");
}

/* The CPU has no multiprocessors to leave, and needs no workspace. */
static void the_cpu_ignores_a_margin_and_meets_a_limit(void) {
  char text[512];
  PASS(plan)* made = NULL;
  problem.sm_margin = INT32_MAX;
  problem.workspace_limit = 1;
  prepare();
  computes();
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, &made) == HATTN_OK);
  CHECK(PASS(plan_describe)(made, text, sizeof(text), NULL) == HATTN_OK);
  CHECK_TEXT(text, " sm_margin 2147483647 workspace_limit 1");
  PASS(plan_destroy)(made);
}

static void a_plan_describes_itself_into_any_room(void) {
  char whole[512], part[6] = "?????";
  size_t length = 0, again = 0;
  CHECK(PASS(plan_describe)(plan, NULL, 0, &length) == HATTN_OK && length > 10 && length < sizeof(whole));
  CHECK(PASS(plan_describe)(plan, whole, sizeof(whole), &again) == HATTN_OK && again == length);
  CHECK(strlen(whole) == length);
  CHECK_TEXT(whole, DESCRIBED);
  CHECK_TEXT(whole, " " TEXT(OPTIONAL) ": cpu");
  CHECK(PASS(plan_describe)(plan, part, 5, NULL) == HATTN_OK);
  CHECK(memcmp(part, DESCRIBED, 4) == 0 && part[4] == '\0' && part[5] == '\0');
  CHECK(PASS(plan_workspace_size)(plan, &length) == HATTN_OK && length == 0);
}

/* Without keys, and then without queries: results are those of rows without keys, or gradients of nothing. */
static void what_has_no_elements_needs_no_memory(void) {
  const operand* op;
  int keys;
  for (keys = 1; keys >= 0; --keys) {
    PASS(plan)* made = NULL;
    reset();
    if (keys) {
      problem.seqlen_kv = 0;
    } else {
      problem.seqlen_q = 0;
    }
    for (op = operands; op < operands + OPERANDS; ++op) {
      if (op->of_keys != keys) continue;
      op->tensor->shape[op->rank == 4 ? 1 : 2] = 0;
      op->tensor->data = NULL;
    }
    CHECK(PASS(plan_create)(&problem, HATTN_CPU, &made) == HATTN_OK);
    CHECK(PASS(run)(made, &args, NULL) == HATTN_OK);
    for (op = operands; op < operands + OPERANDS; ++op) {
      const float expected = op->rank == 4 ? 0.0F : -INFINITY;
      size_t i;
      for (i = 0; op->written && op->of_keys != keys && i < size_of(op); ++i) CHECK(memory_of(op)[i] == expected);
    }
    PASS(plan_destroy)(made);
  }
}

/* What the initialiser leaves to the caller is refused by its name if it is forgotten. */
static void sizes_that_were_forgotten_are_refused(void) {
  const PASS(problem) initial = INIT(PROBLEM);
  NO_PLAN(problem.batch = initial.batch, HATTN_ERROR_VALUE, "batch", "HATTN_UNSET (-1)", "0 and above");
  NO_PLAN(problem.seqlen_q = initial.seqlen_q, HATTN_ERROR_VALUE, "seqlen_q", "HATTN_UNSET (-1)", "0 and above");
  NO_PLAN(problem.seqlen_kv = initial.seqlen_kv, HATTN_ERROR_VALUE, "seqlen_kv", "HATTN_UNSET (-1)", "0 and above");
  NO_PLAN(problem.heads_q = initial.heads_q, HATTN_ERROR_VALUE, "heads_q", "0", "1 and above");
  NO_PLAN(problem.heads_kv = initial.heads_kv, HATTN_ERROR_VALUE, "heads_kv", "0", "1 and above");
  NO_PLAN(problem.head_dim_qk = initial.head_dim_qk, HATTN_ERROR_VALUE, "head_dim_qk", "0", "1 to 2^31 - 1");
  NO_PLAN(problem.head_dim_vo = initial.head_dim_vo, HATTN_ERROR_VALUE, "head_dim_vo", "0", "1 to 2^31 - 1");
}

/* No sequences: nothing is computed, and that is no error. */
static void a_batch_of_0_is_legal(void) {
  PASS(plan)* made = NULL;
  const operand* op;
  problem.batch = 0;
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, &made) == HATTN_OK);
  CHECK(PASS(run)(made, &args, NULL) == HATTN_ERROR_SHAPE);
  SAYS("q", "[2, 3, 4, 8]", "expected [0, 3, 4, 8]");
  for (op = operands; op < operands + OPERANDS; ++op) op->tensor->shape[0] = 0;
  CHECK(PASS(run)(made, &args, NULL) == HATTN_OK);
  CHECK(poisoned());
  PASS(plan_destroy)(made);
}

/* Makes a tensor of queries one of packed sequences, of the same elements. */
static void pack(const operand* op) {
  hattn_tensor* const t = op->tensor;
  const int64_t* const of = op->shape;
  t->ndim = op->rank - 1;
  if (op->rank == 4) {
    t->shape[0] = of[0] * of[1], t->shape[1] = of[2], t->shape[2] = of[3];
    t->stride[0] = of[2] * of[3], t->stride[1] = of[3], t->stride[2] = 1;
  } else {
    t->shape[0] = of[1], t->shape[1] = of[0] * of[2];
    t->stride[0] = of[0] * of[2], t->stride[1] = 1;
  }
}

static hattn_tensor list_of(int32_t* numbers, int64_t count) {
  hattn_tensor made = tensor(NULL, count, 1, 1, 1);
  made.data = numbers;
  made.dtype = HATTN_I32;
  made.ndim = 1;
  return made;
}

/* Offsets and used lengths may be any numbers: the CPU computes the legal ones, refuses the others and crashes on none.
 */
static void any_numbers_in_lists_are_taken_or_refused(void) {
  enum {
    NUMBERS = 8,
    OF_OFFSETS = NUMBERS * NUMBERS * NUMBERS,
    OF_USED = NUMBERS * NUMBERS,
    TOTAL_Q = BATCH * SEQLEN_Q
  };
  static const int32_t numbers[NUMBERS] = {INT32_MIN, -1, 0, 1, SEQLEN_KV, TOTAL_Q, TOTAL_Q + 1, INT32_MAX};
  PASS(plan)* made = NULL;
  const operand* op;
  int i, taken = 0;
  problem.cu_seqlens_q = problem.seqused_kv = 1, problem.seqlen_q = TOTAL_Q;
  CHECK(PASS(plan_create)(&problem, HATTN_CPU, &made) == HATTN_OK);
  for (i = 0; i < OF_OFFSETS + OF_USED; ++i) {
    int32_t offsets[BATCH + 1] = {0, 1, TOTAL_Q}, used[BATCH] = {SEQLEN_KV, 0};
    const hattn_tensor of_offsets = list_of(offsets, BATCH + 1), of_used = list_of(used, BATCH);
    const int32_t a = numbers[i % NUMBERS], b = numbers[i / NUMBERS % NUMBERS], c = numbers[i / OF_USED % NUMBERS];
    const int is_of_offsets = i < OF_OFFSETS;
    const int is_right = is_of_offsets ? a >= 0 && b >= a && c >= b && c <= TOTAL_Q
                                       : a >= 0 && a <= SEQLEN_KV && b >= 0 && b <= SEQLEN_KV;
    hattn_status status;
    if (is_of_offsets) {
      offsets[0] = a, offsets[1] = b, offsets[2] = c;
    } else {
      used[0] = a, used[1] = b;
    }
    reset();
    for (op = operands; op < operands + OPERANDS; ++op) {
      if (!op->of_keys) pack(op);
    }
    args.cu_seqlens_q = &of_offsets, args.seqused_kv = &of_used;
    status = PASS(run)(made, &args, NULL);
    CHECK_STATUS(status, is_right ? HATTN_OK : HATTN_ERROR_VALUE, is_of_offsets ? "cu_seqlens_q" : "seqused_kv");
    taken += status == HATTN_OK;
    if (is_right) continue;
    SAYS(is_of_offsets ? "cu_seqlens_q" : "seqused_kv", " at ", "; allowed: ");
    CHECK(poisoned());
  }
  /* Of four numbers, those that do not decrease; and of three. */
  CHECK(taken == 20 + 9);
  PASS(plan_destroy)(made);
}

/* A test that forgot to fill something in would otherwise go unnoticed by the next one. */
#define FRESH(test)   \
  do {                \
    reset();          \
    RUN(SUITE, test); \
  } while (0)

/* Makes the plan and runs what is here. */
static int run_what_passes_share(void) {
  RUN(SUITE, there_is_no_text_before_a_failure);
  reset();
  if (PASS(plan_create)(&problem, HATTN_CPU, &plan) != HATTN_OK) {
    printf("no plan: %s\n", hattn_last_error());
    return 0;
  }
  FRESH(what_is_right_is_computed);
  FRESH(a_struct_has_a_size_and_a_version);
  FRESH(a_size_inside_of_a_field_is_refused);
  FRESH(older_structs_are_taken);
  FRESH(newer_structs_are_taken_while_their_new_fields_are_0);
  FRESH(null_pointers_are_refused);
  FRESH(misaligned_pointers_are_refused);
  FRESH(strides_are_refused);
  FRESH(devices_are_refused);
  FRESH(shapes_are_refused);
  FRESH(dtypes_are_refused);
  FRESH(outputs_have_memory_of_their_own);
  FRESH(the_optional_tensor_is_given_exactly_when_the_problem_says_so);
  FRESH(reserved_fields_are_0);
  FRESH(numbers_of_a_problem_are_refused);
  FRESH(sizes_that_were_forgotten_are_refused);
  FRESH(the_cpu_ignores_a_margin_and_meets_a_limit);
  FRESH(a_plan_describes_itself_into_any_room);
  FRESH(what_has_no_elements_needs_no_memory);
  FRESH(a_batch_of_0_is_legal);
  FRESH(any_numbers_in_lists_are_taken_or_refused);
  return 1;
}

#endif
