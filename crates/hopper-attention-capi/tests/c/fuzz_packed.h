/* Packed sequences and used lengths for the random calls of fuzz.c. C99. */
#ifndef HATTN_TESTS_FUZZ_PACKED_H
#define HATTN_TESTS_FUZZ_PACKED_H

#include "fuzz_lists.h"
#include "reference_packed.h"

enum { MOST_SEQUENCES = 4, MOST_ROWS = 9, LONG_ROWS = 150 };

/* One side of a call: its numbers, and the lists once they are tensors. */
typedef struct side {
  int is_packed, has_used;
  int32_t offsets[MOST_SEQUENCES + 1], used[MOST_SEQUENCES];
  int64_t longest, hint;
  hattn_tensor *cu_seqlens, *seqused;
} side;

static side sides[2]; /* of Q; of K and V */

static int has_lengths(void) {
  return sides[0].is_packed || sides[0].has_used || sides[1].is_packed || sides[1].has_used;
}

/* Draws the lists of a side of so many sequences. rows becomes the number of rows of a packed tensor. */
static void draw_side(int of, int64_t batch, int64_t* rows, int is_long) {
  side* const s = &sides[of];
  int64_t i;
  s->is_packed = one_in(2), s->has_used = one_in(2);
  /* Rows before the first sequence and behind the last one. */
  s->offsets[0] = one_in(3) ? (int32_t)below(4) : 0;
  s->longest = 0;
  for (i = 0; i < batch; ++i) {
    int64_t length = s->is_packed ? (one_in(5) ? 0 : below(is_long ? LONG_ROWS : MOST_ROWS)) : *rows;
    s->offsets[i + 1] = s->offsets[i] + (int32_t)length;
    s->used[i] = (int32_t)below(length + 1);
    if (s->has_used) length = s->used[i];
    if (length > s->longest) s->longest = length;
  }
  if (s->is_packed) *rows = s->offsets[batch] + (one_in(3) ? below(4) : 0);
  s->hint = 0;
  /* A hint may be wrong. */
  if ((s->is_packed || s->has_used) && one_in(2)) {
    s->hint = one_in(2) ? s->longest : one_in(2) ? below(12) : INT64_MAX - below(3);
  }
}

/* A list. As a factor: no element is another one, too. */
static hattn_tensor* add_list(const int32_t* numbers, int64_t count) {
  hattn_tensor* const made = add_tensor(FACTOR, HATTN_I32, 1, count, 0, 0, 0);
  if (count > 0) memcpy(made->data, numbers, (size_t)count * sizeof(*numbers));
  return made;
}

static void add_side(int of, int64_t batch) {
  side* const s = &sides[of];
  if (s->is_packed) s->cu_seqlens = add_list(s->offsets, batch + 1);
  if (s->has_used) s->seqused = add_list(s->used, batch);
}

/* A tensor with rows of queries or keys: [batch, rows, heads, dim], or [rows, heads, dim] where they are packed. */
static hattn_tensor* add_rows(use of, hattn_dtype dtype, int is_packed, int64_t batch, int64_t rows, int64_t heads,
                              int64_t dim) {
  return is_packed ? add_tensor(of, dtype, 3, rows, heads, dim, 0) : add_tensor(of, dtype, 4, batch, rows, heads, dim);
}

/* A log-sum-exp or its gradient: [batch, heads, rows], or [heads, rows]. */
static hattn_tensor* add_row_values(use of, int is_packed, int64_t batch, int64_t heads, int64_t rows) {
  return is_packed ? add_tensor(of, HATTN_F32, 2, heads, rows, 0, 0)
                   : add_tensor(of, HATTN_F32, 3, batch, heads, rows, 0);
}

/* The lists of the call, as reference_packed.h takes them. */
static reference_lengths lists_of_lengths(void) {
  const reference_lengths given = {{sides[0].cu_seqlens, sides[1].cu_seqlens}, {sides[0].seqused, sides[1].seqused}};
  return given;
}

/* Calls `with` for each element in rows of sequences: of all elements where there are no lists. axis is that of the
   rows beside a batch. Does nothing without a tensor. */
static void each_of_sequences(const hattn_forward_problem* p, const hattn_tensor* t, int of, int axis,
                              void (*with)(const hattn_tensor* t, unsigned char* at, void* to), void* to) {
  const reference_lengths lengths = lists_of_lengths();
  int64_t s;
  if (t == NULL) return;
  if (!has_lengths()) each_element(t, with, to);
  for (s = 0; s < p->batch && has_lengths(); ++s) {
    const hattn_tensor part = reference_part(t, reference_rows_of(p, &lengths, of, s), axis);
    each_element(&part, with, to);
  }
}

static void put_nan(const hattn_tensor* t, unsigned char* at, void* to) {
  (void)to;
  memset(at, 0xFF, (size_t)bytes_of(t->dtype)); /* a NaN of every type */
}

static void put_any(const hattn_tensor* t, unsigned char* at, void* to) {
  (void)to;
  put_number(at, t->dtype, 0);
}

/* Makes NaN of an input where it belongs to no sequence. (Elements that several rows share stay numbers.) */
static void hide_gaps(const hattn_forward_problem* p, const hattn_tensor* t, int of, int axis) {
  if (t == NULL || !has_lengths()) return;
  each_element(t, put_nan, NULL);
  each_of_sequences(p, t, of, axis, put_any, NULL);
}

/* Other numbers in a list: one, or all of them. */
static void spoil_lengths(void) {
  const side* const s = &sides[below(2)];
  const hattn_tensor* const list = one_in(2) ? s->cu_seqlens : s->seqused;
  int64_t i = list != NULL && one_in(4) ? 8 : 1;
  for (; i > 0; --i) spoil_list(list);
}

/* What all elements that no sequence has must be. seen has a flag for each byte of memory. */
typedef struct gap {
  const unsigned char* seen;
  double filled;
  int is_right;
} gap;

static void is_filled(const hattn_tensor* t, unsigned char* at, void* to) {
  gap* const g = (gap*)to;
  if (!g->seen[at - memory] && number_at(at, t->dtype) != g->filled) g->is_right = 0;
}

static void see(const hattn_tensor* t, unsigned char* at, void* to) {
  memset((unsigned char*)to + (at - memory), 1, (size_t)bytes_of(t->dtype));
}

/* Whether an output is `filled` where it belongs to no sequence. */
static int gaps_are(const hattn_forward_problem* p, const hattn_tensor* t, int of, int axis, double filled) {
  static unsigned char seen[MEMORY];
  gap g = {seen, filled, 1};
  if (t == NULL) return 1;
  memset(seen, 0, (size_t)used);
  each_of_sequences(p, t, of, axis, see, seen);
  each_element(t, is_filled, &g);
  return g.is_right;
}

#endif
