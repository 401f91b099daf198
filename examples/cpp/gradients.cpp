// Gradients of made-up data, checked against plain double loops: on the first GPU if this was built with the CUDA
// runtime and the GPU computes the problem, else on the CPU. Returns 0 when every element is right.
//
// A training step is two runs. The forward pass writes O and the log-sum-exp. The backward pass reads both, and dO,
// which is the gradient of O. It writes dQ, dK and dV.
#ifdef EXAMPLE_CUDA
#include "gpu.hpp"
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <hopper_attention.hpp>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kSeqlen = 96, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 64;
constexpr std::int64_t kGroup = kHeadsQ / kHeadsKv;  // query heads that read one KV head

hattn::ForwardProblem problem_of(hattn::DType dtype) {
  return hattn::ForwardProblem(dtype)
      .seqlens(kSeqlen, kSeqlen)
      .heads(kHeadsQ, kHeadsKv)
      .head_dims(kHeadDim, kHeadDim)
      .causal()
      .lse(true);  // the backward pass reads it
}

// Where the tensors are, in the logical order [batch, seqlen, heads, head_dim].
template <class T>
struct Tensors {
  T *q, *k, *v, *o, *d_o, *d_q, *d_k, *d_v;
  float* lse;
};

// Both passes. On a GPU they are enqueued on one stream, so the second one waits for the first one there.
template <class T>
void train(const hattn::ForwardProblem& problem, const hattn::ForwardPlan& forward, const hattn::BackwardPlan& backward,
           hattn::Device device, const Tensors<T>& at, hattn::Workspace workspace, CUstream_st* stream) {
  using hattn::ConstTensorView;
  using hattn::TensorView;

  hattn::ForwardArgs args;
  args.q = ConstTensorView::contiguous(at.q, device, problem.q_shape());
  args.k = ConstTensorView::contiguous(at.k, device, problem.k_shape());
  args.v = ConstTensorView::contiguous(at.v, device, problem.v_shape());
  args.o = TensorView::contiguous(at.o, device, problem.o_shape());
  args.lse = TensorView::contiguous(at.lse, device, problem.lse_shape());
  args.workspace = workspace;
  forward.run(args, stream);

  hattn::BackwardArgs gradients;
  gradients.q = args.q;
  gradients.k = args.k;
  gradients.v = args.v;
  gradients.o = args.o;
  gradients.lse = *args.lse;
  gradients.d_o = ConstTensorView::contiguous(at.d_o, device, problem.o_shape());
  gradients.d_q = TensorView::contiguous(at.d_q, device, problem.q_shape());  // written, not added to
  gradients.d_k = TensorView::contiguous(at.d_k, device, problem.k_shape());
  gradients.d_v = TensorView::contiguous(at.d_v, device, problem.v_shape());
  gradients.workspace = workspace;  // the runs are one after the other, so one workspace serves both
  backward.run(gradients, stream);
}

// What is read and what came out, on the host.
struct Results {
  std::vector<float> q, k, v, d_o, d_q, d_k, d_v;
};

Results made_up(const hattn::ForwardProblem& problem) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  const auto fill = [&](const hattn::Extents& shape) {
    std::vector<float> data(static_cast<std::size_t>(shape.elements()));
    for (float& x : data) x = uniform(random);
    return data;
  };
  return {fill(problem.q_shape()), fill(problem.k_shape()), fill(problem.v_shape()), fill(problem.o_shape()),
          fill(problem.q_shape()), fill(problem.k_shape()), fill(problem.v_shape())};
}

// A row of head_dim elements.
std::size_t row(std::int64_t i, std::int64_t h, std::int64_t heads) {
  return static_cast<std::size_t>((i * heads + h) * kHeadDim);
}

double dot(const float* a, const float* b) {
  double sum = 0.0;
  for (std::int64_t d = 0; d < kHeadDim; ++d) sum += double{a[d]} * double{b[d]};
  return sum;
}

