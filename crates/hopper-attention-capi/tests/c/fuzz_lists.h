/* Lists of blocks, ALiBi slopes, biases and the state of dropout for the random calls of fuzz.c. C99. */
#ifndef HATTN_TESTS_FUZZ_LISTS_H
#define HATTN_TESTS_FUZZ_LISTS_H

#include "fuzz.h"

enum { BLOCK = 128, BLOCK_WORDS = 512, MOST_BLOCKS = 2 };

/* The tensors of the lists. NULL where there are none. */
typedef struct lists {
  hattn_tensor *counts, *indices, *bits, *full_counts, *full_indices;
} lists;

static int32_t* list_at(const hattn_tensor* t, int64_t b, int64_t h, int64_t row, int64_t last) {
  const int64_t at = b * t->stride[0] + h * t->stride[1] + row * t->stride[2];
  return (int32_t*)t->data + at + (t->ndim == 4 ? last * t->stride[3] : 0);
}

/* The bits of a partial block: none, some or all. */
static void put_bits(const hattn_tensor* bits, int64_t b, int64_t h, int64_t row, int64_t place) {
  const int64_t kind = below(4);
  int64_t word;
  for (word = 0; word < BLOCK_WORDS; ++word) {
    const uint32_t drawn = kind == 0 ? 0 : kind == 1 ? UINT32_MAX : (uint32_t)random_bits();
    memcpy(list_at(bits, b, h, row, place * BLOCK_WORDS + word), &drawn, sizeof(drawn));
  }
}

/* Lists for a problem of these flags, and their bits. A third of the blocks is hidden. */
static lists add_lists(hattn_block_mask flags, int64_t most, int64_t batch, int64_t heads, int64_t seqlen_q,
                       int64_t seqlen_kv) {
  const int64_t rows = (seqlen_q + BLOCK - 1) / BLOCK, columns = (seqlen_kv + BLOCK - 1) / BLOCK;
  const int has_full = (flags & HATTN_BLOCK_MASK_FULL_BLOCKS) != 0;
  lists made = {NULL, NULL, NULL, NULL, NULL};
  int64_t b, h, row, i;
  if (flags == HATTN_BLOCK_MASK_NONE) return made;
  if ((flags & HATTN_BLOCK_MASK_PER_BATCH) == 0) batch = 1;
  if ((flags & HATTN_BLOCK_MASK_PER_HEAD) == 0) heads = 1;
  if (columns > MOST_BLOCKS) abort(); /* a mistake of this test */
  /* As factors: no element is another one, too. All of them are written below. */
  made.counts = add_tensor(FACTOR, HATTN_I32, 3, batch, heads, rows, 0);
  made.indices = add_tensor(FACTOR, HATTN_I32, 4, batch, heads, rows, columns);
  made.bits = add_tensor(FACTOR, HATTN_I32, 4, batch, heads, rows, most * BLOCK_WORDS);
  if (has_full) {
    made.full_counts = add_tensor(FACTOR, HATTN_I32, 3, batch, heads, rows, 0);
    made.full_indices = add_tensor(FACTOR, HATTN_I32, 4, batch, heads, rows, columns);
  }
  for (b = 0; b < batch; ++b) {
    for (h = 0; h < heads; ++h) {
      for (row = 0; row < rows; ++row) {
        const int64_t first = below(2);
        int32_t partial = 0, full = 0;
        for (i = 0; i < columns; ++i) {
          /* In any order. */
          const int32_t block = (int32_t)((i + first) % columns);
          const int64_t kind = below(3);
          if (kind == 1 && has_full) *list_at(made.full_indices, b, h, row, full++) = block;
          if (kind == 2 && partial < most) {
            put_bits(made.bits, b, h, row, partial);
            *list_at(made.indices, b, h, row, partial++) = block;
          }
        }
        /* Nobody reads what is past a list's end. */
        for (i = partial; i < columns; ++i) *list_at(made.indices, b, h, row, i) = (int32_t)random_bits();
        for (i = full; i < columns && has_full; ++i) *list_at(made.full_indices, b, h, row, i) = (int32_t)random_bits();
        for (i = partial; i < most; ++i) put_bits(made.bits, b, h, row, i);
        *list_at(made.counts, b, h, row, 0) = partial;
        if (has_full) *list_at(made.full_counts, b, h, row, 0) = full;
      }
    }
  }
  return made;
}

