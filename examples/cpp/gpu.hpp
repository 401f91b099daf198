// Memory and streams of a GPU for the examples, by the CUDA runtime. Values are bf16 there.
//
// Include it before hopper_attention.hpp, which knows CUDA's types only if it has seen their headers.
#ifndef EXAMPLE_GPU_HPP
#define EXAMPLE_GPU_HPP

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Memory on the current GPU.
template <class T>
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t count) : count_(count) {
    if (count > 0) check(cudaMalloc(&data_, count * sizeof(T)));
  }
  explicit DeviceMemory(const std::vector<T>& host) : DeviceMemory(host.size()) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceMemory() { static_cast<void>(cudaFree(data_)); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  T* get() const { return static_cast<T*>(data_); }
  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

// A stream that does not wait for the default stream.
class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// To bf16. The floats become what was rounded to, so that a check sees the same inputs.
inline std::vector<__nv_bfloat16> rounded(std::vector<float>& data) {
  std::vector<__nv_bfloat16> out;
  for (float& x : data) {
    out.push_back(__float2bfloat16(x));
    x = __bfloat162float(out.back());
  }
  return out;
}

inline std::vector<float> to_floats(const std::vector<__nv_bfloat16>& data) {
  std::vector<float> out;
  for (const __nv_bfloat16 x : data) out.push_back(__bfloat162float(x));
  return out;
}

#endif  // EXAMPLE_GPU_HPP
