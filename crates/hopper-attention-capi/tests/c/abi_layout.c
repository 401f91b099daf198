/* The layout of ABI version 1 as numbers: a compiler that lays a struct out in another way, or a header that moved a
   field, renumbered a constant or changed a signature, does not compile this. C99, and C++17 as well. abi/layout.def
   has the numbers, to which build.rs holds Rust. */
#include <hopper_attention.h>

#include "check.h"

/* C99 has no static assertion: an array of -1 elements is an error in both languages. */
#define HOLDS(name, condition) typedef char holds_##name[(condition) ? 1 : -1]

#define STRUCT(type, size)                       \
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

HOLDS(abi_version, HATTN_ABI_VERSION == 1);
HOLDS(statuses, HATTN_OK == 0 && HATTN_ERROR_ARGUMENT == 1 && HATTN_ERROR_ABI == 2 && HATTN_ERROR_SHAPE == 3 &&
                    HATTN_ERROR_LAYOUT == 4 && HATTN_ERROR_DTYPE == 5 && HATTN_ERROR_VALUE == 6 &&
                    HATTN_ERROR_UNSUPPORTED == 7 && HATTN_ERROR_WORKSPACE == 8 && HATTN_ERROR_DEVICE == 9 &&
                    HATTN_ERROR_CAPTURE == 10 && HATTN_ERROR_DRIVER == 11 && HATTN_ERROR_LAUNCH == 12 &&
                    HATTN_ERROR_NO_DEVICE == 13 && HATTN_ERROR_INTERNAL == 14);
HOLDS(dtypes, HATTN_F16 == 1 && HATTN_BF16 == 2 && HATTN_F32 == 3 && HATTN_E4M3 == 4);
HOLDS(devices, HATTN_CPU == -1);
HOLDS(masks, HATTN_MASK_FULL == 0 && HATTN_MASK_CAUSAL == 1 && HATTN_MASK_WINDOW == 2);
HOLDS(scalings, HATTN_PER_TENSOR == 0 && HATTN_PER_HEAD == 1 && HATTN_PER_BLOCK == 2);
HOLDS(corners, HATTN_BOTTOM_RIGHT == 0 && HATTN_TOP_LEFT == 1 && HATTN_UNBOUNDED == -1);
HOLDS(enums, sizeof(hattn_status) == 4 && sizeof(hattn_dtype) == 4 && sizeof(hattn_device) == 4 &&
                 sizeof(hattn_mask) == 4 && sizeof(hattn_corner) == 4 && (hattn_status)-1 < 0);

/* Every function with its type; the addresses also make the linker find each of them. */
typedef struct functions {
  uint32_t (*abi_version)(void);
  const char* (*version)(void);
  const char* (*status_name)(int32_t);
  const char* (*last_error)(void);
  int32_t (*device_count)(int32_t*);
  int32_t (*supported)(const hattn_forward_problem*, int32_t);
  int32_t (*tuning_create)(const char*, size_t, hattn_tuning**);
  void (*tuning_destroy)(hattn_tuning*);
  int32_t (*create)(const hattn_forward_problem*, int32_t, hattn_forward_plan**);
  int32_t (*create_tuned)(const hattn_forward_problem*, int32_t, const hattn_tuning*, hattn_forward_plan**);
  void (*destroy)(hattn_forward_plan*);
  int32_t (*describe)(const hattn_forward_plan*, char*, size_t, size_t*);
  int32_t (*workspace_size)(const hattn_forward_plan*, size_t*);
  int32_t (*run)(const hattn_forward_plan*, const hattn_forward_args*, struct CUstream_st*);
  int32_t (*backward_supported)(const hattn_backward_problem*, int32_t);
  int32_t (*backward_create)(const hattn_backward_problem*, int32_t, hattn_backward_plan**);
  void (*backward_destroy)(hattn_backward_plan*);
  int32_t (*backward_describe)(const hattn_backward_plan*, char*, size_t, size_t*);
  int32_t (*backward_workspace_size)(const hattn_backward_plan*, size_t*);
  int32_t (*backward_run)(const hattn_backward_plan*, const hattn_backward_args*, struct CUstream_st*);
  int32_t (*quantize_supported)(const hattn_quantize_problem*, int32_t);
  int32_t (*quantize_create)(const hattn_quantize_problem*, int32_t, hattn_quantize_plan**);
  void (*quantize_destroy)(hattn_quantize_plan*);
  int32_t (*quantize_describe)(const hattn_quantize_plan*, char*, size_t, size_t*);
  int32_t (*quantize_workspace_size)(const hattn_quantize_plan*, size_t*);
  int32_t (*quantize_run)(const hattn_quantize_plan*, const hattn_quantize_args*, struct CUstream_st*);
} functions;

