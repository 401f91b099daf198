/* Tests that print as cargo's do, for C99 and C++17: a test is a function, CHECK notes what fails and goes on. */
#ifndef HATTN_TESTS_CHECK_H
#define HATTN_TESTS_CHECK_H

#include <stdio.h>
#include <string.h>

static int check_passed = 0;
static int check_failed = 0;
static int check_broken = 0;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      printf("%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      check_broken = 1;                                                     \
    }                                                                       \
  } while (0)

/* CHECK, and the text that was found. */
#define CHECK_TEXT(text, part) check_text(__FILE__, __LINE__, (text), (part))

static inline void check_text(const char* file, int line, const char* text, const char* part) {
  if (text == NULL || strstr(text, part) == NULL) {
    printf("%s:%d: \"%s\" does not say \"%s\"\n", file, line, text != NULL ? text : "(null)", part);
    check_broken = 1;
  }
}

/* CHECK of a status; on failure says whose it was. */
#define CHECK_STATUS(status, expected, of) check_status(__FILE__, __LINE__, (status), (expected), (of))

static inline void check_status(const char* file, int line, int status, int expected, const char* of) {
  if (status != expected) {
    printf("%s:%d: %s: status %d, expected %d\n", file, line, of, status, expected);
    check_broken = 1;
  }
}

#define RUN(suite, test)                                                          \
  do {                                                                            \
    check_broken = 0;                                                             \
    test();                                                                       \
    printf("test %s::%s ... %s\n", suite, #test, check_broken ? "FAILED" : "ok"); \
    fflush(stdout);                                                               \
    if (check_broken) {                                                           \
      ++check_failed;                                                             \
    } else {                                                                      \
      ++check_passed;                                                             \
    }                                                                             \
  } while (0)

/* What main returns. A program that ran no test has failed. */
static int check_result(void) {
  const int bad = check_failed != 0 || check_passed == 0;
  printf("test result: %s. %d passed; %d failed; 0 ignored\n", bad ? "FAILED" : "ok", check_passed, check_failed);
  return bad;
}

#endif
