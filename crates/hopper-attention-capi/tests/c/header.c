/* The C header first and alone: as C99 and as C++17 it needs nothing before it and warns of nothing. */
#include <hopper_attention.h>

#include "check.h"

/* The body of a test: a plan of a pass on the CPU comes and goes. */
#define COMES_AND_GOES(pass, no_problem)                                                         \
  hattn_##pass##_problem problem = no_problem;                                                   \
  hattn_##pass##_plan* plan = NULL;                                                              \
  problem.dtype = HATTN_F32;                                                                     \
  problem.batch = problem.seqlen_q = problem.seqlen_kv = problem.heads_q = problem.heads_kv = 1; \
  problem.head_dim_qk = problem.head_dim_vo = 8;                                                 \
  CHECK(hattn_##pass##_supported(&problem, HATTN_CPU) == HATTN_OK);                              \
  CHECK(hattn_##pass##_plan_create(&problem, HATTN_CPU, &plan) == HATTN_OK && plan != NULL);     \
  hattn_##pass##_plan_destroy(plan);                                                             \
  hattn_##pass##_plan_destroy(NULL)

static void a_plan_of_the_cpu_comes_and_goes(void) { COMES_AND_GOES(forward, HATTN_FORWARD_PROBLEM_INIT); }

static void so_does_one_of_the_gradients(void) { COMES_AND_GOES(backward, HATTN_BACKWARD_PROBLEM_INIT); }

int main(void) {
  RUN("header", a_plan_of_the_cpu_comes_and_goes);
  RUN("header", so_does_one_of_the_gradients);
  return check_result();
}
