/* What a random call of fuzz.c is made of: random numbers, the structs and the memory that the call hands over, and
   ways to spoil them. C99.

   Tensors lie in one block of memory, with gaps of a known pattern between them. Each struct lies in a slot of 4352
   bytes, since the library may read as many bytes as a spoilt struct_size says. */
#ifndef HATTN_TESTS_FUZZ_H
#define HATTN_TESTS_FUZZ_H

#include <hopper_attention.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"

enum { MEMORY = 1 << 20, GUARD = 64, SLOT = 4352, SLOTS = 24, POISON = 0xA5 };

/* -- random numbers */

static uint64_t random_state;

/* SplitMix64. */
static uint64_t random_bits(void) {
  uint64_t z = random_state += 0x9e3779b97f4a7c15U;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  return z ^ z >> 31;
}

/* From 0 to count - 1. */
static int64_t below(int64_t count) { return (int64_t)(random_bits() % (uint64_t)count); }
static int one_in(int64_t count) { return below(count) == 0; }

/* Each call has random numbers of its own, so that it can be made again alone. */
static void seed_call(uint64_t seed, uint64_t number) {
  random_state = seed * 0x2545f4914f6cdd1dU + number;
  random_state = random_bits();
}

/* -- structs */

typedef union slot {
  uint64_t aligned;
  unsigned char bytes[SLOT];
  hattn_tensor tensor;
} slot;

static slot slots[SLOTS];
static const char* types[SLOTS];  /* the name of the struct in each slot */
static hattn_tensor right[SLOTS]; /* the tensors, before they were spoilt */
static int slot_count;

/* A slot with a struct. What lies behind the struct is 0, or not. */
static void* enter(const char* type, const void* value, size_t size) {
  slot* const free_slot = &slots[slot_count];
  if (slot_count >= SLOTS) abort(); /* a mistake of this test */
  memset(free_slot->bytes, one_in(4) ? POISON : 0, SLOT);
  memcpy(free_slot->bytes, value, size);
  types[slot_count++] = type;
  return free_slot;
}

/* -- memory */

static unsigned char memory[MEMORY], before[MEMORY], may_change[MEMORY];
static int64_t used; /* bytes of memory that the call's tensors and gaps take */

static int64_t bytes_of(hattn_dtype dtype) {
  switch (dtype) {
    case HATTN_F32:
    case HATTN_I32:
      return 4;
    case HATTN_F16:
    case HATTN_BF16:
      return 2;
    case HATTN_E4M3:
      return 1;
    default:
      return 0;
  }
}

/* From the first to the last element. -1 where that is more than the memory has. */
static int64_t span_of(const hattn_tensor* t) {
  int64_t last = 0;
  int axis;
  for (axis = 0; axis < t->ndim; ++axis) {
    if (t->shape[axis] == 0) return 0;
  }
  for (axis = 0; axis < t->ndim; ++axis) {
    if (t->shape[axis] == 1) continue;
    if (t->shape[axis] > MEMORY || t->stride[axis] > MEMORY) return -1;
    last += (t->shape[axis] - 1) * t->stride[axis];
    if (last >= MEMORY) return -1;
  }
  return last + 1;
}

/* A number from 2^-5 to 2 in magnitude, in any type. The exponent is random, so are the other bits. */
static void put_number(unsigned char* at, hattn_dtype dtype, int positive) {
  const uint32_t sign = positive ? 0 : (uint32_t)below(2);
  const uint32_t exponent = (uint32_t)below(6), bits = (uint32_t)random_bits();
  const uint32_t f32 = sign << 31 | (122 + exponent) << 23 | (bits & 0x7fffff);
  const uint16_t f16 = (uint16_t)(sign << 15 | (10 + exponent) << 10 | (bits & 0x3ff)), bf16 = (uint16_t)(f32 >> 16);
  const uint8_t e4m3 = (uint8_t)(sign << 7 | (2 + exponent) << 3 | (bits & 7));
  switch (dtype) {
    case HATTN_F32:
      memcpy(at, &f32, 4);
      break;
    case HATTN_F16:
      memcpy(at, &f16, 2);
      break;
    case HATTN_BF16:
      memcpy(at, &bf16, 2);
      break;
    default:
      *at = e4m3;
  }
}

