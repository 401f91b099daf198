/* hattn_tensor_contiguous: the strides that it fills in, what it leaves alone, and what it refuses. */
#include "errors.h"

static hattn_tensor sized(int32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.ndim = ndim;
  made.shape[0] = a, made.shape[1] = b, made.shape[2] = c, made.shape[3] = d;
  made.stride[0] = made.stride[1] = made.stride[2] = made.stride[3] = -7;
  return made;
}

/* Whether the strides become these. No other field changes. */
static int becomes(hattn_tensor given, int64_t a, int64_t b, int64_t c, int64_t d) {
  hattn_tensor expected = given;
  expected.stride[0] = a, expected.stride[1] = b, expected.stride[2] = c, expected.stride[3] = d;
  return hattn_tensor_contiguous(&given) == HATTN_OK && memcmp(&given, &expected, sizeof(given)) == 0;
}

static void the_innermost_stride_is_1(void) {
  hattn_tensor other = sized(4, 2, 3, 4, 5);
  CHECK(becomes(sized(4, 2, 3, 4, 5), 60, 20, 5, 1));
  CHECK(becomes(sized(3, 2, 3, 4, -9), 12, 4, 1, -7));
  CHECK(becomes(sized(2, 2, 3, -9, -9), 3, 1, -7, -7));
  CHECK(becomes(sized(1, 2, -9, -9, -9), 1, -7, -7, -7));
  other.data = &other, other.dtype = 99, other.device = -99; /* not looked at */
  CHECK(becomes(other, 60, 20, 5, 1));
}

static void a_size_of_0_counts_as_1(void) {
  CHECK(becomes(sized(4, 0, 3, 4, 5), 60, 20, 5, 1));
  CHECK(becomes(sized(4, 2, 0, 4, 5), 20, 20, 5, 1));
  CHECK(becomes(sized(4, 2, 3, 4, 0), 12, 4, 1, 1));
}

#define REFUSES(status, got, allowed)                   \
  do {                                                  \
    const hattn_tensor before = given;                  \
    CHECK(hattn_tensor_contiguous(&given) == (status)); \
    SAYS("tensor", got, allowed);                       \
    CHECK(memcmp(&given, &before, sizeof(given)) == 0); \
  } while (0)

static void what_has_no_strides_is_refused(void) {
  static const int32_t ndims[] = {0, -1, 5, INT32_MIN};
  hattn_tensor given;
  char got[32];
  int i;
  for (i = 0; i < 4; ++i) {
    given = sized(ndims[i], 2, 3, 4, 5);
    sprintf(got, "ndim %ld;", (long)ndims[i]);
    REFUSES(HATTN_ERROR_ARGUMENT, got, "1 to 4");
  }
  given = sized(4, 2, 3, -4, 5);
  REFUSES(HATTN_ERROR_LAYOUT, "size -4 in dimension 2", "0 and above");
  given = sized(4, 1 << 30, 1 << 30, 8, 1);
  REFUSES(HATTN_ERROR_LAYOUT, "[1073741824, 1073741824, 8, 1]", "fewer than 2^63 elements");
  given = sized(4, 2, 3, 4, 5), given.struct_size = 95;
  REFUSES(HATTN_ERROR_ABI, "struct_size 95", "96");
  given = sized(4, 2, 3, 4, 5), given.abi_version = 2;
  REFUSES(HATTN_ERROR_ABI, "abi_version 2", "allowed: 1");
  given = sized(4, 2, 3, 4, 5), given.reserved = 1;
  REFUSES(HATTN_ERROR_ARGUMENT, "reserved 0x1", "0");
  CHECK(hattn_tensor_contiguous(NULL) == HATTN_ERROR_ARGUMENT);
  SAYS("tensor", "a null pointer", "hattn_tensor");
  CHECK(hattn_tensor_contiguous((hattn_tensor*)(void*)((char*)&given + 4)) == HATTN_ERROR_ARGUMENT);
  SAYS("tensor", "address 0x", "multiples of 8");
}

int main(void) {
  RUN("tensor", the_innermost_stride_is_1);
  RUN("tensor", a_size_of_0_counts_as_1);
  RUN("tensor", what_has_no_strides_is_refused);
  return check_result();
}
