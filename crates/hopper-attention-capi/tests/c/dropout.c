/* hattn_dropout_mask: known answers, how the mask lies in memory, and what is refused. */
#include <hopper_attention_lists.h>
#include <stdlib.h>

#include "errors.h"

/* Whether a pair is kept, where so many of 32768 weights are dropped. */
static int keeps(int dropped, uint64_t seed, uint64_t offset, int64_t heads, const int64_t pair[4]) {
  const int64_t batch = pair[0] + 1, queries = pair[2] + 1, keys = pair[3] + 1;
  const size_t bytes = (size_t)(batch * heads * queries * keys);
  const size_t at = (size_t)(((pair[0] * heads + pair[1]) * queries + pair[2]) * keys + pair[3]);
  uint8_t* keep = malloc(bytes);
  int kept = -1;
  if (keep != NULL) {
    memset(keep, 9, bytes);
    CHECK(hattn_dropout_mask((float)dropped / 32768.0F, seed, offset, batch, heads, queries, keys, keep, bytes) ==
          HATTN_OK);
    kept = keep[at];
  }
  free(keep);
  return kept;
}

/* The numbers behind the decisions, as in the tests of the library: a pair is dropped from the next number on. */
static void known_answers(void) {
  static const int64_t pairs[4][4] = {{0, 0, 0, 0}, {0, 0, 8, 0}, {1, 4, 37, 1001}, {3, 1, 16, 32}};
  static const int numbers[4] = {14089, 24431, 10359, 27414};
  static const uint64_t seeds[4] = {0, 0, UINT64_C(0x0123456789abcdef), 42};
  static const uint64_t offsets[4] = {0, 0, UINT64_C(0xfedcba9876543210), 7};
  static const int64_t heads[4] = {1, 1, 6, 2};
  int i;
  for (i = 0; i < 4; ++i) {
    CHECK(keeps(numbers[i], seeds[i], offsets[i], heads[i], pairs[i]) == 1);
    CHECK(keeps(numbers[i] + 1, seeds[i], offsets[i], heads[i], pairs[i]) == 0);
  }
}

static void a_probability_of_0_keeps_all(void) {
  uint8_t keep[24], i;
  memset(keep, 9, sizeof(keep));
  CHECK(hattn_dropout_mask(0.0F, 1, 2, 2, 1, 3, 4, keep, sizeof(keep)) == HATTN_OK);
  for (i = 0; i < 24; ++i) CHECK(keep[i] == 1);
}

static void no_pairs_need_no_memory(void) {
  CHECK(hattn_dropout_mask(0.5F, 1, 2, 2, 0, 3, INT64_MAX, NULL, 0) == HATTN_OK);
}

static void what_is_no_mask_is_refused(void) {
  uint8_t keep[24], before[24];
  memset(keep, 9, sizeof(keep));
  memcpy(before, keep, sizeof(keep));
  CHECK(hattn_dropout_mask(1.0F, 1, 2, 2, 1, 3, 4, keep, 24) == HATTN_ERROR_VALUE);
  CHECK_TEXT(hattn_last_error(), "dropout");
  CHECK(hattn_dropout_mask(0.5F, 1, 2, -2, 1, 3, 4, keep, 24) == HATTN_ERROR_VALUE);
  CHECK_TEXT(hattn_last_error(), "batch: -2; allowed: 0 and above");
  CHECK(hattn_dropout_mask(0.5F, 1, 2, 2, INT64_MAX, 3, 4, keep, 24) == HATTN_ERROR_VALUE);
  CHECK_TEXT(hattn_last_error(), "below 2^63 pairs");
  CHECK(hattn_dropout_mask(0.5F, 1, 2, 2, 1, 3, 4, keep, 23) == HATTN_ERROR_ARGUMENT);
  CHECK_TEXT(hattn_last_error(), "bytes: 23; allowed: 24");
  CHECK(hattn_dropout_mask(0.5F, 1, 2, 2, 1, 3, 4, NULL, 24) == HATTN_ERROR_ARGUMENT);
  CHECK_TEXT(hattn_last_error(), "keep: null");
  CHECK(memcmp(keep, before, sizeof(keep)) == 0);
}

int main(void) {
  RUN("dropout", known_answers);
  RUN("dropout", a_probability_of_0_keeps_all);
  RUN("dropout", no_pairs_need_no_memory);
  RUN("dropout", what_is_no_mask_is_refused);
  return check_result();
}
