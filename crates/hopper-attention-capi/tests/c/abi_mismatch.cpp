// A program whose header and library are of different versions of the ABI. It is not linked with the library: the one
// below speaks another version, and calling anything else of it is what must not happen.
#include <hopper_attention_lists.hpp>

#include "check.h"

namespace {
int calls = 0;
hattn_status called() {
  ++calls;
  return HATTN_OK;
}
}  // namespace

extern "C" {
uint32_t hattn_abi_version(void) { return HATTN_ABI_VERSION + 1; }
const char* hattn_version(void) { return "9.0.0"; }
const char* hattn_status_name(hattn_status status) { return status == HATTN_ERROR_ABI ? "HATTN_ERROR_ABI" : "?"; }
const char* hattn_last_error(void) { return "the library's own text"; }
hattn_status hattn_device_count(int32_t*) { return called(); }
hattn_status hattn_dropout_mask(float, uint64_t, uint64_t, int64_t, int64_t, int64_t, int64_t, uint8_t*, size_t) {
  return called();
}
hattn_status hattn_forward_supported(const hattn_forward_problem*, hattn_device) { return called(); }
hattn_status hattn_forward_plan_create(const hattn_forward_problem*, hattn_device, hattn_forward_plan**) {
  return called();
}
hattn_status hattn_forward_plan_create_tuned(const hattn_forward_problem*, hattn_device, const hattn_tuning*,
                                             hattn_forward_plan**) {
  return called();
}
void hattn_forward_plan_destroy(hattn_forward_plan*) { ++calls; }
hattn_status hattn_backward_supported(const hattn_backward_problem*, hattn_device) { return called(); }
hattn_status hattn_backward_plan_create(const hattn_backward_problem*, hattn_device, hattn_backward_plan**) {
  return called();
}
void hattn_backward_plan_destroy(hattn_backward_plan*) { ++calls; }
hattn_status hattn_tuning_create(const char*, size_t, hattn_tuning**) { return called(); }
void hattn_tuning_destroy(hattn_tuning*) { ++calls; }
hattn_status hattn_block_lists_from_documents(const hattn_documents*, hattn_block_lists**) { return called(); }
hattn_status hattn_block_lists_arrays(const hattn_block_lists*, hattn_block_arrays*) { return called(); }
void hattn_block_lists_destroy(hattn_block_lists*) { ++calls; }
}

namespace {

void another_abi_version_is_refused_before_anything_is_called() {
  const hattn::ForwardProblem problem(hattn::DType::F32);
  hattn::ForwardPlan plan;
  int count = -1;
  CHECK(hattn::ForwardPlan::create(problem, hattn::Device::cpu(), plan) == hattn::Status::Abi && !plan);
  hattn::Tuning tuning;
  CHECK(hattn::Tuning::create("", 0, tuning) == hattn::Status::Abi && !tuning);
  CHECK(hattn::ForwardPlan::create(problem, hattn::Device::cpu(), tuning, plan) == hattn::Status::Abi && !plan);
  CHECK(problem.supported(hattn::Device::cpu()) == hattn::Status::Abi);
  const hattn::BackwardProblem gradients(problem);
  hattn::BackwardPlan backward;
  CHECK(hattn::BackwardPlan::create(gradients, hattn::Device::cpu(), backward) == hattn::Status::Abi && !backward);
  CHECK(gradients.supported(hattn::Device::cpu()) == hattn::Status::Abi);
  hattn::BlockLists lists;
  const std::int32_t id = 0;
  CHECK(hattn::BlockLists::create(hattn::Documents(1, 1, 1, &id, &id), lists) == hattn::Status::Abi && !lists);
  CHECK(hattn::try_device_count(count) == hattn::Status::Abi && count == -1);
  CHECK(hattn::try_dropout_mask(0.5F, 1, 2, 1, 1, 1, 1, nullptr, 1) == hattn::Status::Abi);
  CHECK_TEXT(hattn::last_error(), "library: ABI version 2; allowed: 1, that of hopper_attention.h");
  bool caught = false;
  try {
    hattn::ForwardPlan(problem, hattn::Device::cpu());
  } catch (const hattn::Error& error) {
    caught = error.status() == hattn::Status::Abi;
    CHECK_TEXT(error.what(), "HATTN_ERROR_ABI: library: ABI version 2");
  }
  CHECK(caught && calls == 0);
}

}  // namespace

int main() {
  RUN("abi_mismatch", another_abi_version_is_refused_before_anything_is_called);
  return check_result();
}