// The largest distance of dQ, dK and dV from the same computation in double.
double distance(const Results& t) {
  std::vector<double> d_q(t.d_q.size()), d_k(t.d_k.size()), d_v(t.d_v.size());
  const double scale = 1.0 / std::sqrt(double{kHeadDim});
  for (std::int64_t h = 0; h < kHeadsQ; ++h) {
    for (std::int64_t i = 0; i < kSeqlen; ++i) {
      // Causal: query i reads the keys up to i.
      const std::size_t of_query = row(i, h, kHeadsQ), keys = static_cast<std::size_t>(i) + 1;
      const auto of_key = [&](std::size_t j) { return row(static_cast<std::int64_t>(j), h / kGroup, kHeadsKv); };
      std::vector<double> p(keys), d_p(keys);
      double sum = 0.0, delta = 0.0;
      for (std::size_t j = 0; j < keys; ++j) sum += p[j] = std::exp(scale * dot(&t.q[of_query], &t.k[of_key(j)]));
      for (std::size_t j = 0; j < keys; ++j) {
        p[j] /= sum;
        d_p[j] = dot(&t.d_o[of_query], &t.v[of_key(j)]);
        delta += p[j] * d_p[j];
      }
      for (std::size_t j = 0; j < keys; ++j) {
        const double d_score = scale * p[j] * (d_p[j] - delta);
        for (std::size_t d = 0; d < std::size_t{kHeadDim}; ++d) {
          d_q[of_query + d] += d_score * double{t.k[of_key(j) + d]};
          d_k[of_key(j) + d] += d_score * double{t.q[of_query + d]};
          d_v[of_key(j) + d] += p[j] * double{t.d_o[of_query + d]};
        }
      }
    }
  }
  double worst = 0.0;
  const auto compare = [&](const std::vector<float>& got, const std::vector<double>& want) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      // fmax would overlook a NaN.
      worst = std::isnan(got[i]) ? INFINITY : std::fmax(worst, std::fabs(double{got[i]} - want[i]));
    }
  };
  compare(t.d_q, d_q);
  compare(t.d_k, d_k);
  compare(t.d_v, d_v);
  return worst;
}

int judge(const char* where, const hattn::BackwardPlan& plan, const Results& results, double allowed) {
  const double found = distance(results);
  std::printf("%s: %s\nlargest error %.2e, allowed %.0e: %s\n", where, plan.describe().c_str(), found, allowed,
              found <= allowed ? "ok" : "WRONG");
  return found <= allowed ? 0 : 1;
}

int on_the_cpu() {
  const hattn::Device cpu = hattn::Device::cpu();
  const hattn::ForwardProblem problem = problem_of(hattn::DType::F32);
  const hattn::ForwardPlan forward(problem, cpu);
  const hattn::BackwardPlan backward(hattn::BackwardProblem(problem), cpu);
  Results t = made_up(problem);
  std::vector<float> o(t.d_o.size()), lse(static_cast<std::size_t>(problem.lse_shape().elements()));
  const Tensors<float> at{t.q.data(),   t.k.data(),   t.v.data(),   o.data(),  t.d_o.data(),
                          t.d_q.data(), t.d_k.data(), t.d_v.data(), lse.data()};
  train(problem, forward, backward, cpu, at, {}, nullptr);  // the CPU needs no workspace
  return judge("CPU", backward, t, 1e-5);
}

#ifdef EXAMPLE_CUDA
int on_the_gpu(const hattn::ForwardProblem& problem) {
  using Memory = DeviceMemory<__nv_bfloat16>;
  const hattn::Device gpu = hattn::Device::cuda(0);
  check(cudaSetDevice(0));
  const hattn::ForwardPlan forward(problem, gpu);
  const hattn::BackwardPlan backward(hattn::BackwardProblem(problem), gpu);
  Results t = made_up(problem);
  const Memory q(rounded(t.q)), k(rounded(t.k)), v(rounded(t.v)), d_o(rounded(t.d_o));
  const Memory o(t.d_o.size()), d_q(t.q.size()), d_k(t.k.size()), d_v(t.v.size());
  const DeviceMemory<float> lse(static_cast<std::size_t>(problem.lse_shape().elements()));
  const std::size_t bytes = std::max(forward.workspace_bytes(), backward.workspace_bytes());
  const DeviceMemory<char> workspace(bytes);
  const Tensors<__nv_bfloat16> at{q.get(),   k.get(),   v.get(),   o.get(),  d_o.get(),
                                  d_q.get(), d_k.get(), d_v.get(), lse.get()};
  const Stream stream;
  check(cudaDeviceSynchronize());  // the copies above went to another stream
  train(problem, forward, backward, gpu, at, {workspace.get(), bytes}, stream.get());
  stream.wait();

  t.d_q = to_floats(d_q.to_host());
  t.d_k = to_floats(d_k.to_host());
  t.d_v = to_floats(d_v.to_host());
  // Probabilities, their gradients and results are rounded to bf16, of 8 bits. The largest gradient is 3.6.
  return judge("GPU", backward, t, 3e-2);
}
#endif

}  // namespace

int main() {
  try {
#ifdef EXAMPLE_CUDA
    const hattn::ForwardProblem problem = problem_of(hattn::DType::BF16);
    if (hattn::ok(hattn::BackwardProblem(problem).supported(hattn::Device::cuda(0)))) return on_the_gpu(problem);
    std::printf("not on the GPU: %s\n", hattn::last_error());
#endif
    return on_the_cpu();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
}
