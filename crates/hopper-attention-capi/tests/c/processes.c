/* Runs on the CPU in processes that fork, that may start no thread, and that get no memory. Each case is a child
   process, because limits hold for a whole process, and because a library that waits for ever or aborts must not end
   the tests. */
#define _POSIX_C_SOURCE 200809L

#include <hopper_attention.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* The sizes of a problem with four tasks for each head, whose buffers take some 3 MB for each thread. */
enum { SEQLEN = 256, HEADS = 2, HEAD_DIM = 1024, SIZE = SEQLEN * HEADS * HEAD_DIM, MEGABYTE = 1 << 20 };

static float *input, *output;
/* The limit of address space that a case sets, in bytes beyond what the process has. */
static long room;

static hattn_tensor tensor(float* data) {
  hattn_tensor made = HATTN_TENSOR_INIT;
  made.data = data;
  made.dtype = HATTN_F32;
  made.device = HATTN_CPU;
  made.ndim = 4;
  made.shape[0] = 1, made.shape[1] = SEQLEN, made.shape[2] = HEADS, made.shape[3] = HEAD_DIM;
  made.stride[0] = SIZE, made.stride[1] = HEADS * HEAD_DIM, made.stride[2] = HEAD_DIM, made.stride[3] = 1;
  return made;
}

/* All values are equal, so their mean, the output, is too. A run that is refused leaves the output as it was. */
static hattn_status run(void) {
  hattn_forward_problem problem = HATTN_FORWARD_PROBLEM_INIT;
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  const hattn_tensor in = tensor(input), out = tensor(output);
  hattn_forward_plan* plan = NULL;
  hattn_status status;
  size_t i;
  problem.dtype = HATTN_F32;
  problem.batch = 1, problem.seqlen_q = problem.seqlen_kv = SEQLEN;
  problem.heads_q = problem.heads_kv = HEADS, problem.head_dim_qk = problem.head_dim_vo = HEAD_DIM;
  args.q = args.k = args.v = &in;
  args.o = &out;
  for (i = 0; i < SIZE; ++i) output[i] = -1;
  status = hattn_forward_plan_create(&problem, HATTN_CPU, &plan);
  if (status == HATTN_OK) status = hattn_forward_run(plan, &args, NULL);
  hattn_forward_plan_destroy(plan);
  for (i = 0; i < SIZE; ++i) {
    const float want = status == HATTN_OK ? 0.5f : -1;
    if (output[i] - want > 1e-5f || want - output[i] > 1e-5f) return HATTN_ERROR_INTERNAL;
  }
  return status;
}

/* Limits the address space to `bytes` more than the process has. A negative number lifts the limit. */
static int limit(long bytes) {
  struct rlimit to;
  unsigned long pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%lu", &pages) != 1 || fclose(file) != 0) return 0;
  if (getrlimit(RLIMIT_AS, &to) != 0) return 0;
  to.rlim_cur = bytes < 0 ? to.rlim_max : pages * (unsigned long)sysconf(_SC_PAGESIZE) + (unsigned long)bytes;
  return setrlimit(RLIMIT_AS, &to) == 0;
}

/* What `call` returns in a child process. -1 if the child is ended by a signal, has not ended after a minute, or has
   written to stderr. */
static int in_a_child(int (*call)(void)) {
  FILE* printed = tmpfile();
  int status = 0;
  const pid_t child = printed == NULL ? -1 : fork();
  if (child == 0) {
    alarm(60);
    dup2(fileno(printed), STDERR_FILENO);
    _exit(call());
  }
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  if (fseek(printed, 0, SEEK_END) != 0 || ftell(printed) != 0) return -1;
  fclose(printed);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_child_computes_after_a_run_of_its_parent(void) {
  CHECK_STATUS(run(), HATTN_OK, "the parent");
  CHECK_STATUS(in_a_child(run), HATTN_OK, "the child");
  CHECK_STATUS(run(), HATTN_OK, "the parent, later");
}

static int without_threads(void) {
  hattn_status first;
  if (!limit(MEGABYTE)) return 100; /* less than the stack of a thread */
  first = run();
  if (first != HATTN_ERROR_THREADS || strstr(hattn_last_error(), "no threads: ") == NULL) return 101;
  if (!limit(-1)) return 102;
  return run();
}

static void threads_that_cannot_be_started_are_refused_until_they_can_be(void) {
  CHECK_STATUS(in_a_child(without_threads), HATTN_OK, "no room for a thread, then room");
}

/* A run that is refused, or right. Then the limit is lifted, and a run must be right. */
static int limited(void) {
  hattn_status first;
  if (!limit(room)) return 100;
  first = run();
  if (!limit(-1) || run() != HATTN_OK) return 101;
  return first;
}

static int limited_after_a_run(void) { return run() == HATTN_OK ? limited() : 102; }

static void runs_without_enough_memory_are_refused(void) {
  int refused = 0;
  for (room = MEGABYTE / 16;; room += room / 4) {
    const int status = in_a_child(limited_after_a_run);
    if (status == HATTN_OK) break;
    CHECK_STATUS(status, HATTN_ERROR_MEMORY, "less memory than a run needs");
    if (check_broken) return;
    ++refused;
  }
  CHECK(refused > 0);
}

static void first_runs_without_enough_memory_are_refused(void) {
  int refused = 0;
  for (room = MEGABYTE;; room += room / 4) {
    const int status = in_a_child(limited);
    if (status == HATTN_OK) break;
    CHECK(status == HATTN_ERROR_MEMORY || status == HATTN_ERROR_THREADS);
    if (check_broken) return;
    ++refused;
  }
  CHECK(refused > 0);
}

int main(void) {
  size_t i;
  input = malloc(SIZE * sizeof(float));
  output = malloc(SIZE * sizeof(float));
  if (input == NULL || output == NULL) return 1;
  for (i = 0; i < SIZE; ++i) input[i] = 0.5f;
  RUN("processes", first_runs_without_enough_memory_are_refused);
  RUN("processes", runs_without_enough_memory_are_refused);
  RUN("processes", threads_that_cannot_be_started_are_refused_until_they_can_be);
  RUN("processes", a_child_computes_after_a_run_of_its_parent);
  free(input);
  free(output);
  return check_result();
}
