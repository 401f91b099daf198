/* The layout of ABI version 1 as numbers. This does not compile if the compiler lays out a struct in another way, or if
   the header moved a field, renumbered a constant or changed a signature. C99 and C++17. The numbers are in
   abi/layout.def, which is made of src/abi.rs. There, Rust asserts the same numbers. */
#include <hopper_attention_lists.h>

#include "check.h"

/* C99 has no static assertion: an array of -1 elements is an error in both languages. */
#define HOLDS(name, condition) typedef char holds_##name[(condition) ? 1 : -1]

#define STRUCT(type, init, size)                 \
  struct align_of_##type {                       \
    char before;                                 \
    type value;                                  \
  };                                             \
  HOLDS(size_of_##type, sizeof(type) == (size)); \
  HOLDS(align_of_##type, offsetof(struct align_of_##type, value) == 8);

#define FIELD(type, field, offset, size)                         \
  HOLDS(type##_##field##_at, offsetof(type, field) == (offset)); \
  HOLDS(type##_##field##_size, sizeof(((type*)0)->field) == (size));

#include "layout.def"
#undef STRUCT
#undef FIELD

HOLDS(abi_version, HATTN_ABI_VERSION == 1);
HOLDS(statuses, HATTN_OK == 0 && HATTN_ERROR_ARGUMENT == 1 && HATTN_ERROR_ABI == 2 && HATTN_ERROR_SHAPE == 3 &&
                    HATTN_ERROR_LAYOUT == 4 && HATTN_ERROR_DTYPE == 5 && HATTN_ERROR_VALUE == 6 &&
                    HATTN_ERROR_UNSUPPORTED == 7 && HATTN_ERROR_WORKSPACE == 8 && HATTN_ERROR_DEVICE == 9 &&
                    HATTN_ERROR_CAPTURE == 10 && HATTN_ERROR_DRIVER == 11 && HATTN_ERROR_LAUNCH == 12 &&
                    HATTN_ERROR_NO_DEVICE == 13 && HATTN_ERROR_INTERNAL == 14 && HATTN_ERROR_MEMORY == 15 &&
                    HATTN_ERROR_THREADS == 16);
HOLDS(dtypes, HATTN_F16 == 1 && HATTN_BF16 == 2 && HATTN_F32 == 3 && HATTN_E4M3 == 4);
HOLDS(devices, HATTN_CPU == -1);
HOLDS(masks, HATTN_MASK_FULL == 0 && HATTN_MASK_CAUSAL == 1 && HATTN_MASK_WINDOW == 2);
HOLDS(more_masks, HATTN_MASK_CHUNKED == 3 && HATTN_MASK_PREFIX == 4);
HOLDS(alibi, HATTN_ALIBI_NONE == 0 && HATTN_ALIBI_PER_HEAD == 1 && HATTN_ALIBI_PER_BATCH == 2);
HOLDS(block_masks, HATTN_BLOCK_MASK_NONE == 0 && HATTN_BLOCK_MASK_LISTS == 1 && HATTN_BLOCK_MASK_PER_BATCH == 2);
HOLDS(bias_dims, HATTN_BIAS_PER_BATCH == 1 && HATTN_BIAS_PER_HEAD == 2 && HATTN_BIAS_PER_QUERY == 4);
HOLDS(more_block_masks, HATTN_BLOCK_MASK_PER_HEAD == 4 && HATTN_BLOCK_MASK_FULL_BLOCKS == 8);
HOLDS(scalings, HATTN_PER_TENSOR == 0 && HATTN_PER_HEAD == 1 && HATTN_PER_BLOCK == 2);
HOLDS(corners, HATTN_BOTTOM_RIGHT == 0 && HATTN_TOP_LEFT == 1 && HATTN_UNBOUNDED == -1);
HOLDS(sizes, HATTN_UNSET == -1);
HOLDS(enums, sizeof(hattn_status) == 4 && sizeof(hattn_dtype) == 4 && sizeof(hattn_device) == 4 &&
                 sizeof(hattn_mask) == 4 && sizeof(hattn_corner) == 4 && (hattn_status)-1 < 0);

/* The functions that every pass has. */
#define FUNCTIONS_OF(pass)                                                                 \
  int32_t (*pass##_supported)(const hattn_##pass##_problem*, int32_t);                     \
  int32_t (*pass##_create)(const hattn_##pass##_problem*, int32_t, hattn_##pass##_plan**); \
  void (*pass##_destroy)(hattn_##pass##_plan*);                                            \
  int32_t (*pass##_describe)(const hattn_##pass##_plan*, char*, size_t, size_t*);          \
  int32_t (*pass##_workspace_size)(const hattn_##pass##_plan*, size_t*);                   \
  int32_t (*pass##_run)(const hattn_##pass##_plan*, const hattn_##pass##_args*, struct CUstream_st*);
#define ADDRESSES_OF(pass)                                                                                         \
  hattn_##pass##_supported, hattn_##pass##_plan_create, hattn_##pass##_plan_destroy, hattn_##pass##_plan_describe, \
      hattn_##pass##_plan_workspace_size, hattn_##pass##_run

/* Every function with its type; the addresses also make the linker find each of them. */
typedef struct functions {
  uint32_t (*abi_version)(void);
  const char* (*version)(void);
  const char* (*status_name)(int32_t);
  const char* (*last_error)(void);
  int32_t (*device_count)(int32_t*);
  int32_t (*tensor_contiguous)(hattn_tensor*);
  int32_t (*tuning_create)(const char*, size_t, hattn_tuning**);
  void (*tuning_destroy)(hattn_tuning*);
  int32_t (*create_tuned)(const hattn_forward_problem*, int32_t, const hattn_tuning*, hattn_forward_plan**);
  FUNCTIONS_OF(forward)
  FUNCTIONS_OF(backward)
  FUNCTIONS_OF(quantize)
  int32_t (*lists_from_slices)(const hattn_slices*, hattn_block_lists**);
  int32_t (*lists_from_documents)(const hattn_documents*, hattn_block_lists**);
  int32_t (*lists_from_prefixes)(const hattn_prefixes*, hattn_block_lists**);
  int32_t (*lists_from_spans)(const hattn_spans*, hattn_block_lists**);
  int32_t (*lists_from_dense_mask)(const hattn_dense_mask*, hattn_block_lists**);
  int32_t (*lists_arrays)(const hattn_block_lists*, hattn_block_arrays*);
  void (*lists_destroy)(hattn_block_lists*);
} functions;

static void functions_have_their_types(void) {
  const functions all = {hattn_abi_version,
                         hattn_version,
                         hattn_status_name,
                         hattn_last_error,
                         hattn_device_count,
                         hattn_tensor_contiguous,
                         hattn_tuning_create,
                         hattn_tuning_destroy,
                         hattn_forward_plan_create_tuned,
                         ADDRESSES_OF(forward),
                         ADDRESSES_OF(backward),
                         ADDRESSES_OF(quantize),
                         hattn_block_lists_from_slices,
                         hattn_block_lists_from_documents,
                         hattn_block_lists_from_prefixes,
                         hattn_block_lists_from_spans,
                         hattn_block_lists_from_dense_mask,
                         hattn_block_lists_arrays,
                         hattn_block_lists_destroy};
  CHECK(all.abi_version() == HATTN_ABI_VERSION);
  CHECK(strcmp(all.status_name(HATTN_ERROR_WORKSPACE), "HATTN_ERROR_WORKSPACE") == 0);
  CHECK(strcmp(all.status_name(HATTN_ERROR_THREADS), "HATTN_ERROR_THREADS") == 0);
  CHECK(strcmp(all.status_name(17), "HATTN_ERROR_?") == 0);
  CHECK(strchr(all.version(), '.') != NULL);
}

/* The value that initialisers give to a field. All bytes of HATTN_UNSET are 0xFF. */
static int is_initial(const char* field, const unsigned char* bytes, size_t size) {
  const int is_unset = strcmp(field, "batch") == 0 || strcmp(field, "seqlen_q") == 0 || strcmp(field, "seqlen_kv") == 0;
  size_t i;
  for (i = 0; i < size; ++i) {
    if (bytes[i] != (is_unset ? 0xFF : 0)) return 0;
  }
  return 1;
}

/* Every initialiser fills in the header and what must not be forgotten. */
#define STRUCT(type, init, size)                                  \
  {                                                               \
    const type value = init;                                      \
    memcpy(bytes, &value, sizeof(value));                         \
    CHECK(value.struct_size == (size) && value.abi_version == 1); \
  }
#define FIELD(type, field, offset, size) CHECK((offset) < 8 || is_initial(#field, bytes + (offset), (size)));
static void initialisers_fill_the_header_and_what_must_not_be_forgotten(void) {
  unsigned char bytes[256];
#include "layout.def"
}

int main(void) {
  RUN("abi_layout", functions_have_their_types);
  RUN("abi_layout", initialisers_fill_the_header_and_what_must_not_be_forgotten);
  return check_result();
}
