// Several translation units with all headers in one program, one of them without exceptions: it links, and each
// computes.
#include "check.h"

int part_a();
int part_b();
int part_without_exceptions();

namespace {

void every_part_computes() {
  CHECK(part_a() == 0);
  CHECK(part_b() == 0);
  CHECK(part_without_exceptions() == 0);
}

}  // namespace

int main() {
  RUN("odr", every_part_computes);
  return check_result();
}
