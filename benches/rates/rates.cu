// What Hopper's SMs do in a clock: instructions alone, tensor products, instructions beside tensor products, adds to
// L2.
//
// Method. A kernel runs chains of one instruction (or batches of one wgmma) in a loop whose body is nearly nothing
// else; check_sass.py holds the loop's disassembly against what is listed here, because a rate is only as good as the
// count that it is divided by. Time is taken inside the kernel, from the first warp's start to the last warp's end, in
// SM cycles and in nanoseconds. So every rate is one per clock, and stands beside the clock it was taken at. What tells
// of the power, too, runs on all SMs, launch after launch without a pause, between two ticks of the energy counter that
// lie at least kSustainSeconds apart; the counter ticks every 20 to 100 ms. That is long enough for the power cap to
// act and too short for the card to get as warm as it would in hours.
//
//   rates [--only WORD] [--json FILE]     WORD: part of the name of a group or of a row
//   rates --expect                        kernels and the opcodes of their loops, for check_sass.py; needs no GPU
//
// Everything is bounded: loops by their arguments, waits by a deadline.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "adds.hpp"
#include "beside.hpp"
#include "energy.hpp"
#include "instructions.hpp"
#include "products.hpp"
#include "report.hpp"

namespace rates {

struct Instruction {
  char const* name;
  char const* opcodes;
  int instructions_of_trip;
  void (*alone)(Inputs const*, std::uint32_t*, Span*, int);
  void (*beside)(std::uint32_t const*, Inputs const*, std::uint32_t*, BesideResult*, int, int);
};
#define RATES_ROW(name, opcodes, chain, ptx) \
  {#name, opcodes, rates::name::kSteps * kChains * words(opcodes), alone_##name, beside_##name},
Instruction const kInstructions[] = {RATES_INSTRUCTIONS(RATES_ROW)};
#undef RATES_ROW

struct Product {
  char const* name;
  char const* opcode;
  Operands operands;
  double flops;
  // At the tensor pipe's full rate, which is 4096 FLOP a clock of 16-bit types and 8192 of 8-bit ones.
  double cycles;
  void (*kernel)(std::uint32_t const*, std::uint32_t*, Span*, int);
};
#define RATES_ROW(name, shape, n, k, operands, accumulators, source, tail, opcode) \
  {#name, opcode, Operands::operands, 2.0 * 64 * n * k, 0.5 * n, product_##name},
Product const kProducts[] = {RATES_PRODUCTS(RATES_ROW)};
#undef RATES_ROW

// As long as a launch is meant to last: enough for nanoseconds to be counted, and for a launch's own cost not to.
constexpr double kLaunchCycles = 1.5e6;
// Longer where two sides are not of the same length: what runs beside the products goes on for two trips after them.
constexpr double kBesideCycles = 4 * kLaunchCycles;
constexpr double kSustainSeconds = 0.3;
constexpr int kSustainLaunches = 200;

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// An array of the device, zeroes at first; lives as long as the program.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : size_(size) {
    check(cudaMalloc(&data_, size * sizeof(T)));
    zero();
  }
  explicit DeviceArray(std::vector<T> const& from) : DeviceArray(from.size()) {
    check(cudaMemcpy(data_, from.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* get() const { return data_; }
  void zero() { check(cudaMemsetAsync(data_, 0, size_ * sizeof(T))); }
  std::vector<T> read() const {
    std::vector<T> to(size_);
    check(cudaMemcpy(to.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

double megahertz(Span const& span) { return 1000.0 * span.cycles / span.ns; }

Span sum(std::vector<Span> const& spans) {
  Span all{};
  for (Span const& span : spans) {
    all.cycles += span.cycles;
    all.ns += span.ns;
  }
  return all;
}

// Small normal values, as attention's are: what is multiplied decides over the power.
std::vector<std::uint32_t> random_operands(Operands operands) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint32_t> words(kOperandBytes / 4);
  for (std::uint32_t& word : words) {
    float const v[4] = {normal(generator), normal(generator), normal(generator), normal(generator)};
    if (operands == Operands::kBf16) {
      __nv_bfloat162 const pair = __floats2bfloat162_rn(v[0], v[1]);
      std::memcpy(&word, &pair, 4);
    } else if (operands == Operands::kF16) {
      __half2 const pair = __floats2half2_rn(v[0], v[1]);
      std::memcpy(&word, &pair, 4);
    } else {
      word = __nv_fp8x4_e4m3(make_float4(v[0], v[1], v[2], v[3])).__x;
    }
  }
  return words;
}

class Bench {
 public:
  Bench(cudaDeviceProp const& properties, EnergyMeter const& meter, Report& report, std::string only)
      : sms_(properties.multiProcessorCount),
        meter_(meter),
        report_(report),
        only_(std::move(only)),
        inputs_(std::vector<Inputs>{random_inputs()}),
        operands_{DeviceArray<std::uint32_t>(random_operands(Operands::kBf16)),
                  DeviceArray<std::uint32_t>(random_operands(Operands::kF16)),
                  DeviceArray<std::uint32_t>(random_operands(Operands::kE4m3))},
        sink_(static_cast<std::size_t>(sms_) * kMostWarpgroups * kWarpgroup + kMostBesideThreads),
        spans_(sms_),
        beside_(1),
        buffer_(kBufferBytes / sizeof(float)) {
    for (cudaEvent_t& event : done_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }

  void run() {
    alone();
    products();
    sustained();
    beside();
    adds();
  }

 private:
  // What a launch did on the average of many, and what that took.
  struct Sustained {
    double launches_per_second;
    double watts;
    double cycles;
    double mhz;
  };

  // Where the run is: launches that have ended, and when and at which reading of the energy counter that was seen.
  struct Reading {
    int launches;
    double time;
    double joules;
  };

  static Inputs random_inputs() {
    Inputs inputs{};
    // 0.75 and 0.125 in f32, and finite as halves.
    inputs.a = 0x3F400000;
    inputs.b = 0x3E000000;
    for (int j = 0; j < kChains; ++j) {
      inputs.seeds[j] = 0x3F803C00 + j * 0x00130017;
    }
    return inputs;
  }

  bool wanted(char const* group, std::string const& name) const {
    return only_.empty() || std::string(group).find(only_) != std::string::npos ||
           name.find(only_) != std::string::npos;
  }

  Span alone_span(Instruction const& instruction, int trips) {
    spans_.zero();
    instruction.alone<<<1, kMostWarps * kWarp>>>(inputs_.get(), sink_.get(), spans_.get(), trips);
    check(cudaGetLastError());
    return spans_.read()[0];
  }

  void alone() {
    report_.group("alone", "warp instructions a clock and SMSP, and lanes a clock and SM; one SM, 4 warps an SMSP");
    for (Instruction const& instruction : kInstructions) {
      if (wanted("alone", instruction.name)) {
        int const few = 16;
        double const cycles_of_trip = static_cast<double>(alone_span(instruction, few).cycles) / few;
        int const trips = static_cast<int>(kLaunchCycles / cycles_of_trip) + 1;
        Span const span = alone_span(instruction, trips);
        double const rate = static_cast<double>(trips) * instruction.instructions_of_trip * kMostWarps / kPartitions /
                            static_cast<double>(span.cycles);
        report_.row(
            instruction.name,
            {{"per_smsp", rate, 3}, {"lanes_per_sm", rate * kPartitions * kWarp, 1}, {"mhz", megahertz(span), 0}});
      }
    }
  }

  static int batches_of_launch(Product const& product, int warpgroups) {
    return static_cast<int>(kLaunchCycles / (kBatch * product.cycles * warpgroups));
  }

  void launch(Product const& product, int blocks, int warpgroups) {
    check(cudaFuncSetAttribute(product.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    product.kernel<<<blocks, warpgroups * kWarpgroup, kSharedBytes>>>(
        operands_[static_cast<int>(product.operands)].get(), sink_.get(), spans_.get(),
        batches_of_launch(product, warpgroups));
    check(cudaGetLastError());
  }

  static double full_rate_cycles(Product const& product, int warpgroups) {
    return batches_of_launch(product, warpgroups) * kBatch * product.cycles * warpgroups;
  }

  void products() {
    report_.group("products", "wgmma, share of the clock's peak (4096 FLOP a clock and SM, 8192 of 8 bits); one SM");
    for (Product const& product : kProducts) {
      for (int warpgroups = 1; warpgroups <= kMostWarpgroups && wanted("products", product.name); ++warpgroups) {
        spans_.zero();
        launch(product, 1, warpgroups);
        Span const span = spans_.read()[0];
        report_.row(product.name, {{"warpgroups", static_cast<double>(warpgroups), 0},
                                   {"share", full_rate_cycles(product, warpgroups) / span.cycles, 4},
                                   {"mhz", megahertz(span), 0}});
      }
    }
  }

  // Launches until both the time and the number of launches are enough, from one tick of the energy counter to another.
  Sustained sustain(std::function<void()> const& launch) {
    int launched = 0;
    int finished = 0;
    // Two are always in the queue, so that the GPU does not wait for the host.
    auto const advance = [&] {
      for (; launched < finished + 2; ++launched) {
        launch();
        check(cudaEventRecord(done_[launched % 2]));
      }
      check(cudaEventSynchronize(done_[finished % 2]));
      ++finished;
    };
    // A counter that does not exist or stands still costs the energy, not the rate.
    auto const tick = [&] {
      double const before = meter_.joules();
      double const deadline = seconds() + 0.25;
      double joules = before;
      do {
        advance();
        joules = meter_.joules();
      } while (joules == before && seconds() < deadline);
      return Reading{finished, seconds(), joules};
    };
    for (double const warm = seconds() + 0.1; seconds() < warm;) {
      advance();
    }
    Reading const first = tick();
    spans_.zero();
    int const counted_from = launched;
    while (seconds() < first.time + kSustainSeconds || finished < first.launches + kSustainLaunches) {
      advance();
    }
    Reading const last = tick();
    check(cudaDeviceSynchronize());
    Span const span = sum(spans_.read());
    double const time = last.time - first.time;
    double const joules = last.joules - first.joules;
    return {(last.launches - first.launches) / time, joules > 0 ? joules / time : std::nan(""),
            static_cast<double>(span.cycles) / (launched - counted_from) / sms_, megahertz(span)};
  }

  void sustained() {
    int const warpgroups = 2;
    report_.group("sustained", "wgmma without a pause; all SMs, 2 warpgroups each");
    for (Product const& product : kProducts) {
      if (wanted("sustained", product.name)) {
        Sustained const run = sustain([&] { launch(product, sms_, warpgroups); });
        double const tflop = product.flops * kBatch * batches_of_launch(product, warpgroups) * warpgroups * sms_ / 1e12;
        double const tflops = tflop * run.launches_per_second;
        report_.row(product.name, {{"tflops", tflops, 1},
                                   {"mhz", run.mhz, 0},
                                   {"share", full_rate_cycles(product, warpgroups) / run.cycles, 4},
                                   {"watts", run.watts, 0},
                                   {"j_per_tflop", run.watts / tflops, 4}});
      }
    }
  }

  BesideResult beside_result(Instruction const& instruction, int warpgroups, int batches, int most_trips) {
    beside_.zero();
    check(cudaFuncSetAttribute(instruction.beside, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    instruction.beside<<<1, (kMultiplyingWarpgroups + warpgroups) * kWarpgroup, kSharedBytes>>>(
        operands_[static_cast<int>(Operands::kBf16)].get(), inputs_.get(), sink_.get(), beside_.get(), batches,
        most_trips);
    check(cudaGetLastError());
    return beside_.read()[0];
  }

  void beside() {
    report_.group(
        "beside",
        "warp instructions a clock and SMSP, alone and beside 2 warpgroups of bf16 m64n128k16 (A in registers), "
        "and the share of its peak that the tensor pipe has alone and keeps; one SM");
    double const product_cycles = 0.5 * 128 * kBatch * kMultiplyingWarpgroups;
    int const batches = static_cast<int>(kBesideCycles / product_cycles);
    for (Instruction const& instruction : kInstructions) {
      for (int warps = 1; warps <= 2 && wanted("beside", instruction.name); ++warps) {
        auto const rate = [&](BesideResult const& result) {
          return static_cast<double>(result.trips) * instruction.instructions_of_trip / kPartitions /
                 static_cast<double>(result.others.cycles);
        };
        auto const share = [&](BesideResult const& result) {
          return batches * product_cycles / static_cast<double>(result.products.cycles);
        };
        int const few = 16;
        double const cycles_of_trip =
            static_cast<double>(beside_result(instruction, warps, 0, few).others.cycles) / few;
        int const trips = static_cast<int>(kBesideCycles / cycles_of_trip) + 1;
        BesideResult const others = beside_result(instruction, warps, 0, trips);
        BesideResult const products = beside_result(instruction, warps, batches, 0);
        // A bound only: the others stop when the products do, unless those keep less than an eighth of their rate.
        long long const most_trips = 8LL * trips;
        BesideResult const both = beside_result(instruction, warps, batches, static_cast<int>(most_trips));
        if (both.trips >= static_cast<unsigned long long>(most_trips) * warps * kPartitions) {
          throw std::runtime_error(std::string(instruction.name) + " ended before the products beside it");
        }
        report_.row(instruction.name, {{"warps_per_smsp", static_cast<double>(warps), 0},
                                       {"alone", rate(others), 3},
                                       {"beside", rate(both), 3},
                                       {"tensor_alone", share(products), 4},
                                       {"tensor_kept", share(both), 4},
                                       {"mhz", megahertz(both.products), 0}});
      }
    }
  }

  void add(std::string const& name, std::function<void(int)> const& launch) {
    if (wanted("adds", name)) {
      // About 3 TB/s; what it is exactly does not matter to the length of a launch.
      int const passes = static_cast<int>(3e12 * 1e-3 / kBufferBytes);
      Sustained const run = sustain([&] {
        launch(passes);
        check(cudaGetLastError());
      });
      double const terabytes = static_cast<double>(kBufferBytes) * passes * run.launches_per_second / 1e12;
      report_.row(name, {{"tb_per_s", terabytes, 3},
                         {"mhz", run.mhz, 0},
                         {"watts", run.watts, 0},
                         {"j_per_tb", run.watts / terabytes, 2}});
    }
  }

  void adds() {
    report_.group("adds", "f32 added into 8 MiB that stay in L2, payload; all SMs");
    add("red_v4", [&](int passes) { add_v4<<<sms_, kAddThreads>>>(buffer_.get(), spans_.get(), passes); });
    for (int const kib : {1, 4, 16}) {
      add("bulk_" + std::to_string(kib) + "k",
          [&](int passes) { add_bulk<<<sms_, kBulkThreads>>>(buffer_.get(), spans_.get(), passes, kib << 10); });
    }
  }

  int const sms_;
  EnergyMeter const& meter_;
  Report& report_;
  std::string const only_;
  DeviceArray<Inputs> inputs_;
  DeviceArray<std::uint32_t> operands_[3];
  DeviceArray<std::uint32_t> sink_;
  DeviceArray<Span> spans_;
  DeviceArray<BesideResult> beside_;
  DeviceArray<float> buffer_;
  cudaEvent_t done_[2];
};

// A line a loop: the kernel, then the opcodes that one trip of it holds, each with its count.
void print_expected() {
  auto const loop = [](std::string const& kernel, std::string const& opcodes, int count) {
    std::string line = kernel + " " + opcodes;
    std::string const times = "=" + std::to_string(count);
    for (std::size_t at = line.find(' ', kernel.size() + 1); at != std::string::npos; at = line.find(' ', at + 1)) {
      line.insert(at, times);
      at += times.size();
    }
    std::printf("%s%s\n", line.c_str(), times.c_str());
  };
  for (Instruction const& instruction : kInstructions) {
    int const steps = instruction.instructions_of_trip / words(instruction.opcodes);
    loop(std::string("alone_") + instruction.name, instruction.opcodes, steps);
    loop(std::string("beside_") + instruction.name, instruction.opcodes, steps);
    loop(std::string("beside_") + instruction.name, "HGMMA.64x128x16.F32.BF16", kBatch);
  }
  for (Product const& product : kProducts) {
    loop(std::string("product_") + product.name, product.opcode, kBatch);
  }
  loop("add_v4", "REDG.E.ADD.F32x4", 1);
  loop("add_bulk", "UBLKRED", 1);
}

std::string today() {
  std::time_t const time = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&time));
  return text;
}

void measure(std::string const& only, std::string const& json) {
  int devices = 0;
  cudaError_t const error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    throw std::runtime_error(std::string("there is no GPU to measure: ") + cudaGetErrorString(error));
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0));
  if (properties.major != 9 || properties.minor != 0) {
    throw std::runtime_error(std::string(properties.name) + " has compute capability " +
                             std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                             ", and this measures 9.0");
  }
  check(cudaSetDevice(0));
  char address[32];
  check(cudaDeviceGetPCIBusId(address, sizeof address, 0));
  EnergyMeter const meter(address);
  Report report;
  report.fact("card", properties.name);
  report.fact("sms", std::to_string(properties.multiProcessorCount));
  report.fact("driver", meter.driver().empty() ? "-" : meter.driver());
  report.fact("date", today());
  report.fact("energy", meter.why_not().empty() ? "NVML's total energy counter" : "-: " + meter.why_not());
  Bench(properties, meter, report, only).run();
  if (report.empty()) {
    throw std::runtime_error("no group and no row has \"" + only + "\" in its name");
  }
  if (!json.empty()) {
    report.write(json);
  }
}

}  // namespace rates

int main(int argc, char** argv) {
  try {
    std::string only;
    std::string json;
    for (int i = 1; i < argc; ++i) {
      std::string const argument = argv[i];
      if (argument == "--expect") {
        rates::print_expected();
        return 0;
      }
      if ((argument == "--only" || argument == "--json") && i + 1 < argc) {
        (argument == "--only" ? only : json) = argv[++i];
      } else {
        throw std::runtime_error("usage: rates [--only WORD] [--json FILE], not " + argument);
      }
    }
    rates::measure(only, json);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "rates: %s\n", error.what());
    return 1;
  }
  return 0;
}
