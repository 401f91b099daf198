/* The C ABI from C99: attention of ones, whose output is a mean of ones. Returns 0 when it is. */
#include <hopper_attention.h>
#include <stdio.h>

enum { SEQLEN = 4, HEADS = 2, HEAD_DIM = 8, SIZE = SEQLEN * HEADS * HEAD_DIM };

/* An f32 tensor on the CPU, [1, SEQLEN, HEADS, HEAD_DIM], row-major and without gaps. */
static hattn_tensor tensor(float* data) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = data;
  made.dtype = HATTN_F32;
  made.device = HATTN_CPU;
  made.ndim = 4;
  made.shape[0] = 1, made.shape[1] = SEQLEN, made.shape[2] = HEADS, made.shape[3] = HEAD_DIM;
  /* If this failed, strides would stay 0. The run refuses those. */
  hattn_tensor_contiguous(&made);
  return made;
}

int main(void) {
  float ones[SIZE], result[SIZE] = {0};
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  hattn_forward_plan* plan = NULL;
  hattn_tensor in, out;
  int i, wrong = 0;

  for (i = 0; i < SIZE; ++i) ones[i] = 1.0F;
  in = tensor(ones);
  out = tensor(result);
  args.q = args.k = args.v = &in;
  args.o = &out;
  problem.dtype = HATTN_F32;
  problem.mask = HATTN_MASK_CAUSAL;
  problem.batch = 1;
  problem.seqlen_q = problem.seqlen_kv = SEQLEN;
  problem.heads_q = problem.heads_kv = HEADS;
  problem.head_dim_qk = problem.head_dim_vo = HEAD_DIM;

  if (hattn_forward_plan_create(&problem, HATTN_CPU, &plan) != HATTN_OK ||
      hattn_forward_run(plan, &args, NULL) != HATTN_OK) {
    fprintf(stderr, "failed: %s\n", hattn_last_error());
    wrong = 1;
  }
  for (i = 0; i < SIZE; ++i) wrong |= !(result[i] > 0.99999F && result[i] < 1.00001F);
  hattn_forward_plan_destroy(plan);
  printf("hopper_attention %s from C: %s\n", hattn_version(), wrong ? "WRONG" : "ok");
  return wrong;
}
