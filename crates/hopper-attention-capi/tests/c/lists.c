/* Lists of blocks that the library makes: what they hold, that attention uses them, and what is refused. C99.
   tests/tests/capi_lists.rs at the root compares more of them. */
#include <hopper_attention_lists.h>

#include "errors.h"

enum { LISTED_Q = 130, LISTED_KV = 260, WORDS = 512 };

/* Whether lists of one batch entry and head keep a pair. */
static int keeps(const hattn_block_arrays* of, int64_t query, int64_t key) {
  const int64_t row = query / 128, block = key / 128, columns = of->shape[3];
  int32_t i;
  for (i = 0; i < of->full_block_cnt[row]; ++i) {
    if (of->full_block_idx[row * columns + i] == block) return 1;
  }
  for (i = 0; i < of->mask_block_cnt[row]; ++i) {
    const int64_t word = row * of->bits_shape[3] + i * WORDS + query % 128 * 4 + key % 128 / 32;
    if (of->mask_block_idx[row * columns + i] == block) return (int)((uint32_t)of->mask_bits[word] >> key % 32 & 1);
  }
  return 0;
}

/* Lists of one batch entry and head keep what `wanted` says. Frees them. */
static void check_lists(hattn_block_lists* lists, int (*wanted)(int64_t, int64_t)) {
  hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;
  int64_t query, key, wrong = 0;
  CHECK(hattn_block_lists_arrays(lists, &arrays) == HATTN_OK);
  CHECK(arrays.block_mask == (HATTN_BLOCK_MASK_LISTS | HATTN_BLOCK_MASK_FULL_BLOCKS));
  CHECK(arrays.shape[0] == 1 && arrays.shape[1] == 1 && arrays.shape[2] == 2 && arrays.shape[3] == 3);
  CHECK(arrays.cnt_elements == 2 && arrays.idx_elements == 6);
  CHECK(arrays.bits_shape[3] == WORDS * arrays.block_mask_most_partial);
  CHECK(arrays.bits_elements == 2 * arrays.bits_shape[3]);
  for (query = 0; query < LISTED_Q && !check_broken; ++query) {
    for (key = 0; key < LISTED_KV; ++key) wrong += keeps(&arrays, query, key) != wanted(query, key);
  }
  CHECK(wrong == 0);
  hattn_block_lists_destroy(lists);
}

/* The first 128 queries see the first 140 keys. The others see the last ones, causally. */
static const int32_t q_ranges[] = {0, 128, 128, 130}, k_ranges[] = {0, 140, 200, 260}, types[] = {0, 1};

static hattn_slices two_slices(void) {
  hattn_slices slices = HATTN_SLICES_INIT;
  slices.seqlen_q = LISTED_Q, slices.seqlen_kv = LISTED_KV, slices.count = 2;
  slices.q_ranges = q_ranges, slices.k_ranges = k_ranges, slices.types = types;
  return slices;
}

static int of_slices(int64_t query, int64_t key) {
  return query < 128 ? key < 140 : key >= 200 && key - 260 <= query - 130;
}

static void slices(void) {
  const hattn_slices given = two_slices();
  hattn_block_lists* lists = NULL;
  CHECK(hattn_block_lists_from_slices(&given, &lists) == HATTN_OK);
  check_lists(lists, of_slices);
}

static int of_documents(int64_t query, int64_t key) { return query / 70 == key / 70; }

static void documents(void) {
  int32_t ids[LISTED_KV];
  hattn_documents given = HATTN_DOCUMENTS_INIT;
  hattn_block_lists* lists = NULL;
  int i;
  for (i = 0; i < LISTED_KV; ++i) ids[i] = i / 70;
  given.batch = 1, given.seqlen_q = LISTED_Q, given.seqlen_kv = LISTED_KV;
  given.q_ids = given.kv_ids = ids;
  CHECK(hattn_block_lists_from_documents(&given, &lists) == HATTN_OK);
  check_lists(lists, of_documents);
}

static int of_prefix(int64_t query, int64_t key) { return key < 200 || key <= query + 130; }