/* Slopes, of both signs. NULL where there are none. They are small, so that f32 scores stay exact. */
static hattn_tensor* add_slopes(hattn_alibi alibi, int64_t batch, int64_t heads) {
  const int per_batch = alibi == HATTN_ALIBI_PER_BATCH;
  hattn_tensor* made;
  int64_t b, h;
  if (alibi == HATTN_ALIBI_NONE) return NULL;
  made = per_batch ? add_tensor(FACTOR, HATTN_F32, 2, batch, heads, 0, 0)
                   : add_tensor(FACTOR, HATTN_F32, 1, heads, 0, 0, 0);
  for (b = 0; b < (per_batch ? batch : 1); ++b) {
    for (h = 0; h < heads; ++h) {
      const float slope = (float)(below(17) - 8) / 16.0F;
      const int64_t at = per_batch ? b * made->stride[0] + h * made->stride[1] : h * made->stride[0];
      memcpy((float*)made->data + at, &slope, sizeof(slope));
    }
  }
  return made;
}

/* A bias or its gradient. */
static hattn_tensor* add_bias_tensor(use of, hattn_dtype dtype, hattn_bias_dims dims, int64_t batch, int64_t heads,
                                     int64_t seqlen_q, int64_t seqlen_kv) {
  if ((dims & HATTN_BIAS_PER_BATCH) == 0) batch = 1;
  if ((dims & HATTN_BIAS_PER_HEAD) == 0) heads = 1;
  if ((dims & HATTN_BIAS_PER_QUERY) == 0) seqlen_q = 1;
  return add_tensor(of, dtype, 4, batch, heads, seqlen_q, seqlen_kv);
}

/* -infinity in one element of so many. */
static void hide_some(const hattn_tensor* t, unsigned char* at, void* to) {
  static const uint32_t f32 = 0xff800000U;
  const uint16_t narrow = t->dtype == HATTN_F16 ? 0xfc00U : 0xff80U;
  if (!one_in(*(const int64_t*)to)) return;
  memcpy(at, t->dtype == HATTN_F32 ? (const void*)&f32 : (const void*)&narrow, (size_t)bytes_of(t->dtype));
}

/* A bias. Half of them hide pairs: some, or nearly all, so that rows are left without keys. NULL without a type. */
static hattn_tensor* add_bias(hattn_dtype dtype, hattn_bias_dims dims, int64_t batch, int64_t heads, int64_t seqlen_q,
                              int64_t seqlen_kv) {
  int64_t often = one_in(4) ? 1 : 4;
  hattn_tensor* made;
  if (dtype == 0) return NULL;
  made = add_bias_tensor(READ, dtype, dims, batch, heads, seqlen_q, seqlen_kv);
  if (one_in(2)) each_element(made, hide_some, &often);
  return made;
}

/* Any seed and offset. NULL without dropout. */
static hattn_tensor* add_state(float dropout) {
  hattn_tensor* made;
  uint64_t words[2];
  if (dropout == 0.0F) return NULL;
  made = add_tensor(FACTOR, HATTN_I32, 1, 4, 0, 0, 0);
  words[0] = random_bits(), words[1] = random_bits();
  memcpy(made->data, words, sizeof(words));
  return made;
}

/* Another number in a list. Lists may hold anything. */
static void spoil_list(const hattn_tensor* t) {
  int64_t at[4] = {0, 0, 0, 0};
  int32_t value = (int32_t)nasty(0);
  int axis;
  if (t == NULL) return;
  for (axis = 0; axis < t->ndim; ++axis) {
    if (t->shape[axis] == 0) return;
    at[axis] = below(t->shape[axis]);
  }
  *list_at(t, at[0], at[1], at[2], at[3]) = value;
}

#endif
