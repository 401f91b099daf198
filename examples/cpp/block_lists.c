/* Lists of blocks from C99: tokens of two documents attend to those of their own. The values of a document are its
   number, so that its outputs are this number, too. Returns 0 when they are. */
#include <hopper_attention_lists.h>
#include <stdio.h>
#include <string.h>

enum { SEQLEN = 300, SECOND = 140, HEADS = 2, HEAD_DIM = 8, ROW = HEADS * HEAD_DIM, SIZE = SEQLEN * ROW };

/* An f32 tensor on the CPU, [1, SEQLEN, HEADS, HEAD_DIM], row-major and without gaps. */
static hattn_tensor tensor(float* data) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = data;
  made.dtype = HATTN_F32;
  made.device = HATTN_CPU;
  made.ndim = 4;
  made.shape[0] = 1, made.shape[1] = SEQLEN, made.shape[2] = HEADS, made.shape[3] = HEAD_DIM;
  hattn_tensor_contiguous(&made);
  return made;
}

/* A list in the memory of the library. The library only reads it. */
static hattn_tensor list(const int32_t* data, int32_t ndim, const int64_t shape[4]) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = (void*)data;
  made.dtype = HATTN_I32;
  made.device = HATTN_CPU;
  made.ndim = ndim;
  memcpy(made.shape, shape, sizeof(made.shape));
  hattn_tensor_contiguous(&made);
  return made;
}

int main(void) {
  static float ones[SIZE], values[SIZE], result[SIZE];
  static int32_t ids[SEQLEN];
  hattn_documents documents = HATTN_DOCUMENTS_INIT;
  hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  hattn_block_lists* lists = NULL;
  hattn_forward_plan* plan = NULL;
  hattn_tensor qk, v, o, cnt, idx, bits, full_cnt, full_idx;
  int i, wrong = 0;

  for (i = 0; i < SEQLEN; ++i) ids[i] = i < SECOND ? 0 : 1;
  for (i = 0; i < SIZE; ++i) ones[i] = 1.0F, values[i] = (float)ids[i / ROW];

  documents.batch = 1; /* all batch entries share the lists */
  documents.seqlen_q = documents.seqlen_kv = SEQLEN;
  documents.q_ids = documents.kv_ids = ids;
  if (hattn_block_lists_from_documents(&documents, &lists) != HATTN_OK ||
      hattn_block_lists_arrays(lists, &arrays) != HATTN_OK) {
    fprintf(stderr, "failed: %s\n", hattn_last_error());
    return 1;
  }

  problem.dtype = HATTN_F32;
  problem.mask = HATTN_MASK_CAUSAL; /* beside the lists: earlier tokens of the document */
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_kv = SEQLEN;
  problem.heads_q = problem.heads_kv = HEADS;
  problem.head_dim_qk = problem.head_dim_vo = HEAD_DIM;
  problem.block_mask = arrays.block_mask;
  problem.block_mask_most_partial = arrays.block_mask_most_partial;

  qk = tensor(ones), v = tensor(values), o = tensor(result);
  cnt = list(arrays.mask_block_cnt, 3, arrays.shape);
  idx = list(arrays.mask_block_idx, 4, arrays.shape);
  bits = list(arrays.mask_bits, 4, arrays.bits_shape);
  full_cnt = list(arrays.full_block_cnt, 3, arrays.shape);
  full_idx = list(arrays.full_block_idx, 4, arrays.shape);
  args.q = args.k = &qk, args.v = &v, args.o = &o;
  args.mask_block_cnt = &cnt, args.mask_block_idx = &idx, args.mask_bits = &bits;
  args.full_block_cnt = &full_cnt, args.full_block_idx = &full_idx;

  if (hattn_forward_plan_create(&problem, HATTN_CPU, &plan) != HATTN_OK ||
      hattn_forward_run(plan, &args, NULL) != HATTN_OK) {
    fprintf(stderr, "failed: %s\n", hattn_last_error());
    wrong = 1;
  }
  for (i = 0; i < SIZE; ++i) wrong |= !(result[i] > values[i] - 1e-5F && result[i] < values[i] + 1e-5F);
  hattn_forward_plan_destroy(plan);
  hattn_block_lists_destroy(lists);
  printf("documents by lists of blocks from C: %s\n", wrong ? "WRONG" : "ok");
  return wrong;
}