static void prefixes(void) {
  static const int32_t length = 200;
  hattn_prefixes given = HATTN_PREFIXES_INIT;
  hattn_block_lists* lists = NULL;
  given.batch = 1, given.seqlen_q = LISTED_Q, given.seqlen_kv = LISTED_KV;
  given.prefixes = &length, given.mask = HATTN_MASK_CAUSAL;
  CHECK(hattn_block_lists_from_prefixes(&given, &lists) == HATTN_OK);
  check_lists(lists, of_prefix);
}

/* The second span begins where query 60 stands. */
static int of_spans(int64_t query, int64_t key) {
  const int64_t own = query + 130;
  return (key <= own || (own >= 190 && key >= 190)) && key >= own - 150;
}

static void spans(void) {
  static const int32_t count = 2, ends[] = {0, 40, 190, 260};
  hattn_spans given = HATTN_SPANS_INIT;
  hattn_block_lists* lists = NULL;
  given.batch = 1, given.seqlen_q = LISTED_Q, given.seqlen_kv = LISTED_KV;
  given.counts = &count, given.spans = ends, given.mask = HATTN_MASK_CAUSAL;
  given.within = HATTN_MASK_WINDOW, given.within_left = 150, given.within_right = HATTN_UNBOUNDED;
  CHECK(hattn_block_lists_from_spans(&given, &lists) == HATTN_OK);
  check_lists(lists, of_spans);
}

static int of_dense_mask(int64_t query, int64_t key) { return key < 128 || (query * 7 + key * 3) % 5 == 0; }

static void dense_masks(void) {
  static uint8_t kept[LISTED_Q * LISTED_KV];
  hattn_dense_mask given = HATTN_DENSE_MASK_INIT;
  hattn_block_lists* lists = NULL;
  int i;
  for (i = 0; i < LISTED_Q * LISTED_KV; ++i) kept[i] = (uint8_t)of_dense_mask(i / LISTED_KV, i % LISTED_KV);
  given.batch = given.heads_q = 1, given.seqlen_q = LISTED_Q, given.seqlen_kv = LISTED_KV, given.kept = kept;
  CHECK(hattn_block_lists_from_dense_mask(&given, &lists) == HATTN_OK);
  check_lists(lists, of_dense_mask);
}

/* A list as a tensor. */
static hattn_tensor listed(const int32_t* data, int32_t ndim, const int64_t shape[4]) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = (void*)(uintptr_t)data; /* read only */
  made.dtype = HATTN_I32, made.device = HATTN_CPU, made.ndim = ndim;
  memcpy(made.shape, shape, sizeof(made.shape));
  CHECK(hattn_tensor_contiguous(&made) == HATTN_OK);
  return made;
}

static void attention_uses_them(void) {
  static float q_data[LISTED_Q * 8], kv_data[LISTED_KV * 8], o_data[LISTED_Q * 8];
  const hattn_slices given = two_slices();
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;
  hattn_tensor q = tensor(q_data, 1, LISTED_Q, 1, 8), kv = tensor(kv_data, 1, LISTED_KV, 1, 8);
  hattn_tensor o = tensor(o_data, 1, LISTED_Q, 1, 8), cnt, idx, bits, full_cnt, full_idx;
  hattn_block_lists* lists = NULL;
  hattn_forward_plan* plan = NULL;
  CHECK(hattn_block_lists_from_slices(&given, &lists) == HATTN_OK);
  CHECK(hattn_block_lists_arrays(lists, &arrays) == HATTN_OK);
  reference_fill(q_data, LISTED_Q * 8, 1), reference_fill(kv_data, LISTED_KV * 8, 2);
  problem.dtype = HATTN_F32, problem.batch = 1, problem.seqlen_q = LISTED_Q, problem.seqlen_kv = LISTED_KV;
  problem.heads_q = problem.heads_kv = 1, problem.head_dim_qk = problem.head_dim_vo = 8;
  problem.block_mask = arrays.block_mask, problem.block_mask_most_partial = arrays.block_mask_most_partial;
  cnt = listed(arrays.mask_block_cnt, 3, arrays.shape), idx = listed(arrays.mask_block_idx, 4, arrays.shape);
  bits = listed(arrays.mask_bits, 4, arrays.bits_shape);
  full_cnt = listed(arrays.full_block_cnt, 3, arrays.shape), full_idx = listed(arrays.full_block_idx, 4, arrays.shape);
  args.q = &q, args.k = args.v = &kv, args.o = &o;
  args.mask_block_cnt = &cnt, args.mask_block_idx = &idx, args.mask_bits = &bits;
  args.full_block_cnt = &full_cnt, args.full_block_idx = &full_idx;
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &plan) == HATTN_OK);
  CHECK(hattn_forward_run(plan, &args, NULL) == HATTN_OK);
  reference_given.counts = &cnt, reference_given.indices = &idx, reference_given.bits = &bits;
  reference_given.full_counts = &full_cnt, reference_given.full_indices = &full_idx;
  CHECK(reference_distance(&problem, &args) < 1e-5);
  hattn_forward_plan_destroy(plan);
  hattn_block_lists_destroy(lists);
}

