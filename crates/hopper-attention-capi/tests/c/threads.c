/* What the header says of threads: any of them may call any function, many may use one plan, each has its own text of
   its last failure, and a plan may be freed by another thread than the one that made it. */
#include <pthread.h>

#include "errors.h"

enum { THREADS = 16, ROUNDS = 50, PLANS = 4 };

static float q_data[Q_SIZE], k_data[K_SIZE], v_data[V_SIZE], expected[O_SIZE];
static hattn_forward_plan* one_plan; /* that all threads run */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static hattn_forward_plan* plans[PLANS]; /* each was made by any thread; guarded by the lock */
static int wrong[THREADS];

static hattn_forward_problem problem_of_all(void) {
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  problem.dtype = HATTN_F32;
  SET_SIZES(problem, DIM_QK, DIM_VO);
  return problem;
}

/* Runs a plan with an output of its own. seqlen_q: that of the output's shape. */
static hattn_status run(hattn_forward_plan* plan, float* output, int64_t seqlen_q) {
  const hattn_tensor q = tensor(q_data, BATCH, SEQLEN_Q, HEADS_Q, DIM_QK);
  const hattn_tensor k = tensor(k_data, BATCH, SEQLEN_KV, HEADS_KV, DIM_QK);
  const hattn_tensor v = tensor(v_data, BATCH, SEQLEN_KV, HEADS_KV, DIM_VO);
  const hattn_tensor o = tensor(output, BATCH, seqlen_q, HEADS_Q, DIM_VO);
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  args.q = &q, args.k = &k, args.v = &v, args.o = &o;
  return hattn_forward_run(plan, &args, NULL);
}

static int is_right(hattn_forward_plan* plan) {
  float output[O_SIZE];
  memset(output, POISON, sizeof(output));
  return run(plan, output, SEQLEN_Q) == HATTN_OK && memcmp(output, expected, sizeof(output)) == 0;
}

static void* use_everything(void* at) {
  int* const mistakes = (int*)at;
  const int64_t id = 1000 + (mistakes - wrong);
  const hattn_forward_problem problem = problem_of_all();
  float output[O_SIZE];
  char mine[32];
  int round;
  snprintf(mine, sizeof(mine), "[2, %lld, 4, 4]", (long long)id);
  for (round = 0; round < ROUNDS; ++round) {
    hattn_forward_plan *made = NULL, *other;
    hattn_tuning* tuning = NULL;
    /* A failure with a text that no other thread has. */
    *mistakes += run(one_plan, output, id) != HATTN_ERROR_SHAPE;
    *mistakes += hattn_tuning_create(NULL, 0, &tuning) != HATTN_OK;
    *mistakes += hattn_forward_plan_create_tuned(&problem, HATTN_CPU, tuning, &made) != HATTN_OK;
    hattn_tuning_destroy(tuning);
    /* The plan that another thread left here is this one's now. */
    pthread_mutex_lock(&lock);
    other = plans[round % PLANS];
    plans[round % PLANS] = made;
    pthread_mutex_unlock(&lock);
    *mistakes += other != NULL && !is_right(other);
    hattn_forward_plan_destroy(other);
    *mistakes += !is_right(one_plan);
    /* The failure at the start of the round is still the last one of this thread. */
    *mistakes += strstr(hattn_last_error(), mine) == NULL;
  }
  return NULL;
}

static void threads_share_plans_and_have_their_own_text(void) {
  const hattn_forward_problem problem = problem_of_all();
  pthread_t threads[THREADS];
  int i;
  reference_fill(q_data, Q_SIZE, 1);
  reference_fill(k_data, K_SIZE, 2);
  reference_fill(v_data, V_SIZE, 3);
  CHECK(hattn_forward_plan_create(&problem, HATTN_CPU, &one_plan) == HATTN_OK);
  CHECK(run(one_plan, expected, SEQLEN_Q) == HATTN_OK);
  for (i = 0; i < THREADS; ++i) CHECK(pthread_create(&threads[i], NULL, use_everything, &wrong[i]) == 0);
  for (i = 0; i < THREADS; ++i) CHECK(pthread_join(threads[i], NULL) == 0 && wrong[i] == 0);
  for (i = 0; i < PLANS; ++i) hattn_forward_plan_destroy(plans[i]);
  hattn_forward_plan_destroy(one_plan);
  CHECK(strcmp(hattn_last_error(), "") == 0);
}

int main(void) {
  RUN("threads", threads_share_plans_and_have_their_own_text);
  return check_result();
}