static void functions_have_their_types(void) {
  const functions all = {hattn_abi_version,
                         hattn_version,
                         hattn_status_name,
                         hattn_last_error,
                         hattn_device_count,
                         hattn_forward_supported,
                         hattn_tuning_create,
                         hattn_tuning_destroy,
                         hattn_forward_plan_create,
                         hattn_forward_plan_create_tuned,
                         hattn_forward_plan_destroy,
                         hattn_forward_plan_describe,
                         hattn_forward_plan_workspace_size,
                         hattn_forward_run,
                         hattn_backward_supported,
                         hattn_backward_plan_create,
                         hattn_backward_plan_destroy,
                         hattn_backward_plan_describe,
                         hattn_backward_plan_workspace_size,
                         hattn_backward_run,
                         hattn_quantize_supported,
                         hattn_quantize_plan_create,
                         hattn_quantize_plan_destroy,
                         hattn_quantize_plan_describe,
                         hattn_quantize_plan_workspace_size,
                         hattn_quantize_run};
  CHECK(all.abi_version() == HATTN_ABI_VERSION);
  CHECK(strcmp(all.status_name(HATTN_ERROR_WORKSPACE), "HATTN_ERROR_WORKSPACE") == 0);
  CHECK(strcmp(all.status_name(15), "HATTN_ERROR_?") == 0);
  CHECK(strchr(all.version(), '.') != NULL);
}

/* All bytes behind the header are 0. */
static int empty(const void* value, size_t size) {
  const unsigned char* bytes = (const unsigned char*)value;
  size_t i;
  for (i = 8; i < size; ++i) {
    if (bytes[i] != 0) return 0;
  }
  return 1;
}

static void initialisers_fill_the_header_only(void) {
  const hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  const hattn_tensor tensor = HATTN_TENSOR_INIT;
  const hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  const hattn_backward_problem gradients = HATTN_BACKWARD_PROBLEM_INIT;
  const hattn_backward_args gradient_args = HATTN_BACKWARD_ARGS_INIT;
  const hattn_quantize_problem quantising = HATTN_QUANTIZE_PROBLEM_INIT;
  const hattn_quantize_tensor quantised = HATTN_QUANTIZE_TENSOR_INIT;
  const hattn_quantize_args quantise_args = HATTN_QUANTIZE_ARGS_INIT;
  CHECK(quantising.struct_size == 32 && quantising.abi_version == 1 && empty(&quantising, sizeof(quantising)));
  CHECK(quantised.struct_size == 40 && quantised.abi_version == 1 && empty(&quantised, sizeof(quantised)));
  CHECK(quantise_args.struct_size == 56 && quantise_args.abi_version == 1);
  CHECK(empty(&quantise_args, sizeof(quantise_args)));
  CHECK(problem.struct_size == 120 && problem.abi_version == 1 && empty(&problem, sizeof(problem)));
  CHECK(tensor.struct_size == 96 && tensor.abi_version == 1 && empty(&tensor, sizeof(tensor)));
  CHECK(args.struct_size == 104 && args.abi_version == 1 && empty(&args, sizeof(args)));
  CHECK(gradients.struct_size == 112 && gradients.abi_version == 1 && empty(&gradients, sizeof(gradients)));
  CHECK(gradient_args.struct_size == 104 && gradient_args.abi_version == 1);
  CHECK(empty(&gradient_args, sizeof(gradient_args)));
}

int main(void) {
  RUN("abi_layout", functions_have_their_types);
  RUN("abi_layout", initialisers_fill_the_header_only);
  return check_result();
}
