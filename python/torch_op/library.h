// The library's C ABI, found in a shared library at run time, and a cache of plans.
#pragma once

#include <hopper_attention.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

#include "torch_shim.h"

namespace hattn_torch {

struct Library {
  decltype(&hattn_abi_version) abi_version = nullptr;
  decltype(&hattn_status_name) status_name = nullptr;
  decltype(&hattn_last_error) last_error = nullptr;
  decltype(&hattn_forward_plan_create) forward_plan_create = nullptr;
  decltype(&hattn_forward_plan_destroy) forward_plan_destroy = nullptr;
  decltype(&hattn_forward_plan_workspace_size) forward_plan_workspace_size = nullptr;
  decltype(&hattn_forward_run) forward_run = nullptr;
  decltype(&hattn_backward_plan_create) backward_plan_create = nullptr;
  decltype(&hattn_backward_plan_destroy) backward_plan_destroy = nullptr;
  decltype(&hattn_backward_plan_workspace_size) backward_plan_workspace_size = nullptr;
  decltype(&hattn_backward_run) backward_run = nullptr;

  // Opens the library at `path`. It is never closed.
  explicit Library(const char* path) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error(dlerror());
#define HATTN_LOOK_UP(name) look_up(handle, path, "hattn_" #name, name)
    HATTN_LOOK_UP(abi_version);
    HATTN_LOOK_UP(status_name);
    HATTN_LOOK_UP(last_error);
    HATTN_LOOK_UP(forward_plan_create);
    HATTN_LOOK_UP(forward_plan_destroy);
    HATTN_LOOK_UP(forward_plan_workspace_size);
    HATTN_LOOK_UP(forward_run);
    HATTN_LOOK_UP(backward_plan_create);
    HATTN_LOOK_UP(backward_plan_destroy);
    HATTN_LOOK_UP(backward_plan_workspace_size);
    HATTN_LOOK_UP(backward_run);
#undef HATTN_LOOK_UP
    if (abi_version() != HATTN_ABI_VERSION) {
      throw std::runtime_error(std::string(path) + " has ABI version " + std::to_string(abi_version()) +
                               "; this file is for " + std::to_string(HATTN_ABI_VERSION));
    }
  }

  // Throws the library's words and the status's name unless the status is HATTN_OK.
  void check(hattn_status status) const {
    if (status == HATTN_OK) return;
    throw std::runtime_error(std::string(last_error()) + " (" + status_name(status) + ")");
  }
};

// The functions of a pass, by the type of its problem.
template <typename Problem>
struct Pass;

template <>
struct Pass<hattn_forward_problem> {
  using Plan = hattn_forward_plan;
  using Args = hattn_forward_args;
  static constexpr auto create = &Library::forward_plan_create;
  static constexpr auto destroy = &Library::forward_plan_destroy;
  static constexpr auto workspace_size = &Library::forward_plan_workspace_size;
  static constexpr auto run = &Library::forward_run;
};

template <>
struct Pass<hattn_backward_problem> {
  using Plan = hattn_backward_plan;
  using Args = hattn_backward_args;
  static constexpr auto create = &Library::backward_plan_create;
  static constexpr auto destroy = &Library::backward_plan_destroy;
  static constexpr auto workspace_size = &Library::backward_plan_workspace_size;
  static constexpr auto run = &Library::backward_run;
};

// A plan and the size of its workspace.
template <typename Problem>
class Plan {
 public:
  using Pass = hattn_torch::Pass<Problem>;

  Plan(const Library& library, const Problem& problem, hattn_device device) : library_(library) {
    library.check((library.*Pass::create)(&problem, device, &plan_));
    if (hattn_status status = (library.*Pass::workspace_size)(plan_, &workspace_bytes_); status != HATTN_OK) {
      (library.*Pass::destroy)(plan_);
      library.check(status);
    }
  }
  ~Plan() { (library_.*Pass::destroy)(plan_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // How many hold the plan.
  std::atomic<int64_t> holders{1};
  // Of a forward plan: whether there is a plan for the gradients of its problem, too. False until somebody has looked.
  mutable std::atomic<bool> has_gradients{false};

  size_t workspace_bytes() const { return workspace_bytes_; }
  void run(const typename Pass::Args& args, void* stream) const {
    library_.check((library_.*Pass::run)(plan_, &args, static_cast<CUstream_st*>(stream)));
  }

 private:
  const Library& library_;
  typename Pass::Plan* plan_ = nullptr;
  size_t workspace_bytes_ = 0;
};

// A plan that a call uses. It stays alive as long as somebody holds it.
template <typename Problem>
class HeldPlan {
 public:
  HeldPlan() = default;
  explicit HeldPlan(Plan<Problem>* plan) : plan_(plan) {}
  HeldPlan(const HeldPlan& other) : plan_(other.plan_) {
    if (plan_ != nullptr) plan_->holders.fetch_add(1, std::memory_order_relaxed);
  }
  HeldPlan& operator=(HeldPlan other) {
    std::swap(plan_, other.plan_);
    return *this;
  }
  ~HeldPlan() {
    if (plan_ != nullptr && plan_->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete plan_;
  }
  explicit operator bool() const { return plan_ != nullptr; }
  const Plan<Problem>* operator->() const { return plan_; }

 private:
  Plan<Problem>* plan_ = nullptr;
};

// The plans that were used last, by device and problem. Threads share them.
//
// A problem's hash names a set of places. A new plan takes the place in its set that was used longest ago.
//
// The standard's containers and shared_ptr would do. But with them the file asks for a newer glibc and libstdc++ than
// torch.
template <typename Problem>
class Plans {
 public:
  explicit Plans(const Library& library) : library_(library) {}

  HeldPlan<Problem> get(const Problem& problem, hattn_device device) {
    Place* set = places_[hash(problem, device) % kSets];
    // Held while a plan is made, so that threads which come at once with one problem make one plan.
    std::lock_guard<std::mutex> lock(mutex_);
    Place* place = set;
    for (Place* other = set; other != set + kWays; ++other) {
      if (other->plan && other->device == device && std::memcmp(&other->problem, &problem, sizeof(Problem)) == 0) {
        other->used = ++clock_;
        return other->plan;
      }
      if (other->used < place->used) place = other;
    }
    HeldPlan<Problem> plan(new Plan<Problem>(library_, problem, device));
    place->problem = problem;
    place->device = device;
    place->used = ++clock_;
    place->plan = plan;
    return plan;
  }

 private:
  // Plans are small, and making one costs microseconds once its kernel is loaded: enough for the shapes in use at a
  // time.
  static constexpr size_t kSets = 64, kWays = 4;

  struct Place {
    Problem problem;
    hattn_device device = 0;
    uint64_t used = 0;
    HeldPlan<Problem> plan;
  };

  // The bytes of a problem are its value: it has no padding.
  static_assert(std::is_trivially_copyable_v<Problem> && sizeof(Problem) % sizeof(uint64_t) == 0);
  static uint64_t hash(const Problem& problem, hattn_device device) {
    uint64_t words[sizeof(Problem) / sizeof(uint64_t)];
    std::memcpy(words, &problem, sizeof(words));
    uint64_t hash = static_cast<uint32_t>(device);
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }

  const Library& library_;
  std::mutex mutex_;
  Place places_[kSets][kWays];
  uint64_t clock_ = 0;
};

}  // namespace hattn_torch