/* What is spoilt of two slices is refused, and no lists come of it. */
#define NO_LISTS(spoilt, status, what, got, allowed)                          \
  do {                                                                        \
    hattn_slices given = two_slices();                                        \
    hattn_block_lists* none = (hattn_block_lists*)(void*)&given;              \
    spoilt;                                                                   \
    CHECK_STATUS(hattn_block_lists_from_slices(&given, &none), status, what); \
    CHECK(none == NULL);                                                      \
    SAYS(what, got, allowed);                                                 \
  } while (0)

static void what_is_wrong_is_refused(void) {
  static const int32_t twice[] = {0, 128, 100, 130}, past[] = {0, 140, 200, 261}, wrong_types[] = {0, 4};
  const hattn_slices right_slices = two_slices();
  hattn_documents no_ids = HATTN_DOCUMENTS_INIT;
  hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;
  hattn_block_lists* lists = NULL;
  NO_LISTS((given.q_ranges = twice, given.k_ranges = twice), HATTN_ERROR_VALUE, "slices", "slice 0 (full queries",
           "slices that have no pair in common");
  NO_LISTS(given.k_ranges = past, HATTN_ERROR_VALUE, "slices", "keys 200 to 261 of slice 1", "0 to 260");
  NO_LISTS(given.types = wrong_types, HATTN_ERROR_VALUE, "types", "4 of slice 1", "3 (both)");
  NO_LISTS(given.types = NULL, HATTN_ERROR_ARGUMENT, "types", "null", "an array [2]");
  NO_LISTS(given.count = -2, HATTN_ERROR_VALUE, "count", "-2", "0 and above");
  NO_LISTS(given.seqlen_q = HATTN_UNSET, HATTN_ERROR_VALUE, "seqlen_q", "HATTN_UNSET", "0 and above");
  NO_LISTS(given.struct_size = 8, HATTN_ERROR_ABI, "slices", "struct_size 8", "56 (sizeof(hattn_slices))");
  no_ids.batch = no_ids.seqlen_q = 1, no_ids.seqlen_kv = 0;
  CHECK(hattn_block_lists_from_documents(&no_ids, &lists) == HATTN_ERROR_ARGUMENT && lists == NULL);
  SAYS("q_ids", "null", "an array [1, 1]");
  CHECK(hattn_block_lists_from_slices(&right_slices, NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("lists", "null", "where to write the lists");
  CHECK(hattn_block_lists_arrays(NULL, &arrays) == HATTN_ERROR_ARGUMENT);
  SAYS("lists", "null", "hattn_block_lists_from_slices");
  /* Nothing to list: arrays may be null. */
  no_ids.seqlen_q = 0;
  CHECK(hattn_block_lists_from_documents(&no_ids, &lists) == HATTN_OK);
  CHECK(hattn_block_lists_arrays(lists, NULL) == HATTN_ERROR_ARGUMENT);
  CHECK(hattn_block_lists_arrays(lists, &arrays) == HATTN_OK && arrays.cnt_elements == 0 && arrays.bits_elements == 0);
  hattn_block_lists_destroy(lists);
  hattn_block_lists_destroy(NULL);
}

int main(void) {
  RUN("lists", slices);
  RUN("lists", documents);
  RUN("lists", prefixes);
  RUN("lists", spans);
  RUN("lists", dense_masks);
  RUN("lists", attention_uses_them);
  RUN("lists", what_is_wrong_is_refused);
  return check_result();
}
