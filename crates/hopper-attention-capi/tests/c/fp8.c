/* FP8 on the CPU: the quantiser and the forward pass of e4m3 operands, held against what the operands stand for, and
   what is refused of them. On a GPU the same entries are called by tests/tests/gpu/capi_fp8.rs at the root. */
#include <math.h>

#include "errors.h"

/* A head dim of both kinds, since blocks of the rotation and bytes of a row are of one size here. */
enum { DIM = 16, ROWS_Q = BATCH * SEQLEN_Q * HEADS_Q, ROWS_KV = BATCH * SEQLEN_KV * HEADS_KV };

static float q_values[ROWS_Q * DIM], k_values[ROWS_KV * DIM], v_values[ROWS_KV * DIM];
static uint8_t q_stored[ROWS_Q * DIM], k_stored[ROWS_KV * DIM], v_stored[ROWS_KV * DIM];
static float q_descale[BATCH * HEADS_Q], k_descale[BATCH * HEADS_Q], v_descale[BATCH * HEADS_Q];
static uint8_t o_bytes[2 * ROWS_Q * DIM];
static float lse_values[LSE_SIZE], scale_o_value[1], amax_value[1], count_values[6];

static hattn_forward_problem problem;
static hattn_quantize_problem quantising;
static hattn_tensor values[3], stored[3], descale[3], o, lse, scale_o, amax, counts;
static hattn_quantize_tensor one[3];
static hattn_quantize_args quantise_args;
static hattn_forward_args args;

static hattn_tensor of(void* data, hattn_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
  hattn_tensor made = tensor(NULL, a, b, c, d);
  made.data = data;
  made.dtype = dtype;
  return made;
}

/* Factors [batch, heads, 1]: the sequences here are one block. */
static hattn_tensor factors(float* data, int64_t batch, int64_t heads) {
  hattn_tensor made = of(data, HATTN_F32, batch, heads, 1, 1);
  made.ndim = 3;
  return made;
}

static hattn_tensor number(float* data) {
  hattn_tensor made = of(data, HATTN_F32, 1, 1, 1, 1);
  made.ndim = 1;
  return made;
}

/* Everything right, with factors per block. */
static void reset(void) {
  const hattn_forward_problem no_problem = HATTN_FORWARD_PROBLEM_INIT;
  const hattn_quantize_problem no_quantising = HATTN_QUANTIZE_PROBLEM_INIT;
  const hattn_quantize_tensor no_tensor = HATTN_QUANTIZE_TENSOR_INIT;
  const hattn_quantize_args no_quantise_args = HATTN_QUANTIZE_ARGS_INIT;
  const hattn_forward_args no_args = HATTN_FORWARD_ARGS_INIT;
  int i;
  problem = no_problem;
  problem.dtype = HATTN_E4M3;
  problem.output = HATTN_E4M3;
  problem.scaling = HATTN_PER_BLOCK;
  problem.amax = 1;
  problem.lse = 1;
  SET_SIZES(problem, DIM, DIM);
  quantising = no_quantising;
  quantising.forward = &problem;
  quantising.source = HATTN_F32;
  reference_fill(q_values, ROWS_Q * DIM, 1);
  reference_fill(k_values, ROWS_KV * DIM, 2);
  reference_fill(v_values, ROWS_KV * DIM, 3);
  values[0] = of(q_values, HATTN_F32, BATCH, SEQLEN_Q, HEADS_Q, DIM);
  values[1] = of(k_values, HATTN_F32, BATCH, SEQLEN_KV, HEADS_KV, DIM);
  values[2] = of(v_values, HATTN_F32, BATCH, SEQLEN_KV, HEADS_KV, DIM);
  stored[0] = of(q_stored, HATTN_E4M3, BATCH, SEQLEN_Q, HEADS_Q, DIM);
  stored[1] = of(k_stored, HATTN_E4M3, BATCH, SEQLEN_KV, HEADS_KV, DIM);
  stored[2] = of(v_stored, HATTN_E4M3, BATCH, SEQLEN_KV, HEADS_KV, DIM);
  descale[0] = factors(q_descale, BATCH, HEADS_Q);
  descale[1] = factors(k_descale, BATCH, HEADS_KV);
  descale[2] = factors(v_descale, BATCH, HEADS_KV);
  counts = of(count_values, HATTN_F32, 3, 2, 1, 1);
  counts.ndim = 2;
  counts.stride[0] = 2;
  quantise_args = no_quantise_args;
  for (i = 0; i < 3; ++i) {
    one[i] = no_tensor;
    one[i].values = &values[i], one[i].stored = &stored[i], one[i].descale = &descale[i];
  }
  quantise_args.q = &one[0], quantise_args.k = &one[1], quantise_args.v = &one[2];
  quantise_args.counts = &counts;
  o = of(o_bytes, HATTN_E4M3, BATCH, SEQLEN_Q, HEADS_Q, DIM);
  lse = row_values(lse_values);
  scale_o_value[0] = 64.0F;
  scale_o = number(scale_o_value);
  amax = number(amax_value);
  args = no_args;
  args.q = &stored[0], args.k = &stored[1], args.v = &stored[2], args.o = &o, args.lse = &lse;
  args.descale_q = &descale[0], args.descale_k = &descale[1], args.descale_v = &descale[2];
  args.scale_o = &scale_o, args.amax = &amax;
  memset(o_bytes, POISON, sizeof(o_bytes));
  memset(lse_values, POISON, sizeof(lse_values));
  memset(amax_value, POISON, sizeof(amax_value));
}