static double number_at(const unsigned char* at, hattn_dtype dtype) {
  uint32_t bits = 0, exponent, mantissa, width;
  float value;
  memcpy(&bits, at, (size_t)bytes_of(dtype)); /* little-endian */
  if (dtype == HATTN_F32 || dtype == HATTN_BF16) {
    if (dtype == HATTN_BF16) bits <<= 16;
    memcpy(&value, &bits, 4);
    return (double)value;
  }
  width = dtype == HATTN_F16 ? 10 : 3;
  mantissa = bits & ((1U << width) - 1);
  exponent = bits >> width & (dtype == HATTN_F16 ? 31 : 15);
  if (dtype == HATTN_F16 ? exponent == 31 : (bits & 0x7f) == 0x7f) return NAN; /* or infinity */
  value = exponent == 0 ? (float)mantissa : (float)(mantissa + (1U << width));
  value = ldexpf(value, (int)(exponent == 0 ? 1 : exponent) - (dtype == HATTN_F16 ? 15 : 7) - (int)width);
  return bits >> (dtype == HATTN_F16 ? 15 : 7) & 1 ? (double)-value : (double)value;
}

/* Calls `with` for each element of a tensor of up to four dimensions. */
static void each_element(const hattn_tensor* t, void (*with)(const hattn_tensor* t, unsigned char* at, void* to),
                         void* to) {
  int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0}, i[4];
  int axis;
  for (axis = 0; axis < t->ndim; ++axis) shape[axis] = t->shape[axis], stride[axis] = t->stride[axis];
  for (i[0] = 0; i[0] < shape[0]; ++i[0]) {
    for (i[1] = 0; i[1] < shape[1]; ++i[1]) {
      for (i[2] = 0; i[2] < shape[2]; ++i[2]) {
        for (i[3] = 0; i[3] < shape[3]; ++i[3]) {
          const int64_t offset = i[0] * stride[0] + i[1] * stride[1] + i[2] * stride[2] + i[3] * stride[3];
          with(t, (unsigned char*)t->data + offset * bytes_of(t->dtype), to);
        }
      }
    }
  }
}

/* What a pass does to a tensor. A factor is read, and above 0. A result of another pass is read, and written by that.
 */
typedef enum use { READ, FACTOR, RESULT, WRITTEN } use;

/* A tensor of the CPU in memory of its own: any order of the outer dimensions, with gaps, at an address that is aligned
   to its elements only. A tensor that is read may repeat elements (stride 0). */
static hattn_tensor* add_tensor(use of, hattn_dtype dtype, int rank, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  const int64_t size = bytes_of(dtype);
  int64_t step = shape[rank - 1] + below(3), span, i;
  int todo = rank - 1, axis;
  hattn_tensor made = HATTN_TENSOR_INIT, *entered;
  made.dtype = dtype;
  made.device = HATTN_CPU;
  made.ndim = rank;
  for (axis = 0; axis < 4; ++axis) made.shape[axis] = axis < rank ? shape[axis] : below(3), made.stride[axis] = 0;
  made.stride[rank - 1] = 1;
  if (step < 1) step = 1;
  while (todo > 0) {
    axis = (int)below(rank - 1);
    if (made.stride[axis] != 0) continue;
    made.stride[axis] = step;
    step = step * (shape[axis] > 0 ? shape[axis] : 1) + below(3);
    --todo;
  }
  for (axis = 0; axis + 1 < rank; ++axis) {
    /* In a dimension of size 1 the stride is not used. */
    if (shape[axis] == 1 && one_in(8)) made.stride[axis] = INT64_MAX - below(2);
    if (of == READ && one_in(16)) made.stride[axis] = 0;
  }
  used += GUARD + below(16);
  used += (size - used % size) % size;
  made.data = memory + used;
  span = span_of(&made);
  used += (span > 0 ? span * size : 0) + GUARD;
  if (span < 0 || used > MEMORY - 4096) abort(); /* a mistake of this test */
  for (i = 0; i < span && of != WRITTEN; ++i) put_number((unsigned char*)made.data + i * size, dtype, of == FACTOR);
  if (span == 0 && one_in(2)) made.data = NULL;
  entered = (hattn_tensor*)enter("hattn_tensor", &made, sizeof(made));
  right[slot_count - 1] = made;
  return entered;
}

/* -- spoiling */

typedef struct field {
  const char *type, *name;
  size_t offset, size;
} field;

#define STRUCT(type, init, size)
#define FIELD(type, field, offset, size) {#type, #field, offset, size},
static const field fields[] = {
#include "layout.def"
};
#undef STRUCT
#undef FIELD
enum { FIELDS = sizeof(fields) / sizeof(fields[0]) };

