// One plan, many threads: each has its own inputs, outputs, workspace and, on a GPU, its own stream. Their results are
// compared bit by bit with those of one thread that computes everything in turn. On the first GPU if this was built
// with the CUDA runtime and the GPU computes the problem, else on the CPU. Returns 0 when all bits agree.
#ifdef EXAMPLE_CUDA
#include <cuda_runtime_api.h>
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <hopper_attention.hpp>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kThreads = 8;

#ifdef EXAMPLE_CUDA
void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}
#endif

// Memory where the plan is.
class Buffer {
 public:
  Buffer(hattn::Device device, std::size_t bytes) : on_gpu_(!device.is_cpu()), bytes_(bytes) {
#ifdef EXAMPLE_CUDA
    if (on_gpu_ && bytes > 0) check(cudaMalloc(&data_, bytes));
#endif
    if (on_gpu_) return;
    host_.resize(bytes);
    data_ = host_.data();
  }
  ~Buffer() {
#ifdef EXAMPLE_CUDA
    if (on_gpu_) static_cast<void>(cudaFree(data_));
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  void fill(int byte) {
#ifdef EXAMPLE_CUDA
    if (on_gpu_) check(cudaMemset(data_, byte, bytes_));
#endif
    if (!on_gpu_) std::memset(data_, byte, bytes_);
  }
  void write(const std::vector<char>& from) {
#ifdef EXAMPLE_CUDA
    if (on_gpu_) check(cudaMemcpy(data_, from.data(), bytes_, cudaMemcpyHostToDevice));
#endif
    if (!on_gpu_) std::memcpy(data_, from.data(), bytes_);
  }
  std::vector<char> read() const {
    std::vector<char> to(bytes_);
#ifdef EXAMPLE_CUDA
    if (on_gpu_) check(cudaMemcpy(to.data(), data_, bytes_, cudaMemcpyDeviceToHost));
#endif
    if (!on_gpu_) std::memcpy(to.data(), data_, bytes_);
    return to;
  }

 private:
  bool on_gpu_;
  std::size_t bytes_;
  void* data_ = nullptr;
  // Of char, but as vector's allocator gives it: aligned for every element type.
  std::vector<char> host_;
};

// A stream of a thread's own; null on the CPU, which has none.
class Stream {
 public:
  explicit Stream(hattn::Device device) {
#ifdef EXAMPLE_CUDA
    if (!device.is_cpu()) check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
#endif
    static_cast<void>(device);
  }
  ~Stream() {
#ifdef EXAMPLE_CUDA
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
#endif
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUstream_st* get() const { return stream_; }
  void wait() const {
#ifdef EXAMPLE_CUDA
    if (stream_ != nullptr) check(cudaStreamSynchronize(stream_));
#endif
  }

 private:
  CUstream_st* stream_ = nullptr;
};

// What one thread works with. The inputs follow from the seed.
class Lane {
 public:
  Lane(const hattn::ForwardProblem& problem, hattn::Device device, const hattn::ForwardPlan& plan, unsigned seed)
      : q_(device, bytes(problem.q_shape(), problem.dtype())),
        k_(device, bytes(problem.k_shape(), problem.dtype())),
        v_(device, bytes(problem.v_shape(), problem.dtype())),
        o_(device, bytes(problem.o_shape(), problem.dtype())),
        lse_(device, bytes(problem.lse_shape(), hattn::DType::F32)),
        workspace_(device, plan.workspace_bytes()),
        stream_(device) {
    std::mt19937 random(seed);
    for (Buffer* buffer : {&q_, &k_, &v_}) buffer->write(made_up(problem.dtype(), buffer->bytes(), random));
    using hattn::ConstTensorView;
    using hattn::TensorView;
    args_.q = ConstTensorView::contiguous(q_.data(), problem.dtype(), device, problem.q_shape());
    args_.k = ConstTensorView::contiguous(k_.data(), problem.dtype(), device, problem.k_shape());
    args_.v = ConstTensorView::contiguous(v_.data(), problem.dtype(), device, problem.v_shape());
    args_.o = TensorView::contiguous(o_.data(), problem.dtype(), device, problem.o_shape());
    args_.lse = TensorView::contiguous(lse_.data(), hattn::DType::F32, device, problem.lse_shape());
    args_.workspace = {workspace_.data(), workspace_.bytes()};
  }