static float e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const float magnitude = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
  return (bits & 128) != 0 ? -magnitude : magnitude;
}

static float bf16(const uint8_t* bytes) {
  const uint32_t bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static hattn_status quantise(void) {
  hattn_quantize_plan* plan = NULL;
  size_t bytes = 99;
  hattn_status status = hattn_quantize_plan_create(&quantising, HATTN_CPU, &plan);
  if (status != HATTN_OK) return status;
  CHECK(hattn_quantize_plan_workspace_size(plan, &bytes) == HATTN_OK && bytes == 0);
  status = hattn_quantize_run(plan, &quantise_args, NULL);
  hattn_quantize_plan_destroy(plan);
  return status;
}

static hattn_status attend(void) {
  hattn_forward_plan* plan = NULL;
  hattn_status status = hattn_forward_plan_create(&problem, HATTN_CPU, &plan);
  if (status != HATTN_OK) return status;
  status = hattn_forward_run(plan, &args, NULL);
  hattn_forward_plan_destroy(plan);
  return status;
}

/* What the stored operands stand for, in place of the values. */
static void dequantise(const uint8_t* bytes, const float* of_heads, float* out, int seqlen, int heads) {
  int b, s, h, d;
  for (b = 0; b < BATCH; ++b) {
    for (s = 0; s < seqlen; ++s) {
      for (h = 0; h < heads; ++h) {
        for (d = 0; d < DIM; ++d) {
          const int at = ((b * seqlen + s) * heads + h) * DIM + d;
          out[at] = e4m3(bytes[at]) * of_heads[b * heads + h];
        }
      }
    }
  }
}

static void operands_stand_for_the_values(void) {
  static float real[ROWS_Q * DIM];
  float largest = 0.0F;
  int i;
  CHECK(hattn_quantize_supported(&quantising, HATTN_CPU) == HATTN_OK);
  memset(count_values, POISON, sizeof(count_values));
  CHECK(quantise() == HATTN_OK);
  for (i = 0; i < 6; ++i) CHECK(count_values[i] == 0.0F);
  dequantise(q_stored, q_descale, real, SEQLEN_Q, HEADS_Q);
  for (i = 0; i < ROWS_Q * DIM; ++i) {
    /* Half a step of three bits of mantissa, and half of the smallest step. */
    CHECK(fabsf(real[i] - q_values[i]) <= fabsf(q_values[i]) / 15.0F + q_descale[0] / 256.0F);
    largest = fmaxf(largest, e4m3(q_stored[i]));
  }
  CHECK(largest == 448.0F);
}

static void what_is_given_saturates_and_is_counted(void) {
  one[0].given = 1;
  q_descale[0] = 1.0F;
  problem.scaling = HATTN_PER_TENSOR;
  descale[0] = factors(q_descale, 1, 1);
  quantise_args.k = quantise_args.v = NULL;
  q_values[0] = 1000.0F, q_values[1] = -500.0F, q_values[2] = INFINITY, q_values[3] = 463.0F;
  CHECK(quantise() == HATTN_OK);
  CHECK(e4m3(q_stored[0]) == 448.0F && e4m3(q_stored[1]) == -448.0F && e4m3(q_stored[3]) == 448.0F);
  CHECK(q_stored[2] == 0x7f && q_descale[0] == 1.0F);
  CHECK(count_values[0] == 2.0F && count_values[1] == 1.0F && count_values[2] == 0.0F);
  reset();
}

/* 14 is 448 with an exponent that is less by 5, which is what the largest magnitude of Q and K then is; V keeps 448. */
static void half_scores_make_q_and_k_small(void) {
  static uint8_t plain[ROWS_Q * DIM];
  const float* of_q = q_descale;
  float largest[2] = {0.0F, 0.0F};
  float before;
  int i;
  CHECK(quantise() == HATTN_OK);
  memcpy(plain, q_stored, sizeof(plain));
  before = of_q[0];
  problem.half_scores = 1;
  CHECK(quantise() == HATTN_OK);
  CHECK(of_q[0] == 32.0F * before);
  for (i = 0; i < ROWS_Q * DIM; ++i) {
    /* But for those that are too small for three bits. */
    CHECK(fabsf(e4m3(plain[i]) - 32.0F * e4m3(q_stored[i])) <= 0.03125F);
    largest[0] = fmaxf(largest[0], fabsf(e4m3(q_stored[i])));
  }
  for (i = 0; i < ROWS_KV * DIM; ++i) largest[1] = fmaxf(largest[1], fabsf(e4m3(v_stored[i])));
  CHECK(largest[0] == 14.0F && largest[1] == 448.0F);
  CHECK(attend() == HATTN_OK);
  reset();
}

static void outputs_are_those_of_what_operands_stand_for(void) {
  /* The same problem in f32, of the operands' real values: rotated ones, whose products are those of the values. */
  static float exact[ROWS_Q * DIM], real_q[ROWS_Q * DIM], real_k[ROWS_KV * DIM], real_v[ROWS_KV * DIM];
  float largest = 0.0F;
  int i;
  quantising.hadamard = 1, quantising.seed = 7;
  CHECK(quantise() == HATTN_OK);
  dequantise(q_stored, q_descale, real_q, SEQLEN_Q, HEADS_Q);
  dequantise(k_stored, k_descale, real_k, SEQLEN_KV, HEADS_KV);
  dequantise(v_stored, v_descale, real_v, SEQLEN_KV, HEADS_KV);
  CHECK(attend() == HATTN_OK);
  {
    static float wide_lse[LSE_SIZE];
    hattn_forward_problem wide = problem;
    hattn_forward_args wide_args = HATTN_FORWARD_ARGS_INIT;
    hattn_forward_plan* plan = NULL;
    const hattn_tensor wide_q = tensor(real_q, BATCH, SEQLEN_Q, HEADS_Q, DIM);
    const hattn_tensor wide_k = tensor(real_k, BATCH, SEQLEN_KV, HEADS_KV, DIM);
    const hattn_tensor wide_v = tensor(real_v, BATCH, SEQLEN_KV, HEADS_KV, DIM);
    const hattn_tensor wide_o = tensor(exact, BATCH, SEQLEN_Q, HEADS_Q, DIM);
    const hattn_tensor of_lse = row_values(wide_lse);
    wide.dtype = HATTN_F32, wide.output = 0, wide.scaling = 0, wide.amax = 0, wide.half_scores = 0;
    wide_args.q = &wide_q, wide_args.k = &wide_k, wide_args.v = &wide_v, wide_args.o = &wide_o;
    wide_args.lse = &of_lse;
    CHECK(hattn_forward_plan_create(&wide, HATTN_CPU, &plan) == HATTN_OK);
    CHECK(hattn_forward_run(plan, &wide_args, NULL) == HATTN_OK);
    CHECK(reference_distance(&wide, &wide_args) < 1e-5);
    hattn_forward_plan_destroy(plan);
    for (i = 0; i < LSE_SIZE; ++i) CHECK(fabsf(wide_lse[i] - lse_values[i]) < 0.05F);
  }
  for (i = 0; i < ROWS_Q * DIM; ++i) largest = fmaxf(largest, fabsf(exact[i]));
  CHECK(fabsf(amax_value[0] - largest) < largest / 8.0F);
  for (i = 0; i < ROWS_Q * DIM; ++i) CHECK(fabsf(e4m3(o_bytes[i]) / 64.0F - exact[i]) < largest / 8.0F);

  /* Without a type of O it is bf16, without a factor of its own and without its largest magnitude. */
  problem.output = 0, problem.amax = 0;
  o.dtype = HATTN_BF16;
  args.scale_o = args.amax = NULL;
  CHECK(attend() == HATTN_OK);
  for (i = 0; i < ROWS_Q * DIM; ++i) CHECK(fabsf(bf16(o_bytes + 2 * i) - exact[i]) < largest / 8.0F);
  reset();
}

static int untouched(void) {
  size_t i;
  for (i = 0; i < sizeof(o_bytes); ++i) {
    if (o_bytes[i] != POISON) return 0;
  }
  return all_poison(lse_values, LSE_SIZE) && all_poison(amax_value, 1);
}

/* What is spoilt is refused, nothing is written, and everything is right again afterwards. */
#define NO_FORWARD(spoilt, status, what, got, allowed) \
  do {                                                 \
    spoilt;                                            \
    CHECK_STATUS(attend(), (status), what);            \
    SAYS(what, got, allowed);                          \
    CHECK(untouched());                                \
    reset();                                           \
  } while (0)

static void what_does_not_fit_e4m3_operands_is_refused(void) {
  NO_FORWARD(args.descale_k = NULL, HATTN_ERROR_ARGUMENT, "descale_k", "a null pointer", "hattn_tensor");
  NO_FORWARD(args.scale_o = NULL, HATTN_ERROR_VALUE, "scale_o", "missing", "made with an e4m3 output");
  NO_FORWARD(args.amax = NULL, HATTN_ERROR_VALUE, "amax", "missing", "made with amax, writes");
  NO_FORWARD(problem.amax = 0, HATTN_ERROR_VALUE, "amax", "given", "without amax");
  NO_FORWARD(problem.output = HATTN_BF16, HATTN_ERROR_DTYPE, "o", "e4m3", "bf16, the problem's");
  NO_FORWARD(problem.output = HATTN_F32, HATTN_ERROR_DTYPE, "o", "f32", "bf16, f16, e4m3");
  NO_FORWARD(problem.output = 7, HATTN_ERROR_ARGUMENT, "output", ": 7;",
             "0, HATTN_F16 (1), HATTN_BF16 (2), HATTN_E4M3 (4)");
  NO_FORWARD(descale[0].dtype = 0, HATTN_ERROR_ARGUMENT, "descale_q", "dtype 0", "allowed: HATTN_F32 (3)");
  NO_FORWARD(stored[0].dtype = 0, HATTN_ERROR_ARGUMENT, "q", "dtype 0", "allowed: HATTN_E4M3 (4)");
  NO_FORWARD(problem.scaling = HATTN_PER_TENSOR, HATTN_ERROR_SHAPE, "descale_q", "[2, 4, 1]", "[1, 1, 1]");
  NO_FORWARD(problem.scaling = 3, HATTN_ERROR_ARGUMENT, "scaling", "3", "HATTN_PER_BLOCK (2)");
  NO_FORWARD(problem.amax = 2, HATTN_ERROR_ARGUMENT, "amax", "2", "1 (wanted)");
  NO_FORWARD(problem.half_scores = -1, HATTN_ERROR_ARGUMENT, "half_scores", "-1", "1 (wanted)");
  NO_FORWARD(descale[1].dtype = HATTN_F16, HATTN_ERROR_DTYPE, "descale_k", "f16", "f32");
  NO_FORWARD(descale[2].ndim = 4, HATTN_ERROR_ARGUMENT, "descale_v", "ndim 4", "[batch, heads, blocks]");
  NO_FORWARD(scale_o.ndim = 3, HATTN_ERROR_ARGUMENT, "scale_o", "ndim 3", "[number]");
  NO_FORWARD(amax.data = lse_values, HATTN_ERROR_LAYOUT, "amax", "which meet those of lse", "its own");
  NO_FORWARD(v_descale[1] = -1.0F, HATTN_ERROR_VALUE, "descale_v", "-1", "finite and 0 or more");
  v_descale[1] = 1.0F;
}

/* The same of the quantiser. */
#define NO_OPERANDS(spoilt, status, what, got, allowed)    \
  do {                                                     \
    memset(q_stored, POISON, sizeof(q_stored));            \
    spoilt;                                                \
    CHECK_STATUS(quantise(), (status), what);              \
    SAYS(what, got, allowed);                              \
    CHECK(q_stored[0] == POISON && q_stored[9] == POISON); \
    reset();                                               \
  } while (0)

/* Sizes inside of a field of structs that only FP8 has, and of arguments whose pointers to factors would be cut in two.
 */
static void a_size_inside_of_a_field_is_refused(void) {
  uint32_t size;
  char own[64];
  CHECK(quantise() == HATTN_OK);
  snprintf(own, sizeof(own), "%u (sizeof(", (unsigned)sizeof(args));
  for (size = 0; size < sizeof(args); ++size) {
    if (size >= 64 && size % 8 == 0) continue;
    NO_FORWARD(args.struct_size = size, HATTN_ERROR_ABI, "args", "allowed: 64, 72, 80, ", own);
  }
  for (size = 0; size < sizeof(quantising); ++size) {
    NO_OPERANDS(quantising.struct_size = size, HATTN_ERROR_ABI, "problem", "struct_size", "32 (sizeof(");
  }
  for (size = 0; size < sizeof(one[0]); ++size) {
    NO_OPERANDS(one[1].struct_size = size, HATTN_ERROR_ABI, "k", "struct_size", "40 (sizeof(");
  }
  for (size = 0; size < sizeof(quantise_args); ++size) {
    if (size >= 56 && size % 8 == 0) continue;
    NO_OPERANDS(quantise_args.struct_size = size, HATTN_ERROR_ABI, "args", "struct_size",
                "56, 64, 72, 80, 88 (sizeof(");
  }
}

static void what_cannot_be_quantised_is_refused(void) {
  hattn_quantize_plan* plan = NULL;
  NO_OPERANDS(quantising.forward = NULL, HATTN_ERROR_ARGUMENT, "forward", "a null pointer", "hattn_forward_problem");
  NO_OPERANDS(quantising.source = HATTN_E4M3, HATTN_ERROR_DTYPE, "source", "e4m3", "bf16, f16, f32");
  NO_OPERANDS(quantising.hadamard = 2, HATTN_ERROR_ARGUMENT, "hadamard", "2", "1 (wanted)");
  NO_OPERANDS(quantising.struct_size = 24, HATTN_ERROR_ABI, "problem", "struct_size 24", "32");
  problem.output = 0, problem.scaling = 0, problem.amax = 0;
  NO_OPERANDS(problem.dtype = HATTN_F16, HATTN_ERROR_DTYPE, "forward problem", "f16", "allowed: e4m3");
  problem.output = 0, problem.scaling = 0, problem.amax = 0;
  NO_OPERANDS(problem.dtype = 9, HATTN_ERROR_ARGUMENT, "dtype", "dtype: 9;", "allowed: HATTN_E4M3 (4)");
  NO_OPERANDS(quantising.source = 0, HATTN_ERROR_ARGUMENT, "source", "source: 0;",
              "HATTN_F16 (1), HATTN_BF16 (2), on the");
  NO_OPERANDS(values[0].device = -3, HATTN_ERROR_ARGUMENT, "q.values", "device -3", "HATTN_CPU (-1)");
  NO_OPERANDS(values[0].dtype = HATTN_F16, HATTN_ERROR_DTYPE, "q.values", "f16", "f32, the problem's");
  NO_OPERANDS(stored[1].dtype = HATTN_F16, HATTN_ERROR_DTYPE, "k.stored", "f16", "e4m3");
  NO_OPERANDS(one[2].descale = NULL, HATTN_ERROR_ARGUMENT, "v.descale", "a null pointer", "hattn_tensor");
  NO_OPERANDS(one[2].given = 5, HATTN_ERROR_ARGUMENT, "v.given", "5", "1 (given)");
  NO_OPERANDS(one[0].reserved = 1, HATTN_ERROR_ARGUMENT, "q", "reserved 0x1", "0");
  NO_OPERANDS(one[0].struct_size = 39, HATTN_ERROR_ABI, "q", "struct_size 39", "40");
  NO_OPERANDS(quantise_args.struct_size = 48, HATTN_ERROR_ABI, "args", "struct_size 48", "56");
  NO_OPERANDS(counts.shape[1] = 1, HATTN_ERROR_SHAPE, "counts", "[3, 1]", "[3, 2]");
  NO_OPERANDS(stored[0].stride[1] = 1, HATTN_ERROR_LAYOUT, "q.stored", "uses elements twice", "step over each other");
  NO_OPERANDS(stored[0].data = q_values, HATTN_ERROR_LAYOUT, "q.stored", "which meet those of q.values", "its own");
  one[0].given = 1;
  NO_OPERANDS(q_descale[0] = 0.0F, HATTN_ERROR_VALUE, "q.descale", "0 at [0, 0, 0]", "finite and above 0");
  CHECK(hattn_quantize_plan_create(&quantising, HATTN_CPU, NULL) == HATTN_ERROR_ARGUMENT);
  CHECK(hattn_quantize_plan_create(&quantising, HATTN_CPU, &plan) == HATTN_OK);
  CHECK(hattn_quantize_run(plan, NULL, NULL) == HATTN_ERROR_ARGUMENT);
  CHECK(hattn_quantize_run(NULL, &quantise_args, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("plan", "a null pointer", "hattn_quantize_plan_create");
  CHECK(hattn_quantize_plan_workspace_size(plan, NULL) == HATTN_ERROR_ARGUMENT);
  {
    char text[128];
    size_t length = 0;
    CHECK(hattn_quantize_plan_describe(plan, text, sizeof(text), &length) == HATTN_OK);
    CHECK_TEXT(text, "quantise f32 to e4m3 per-block: cpu, workspace 0 bytes");
    CHECK(length == strlen(text));
  }
  hattn_quantize_plan_destroy(plan);
  hattn_quantize_plan_destroy(NULL);
}

int main(void) {
  reset();
  RUN("fp8", operands_stand_for_the_values);
  RUN("fp8", what_is_given_saturates_and_is_counted);
  RUN("fp8", half_scores_make_q_and_k_small);
  RUN("fp8", outputs_are_those_of_what_operands_stand_for);
  RUN("fp8", what_does_not_fit_e4m3_operands_is_refused);
  RUN("fp8", a_size_inside_of_a_field_is_refused);
  RUN("fp8", what_cannot_be_quantised_is_refused);
  return check_result();
}
