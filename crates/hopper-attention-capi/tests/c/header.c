/* The C header first and alone: as C99 and as C++17 it needs nothing before it and warns of nothing. */
#include <hopper_attention.h>

#include "check.h"

static void a_plan_of_the_cpu_comes_and_goes(void) {
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  hattn_forward_plan* plan = NULL;
  problem.dtype = HATTN_F32;
  problem.batch = problem.seqlen_q = problem.seqlen_kv = problem.heads_q = problem.heads_kv = 1;
  problem.head_dim_qk = problem.head_dim_vo = 8;
  CHECK(hattn_forward_supported(&problem, HATTN_CPU) == HATTN_OK);
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &plan) == HATTN_OK && plan != NULL);
  hattn_forward_plan_destroy(plan);
  hattn_forward_plan_destroy(NULL);
}

static void so_does_one_of_the_gradients(void) {
  hattn_backward_problem problem = HATTN_BACKWARD_PROBLEM_INIT;
  hattn_backward_plan* plan = NULL;
  problem.dtype = HATTN_F32;
  problem.batch = problem.seqlen_q = problem.seqlen_kv = problem.heads_q = problem.heads_kv = 1;
  problem.head_dim_qk = problem.head_dim_vo = 8;
  CHECK(hattn_backward_supported(&problem, HATTN_CPU) == HATTN_OK);
  CHECK(hattn_backward_plan_create(&problem, HATTN_CPU, &plan) == HATTN_OK && plan != NULL);
  hattn_backward_plan_destroy(plan);
  hattn_backward_plan_destroy(NULL);
}

int main(void) {
  RUN("header", a_plan_of_the_cpu_comes_and_goes);
  RUN("header", so_does_one_of_the_gradients);
  return check_result();
}