/* Numbers that a field may be set to. Large sizes of problems and of tensors differ, so that the two never agree on a
   size for which there is no memory. */
static int64_t nasty(int of_tensor) {
  static const int64_t of_problems[] = {1 << 30, INT32_MAX, (int64_t)INT32_MAX + 1, INT64_MAX, INT64_MIN};
  static const int64_t of_tensors[] = {(1 << 30) + 1, (int64_t)1 << 33, INT64_MAX - 1, INT64_MIN + 1, UINT32_MAX};
  if (one_in(2)) return below(10) - 2;
  return (of_tensor ? of_tensors : of_problems)[below(5)];
}

static int is_text(const char* a, const char* b) { return strcmp(a, b) == 0; }

/* Another struct of the same kind, no struct, or an address that no struct has. */
static const void* other_struct(const field* f, const void* now) {
  const int quantised = is_text(f->type, "hattn_quantize_args") && !is_text(f->name, "counts");
  const char* type = is_text(f->type, "hattn_quantize_problem") ? "hattn_forward_problem"
                     : quantised                                ? "hattn_quantize_tensor"
                                                                : "hattn_tensor";
  const int start = (int)below(slot_count);
  int i;
  if (one_in(4)) return NULL;
  if (one_in(4) && now != NULL) return (const char*)now + 1 + below(7);
  for (i = 0; i < slot_count; ++i) {
    const int at = (start + i) % slot_count;
    if (is_text(types[at], type)) return &slots[at];
  }
  return NULL;
}

/* Sets a random field of a random struct. */
static void spoil(void) {
  static const uint32_t floats[] = {0x7fc00000, 0x7f800000, 0xbf800000, 0x80000000, 1, 0x7f7fffff};
  const int at = (int)below(slot_count);
  const int of_tensor = is_text(types[at], "hattn_tensor");
  const field* f;
  unsigned char* place;
  do {
    f = &fields[below(FIELDS)];
  } while (!is_text(f->type, types[at]));
  place = slots[at].bytes + f->offset;
  if (is_text(f->name, "data")) {
    hattn_tensor* const t = &slots[at].tensor;
    const int other = (int)below(slot_count);
    const int whose = is_text(types[other], "hattn_tensor") ? other : at;
    if (one_in(4) || slots[whose].tensor.data == NULL) {
      t->data = NULL;
    } else {
      t->data = (unsigned char*)slots[whose].tensor.data + below(5);
    }
  } else if (is_text(f->name, "struct_size")) {
    const uint32_t size = one_in(8) ? UINT32_MAX : (uint32_t)below(one_in(2) ? 136 : SLOT - 64);
    memcpy(place, &size, sizeof(size));
  } else if (is_text(f->name, "softmax_scale") || is_text(f->name, "softcap") || is_text(f->name, "dropout")) {
    memcpy(place, &floats[below(6)], 4);
  } else if (f->size == 4) {
    const int32_t value = (int32_t)nasty(of_tensor);
    memcpy(place, &value, sizeof(value));
  } else if (f->size == 32) {
    const int64_t value = nasty(of_tensor);
    memcpy(place + 8 * below(4), &value, sizeof(value));
  } else if (strstr(f->type, "problem") == NULL ? strstr(f->name, "workspace") == NULL : is_text(f->name, "forward")) {
    const void* now;
    memcpy(&now, place, sizeof(now));
    now = other_struct(f, now);
    memcpy(place, &now, sizeof(now));
  } else {
    const int64_t value = nasty(of_tensor);
    memcpy(place, &value, sizeof(value));
  }
}

/* Takes back what is spoilt of a tensor if the library cannot see that its memory is not there. That is what callers
   promise: every element that shape and strides reach is valid memory. */
static void keep_promise(void) {
  int i, axis;
  for (i = 0; i < slot_count; ++i) {
    hattn_tensor* const t = &slots[i].tensor;
    const int64_t size = is_text(types[i], "hattn_tensor") ? bytes_of(t->dtype) : 0;
    int is_seen = size == 0 || t->data == NULL || t->ndim < 1 || t->ndim > 4;
    for (axis = 0; axis < 4 && !is_seen && axis < t->ndim; ++axis) {
      is_seen = t->shape[axis] < 0 || t->shape[axis] > 1 << 30 || t->stride[axis] < 0;
    }
    if (!is_seen) {
      const int64_t span = span_of(t), start = (const unsigned char*)t->data - memory;
      if (span < 0 || start + span * size > used) *t = right[i];
    }
  }
}

#endif
