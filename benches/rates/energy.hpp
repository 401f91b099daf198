// The driver's energy counter, through NVML, which is looked for at run time: a machine that compiles has no driver.
#pragma once

#include <dlfcn.h>

#include <limits>
#include <string>

namespace rates {

class EnergyMeter {
 public:
  // For the device at this PCI address. Without NVML, or where the device has no counter, `why_not` says so.
  explicit EnergyMeter(std::string const& pci_address) {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) {
      why_not_ = "libnvidia-ml.so.1 is not here";
      return;
    }
    auto const init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    auto const handle =
        reinterpret_cast<int (*)(char const*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    auto const version = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
    counter_ = reinterpret_cast<Counter>(dlsym(library, "nvmlDeviceGetTotalEnergyConsumption"));
    char text[80] = "";
    unsigned long long millijoules = 0;
    if (init == nullptr || handle == nullptr || version == nullptr || counter_ == nullptr) {
      why_not_ = "this NVML lacks an entry";
    } else if (init() != 0 || handle(pci_address.c_str(), &device_) != 0) {
      why_not_ = "NVML does not find the device";
    } else if (counter_(device_, &millijoules) != 0) {
      why_not_ = "the device has no energy counter";
    } else if (version(text, sizeof text) == 0) {
      driver_ = text;
    }
  }

  std::string const& why_not() const { return why_not_; }
  std::string const& driver() const { return driver_; }

  // Since the driver was loaded; NaN without a counter, which makes every figure derived from it one.
  double joules() const {
    unsigned long long millijoules = 0;
    if (!why_not_.empty() || counter_(device_, &millijoules) != 0) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    return static_cast<double>(millijoules) / 1000;
  }

 private:
  using Counter = int (*)(void*, unsigned long long*);

  Counter counter_ = nullptr;
  void* device_ = nullptr;
  std::string why_not_;
  std::string driver_;
};

}  // namespace rates
