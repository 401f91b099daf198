// Several translation units with all headers in one program: it links, and each computes. One is compiled without
// exceptions, and one with headers of another minor version.
#include "check.h"

int part_a();
int part_b();
int part_without_exceptions();
int part_of_another_version();

namespace {

void every_part_computes() {
  CHECK(part_a() == 0);
  CHECK(part_b() == 0);
  CHECK(part_without_exceptions() == 0);
  CHECK(part_of_another_version() == 0);
}

}  // namespace

int main() {
  RUN("odr", every_part_computes);
  return check_result();
}