  // O and the log-sum-exp, computed anew.
  std::vector<char> compute(const hattn::ForwardPlan& plan) {
    poison();
    plan.run(args_, stream_.get());
    stream_.wait();
    std::vector<char> result = o_.read();
    const std::vector<char> lse = lse_.read();
    result.insert(result.end(), lse.begin(), lse.end());
    return result;
  }

 private:
  static std::size_t bytes(const hattn::Extents& shape, hattn::DType dtype) {
    return static_cast<std::size_t>(shape.elements()) * (dtype == hattn::DType::F32 ? sizeof(float) : 2);
  }

  // Numbers between -1 and 1: floats, or their upper halves, which are bf16.
  static std::vector<char> made_up(hattn::DType dtype, std::size_t bytes, std::mt19937& random) {
    std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
    const std::size_t size = dtype == hattn::DType::F32 ? sizeof(float) : 2;
    std::vector<char> data(bytes);
    for (std::size_t at = 0; at < bytes; at += size) {
      const float x = uniform(random);
      std::memcpy(&data[at], reinterpret_cast<const char*>(&x) + sizeof(float) - size, size);
    }
    return data;
  }

  // So that a run that writes nothing is noticed.
  void poison() {
    o_.fill(0xFF);
    lse_.fill(0xFF);
#ifdef EXAMPLE_CUDA
    // A fill is enqueued on the default stream, which the lane's own does not wait for.
    if (stream_.get() != nullptr) check(cudaStreamSynchronize(nullptr));
#endif
  }

  Buffer q_, k_, v_, o_, lse_, workspace_;
  Stream stream_;
  hattn::ForwardArgs args_;
};

int compare(const hattn::ForwardProblem& problem, hattn::Device device, int rounds) {
  const hattn::ForwardPlan plan(problem, device);
  std::printf("%s\n", plan.describe().c_str());

  std::vector<std::vector<char>> expected;
  for (unsigned seed = 0; seed < kThreads; ++seed) {
    expected.push_back(Lane(problem, device, plan, seed).compute(plan));
    // Of other inputs it is another result, and it is not what was there before.
    if (seed > 0 && expected[seed] == expected[0]) throw std::runtime_error("different inputs, one result");
  }

  std::atomic<int> different{0}, failed{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([&, seed] {
      try {
        Lane lane(problem, device, plan, seed);
        for (int round = 0; round < rounds; ++round) {
          if (lane.compute(plan) != expected[seed]) ++different;
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "thread %u failed: %s\n", seed, error.what());
        ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%u threads, %d runs each on one plan: %d results differ, %d threads failed: %s\n", kThreads, rounds,
              different.load(), failed.load(), different + failed == 0 ? "ok" : "WRONG");
  return different + failed == 0 ? 0 : 1;
}

hattn::ForwardProblem problem_of(hattn::DType dtype, std::int64_t batch, std::int64_t seqlen, std::int64_t heads) {
  return hattn::ForwardProblem(dtype)
      .batch(batch)
      .seqlens(seqlen, seqlen + 50)
      .heads(heads, heads / 2)
      .head_dims(64, 64)
      .causal()
      .lse(true);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
    if (rounds < 1) throw std::runtime_error("usage: threads [RUNS EACH, 1 and above]");
#ifdef EXAMPLE_CUDA
    // More tiles than multiprocessors, so that the plan needs a workspace.
    const hattn::ForwardProblem on_gpu = problem_of(hattn::DType::BF16, 2, 1000, 16);
    const hattn::Device gpu = hattn::Device::cuda(0);
    if (hattn::ok(on_gpu.supported(gpu))) return compare(on_gpu, gpu, rounds);
    std::printf("not on the GPU: %s\n", hattn::last_error());
#endif
    return compare(problem_of(hattn::DType::F32, 1, 100, 4), hattn::Device::cpu(), rounds);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
}
