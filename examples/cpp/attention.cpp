// Attention of made-up data, checked against a plain double loop: on the first GPU if this was built with the CUDA
// runtime and the GPU computes the problem, else on the CPU. Returns 0 when every element is right.
#ifdef EXAMPLE_CUDA
#include "gpu.hpp"
#endif

#include <cmath>
#include <cstdio>
#include <exception>
#include <hopper_attention.hpp>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 2, kSeqlenQ = 100, kSeqlenKv = 150, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 64;

hattn::ForwardProblem problem_of(hattn::DType dtype) {
  return hattn::ForwardProblem(dtype)
      .batch(kBatch)
      .seqlens(kSeqlenQ, kSeqlenKv)
      .heads(kHeadsQ, kHeadsKv)
      .head_dims(kHeadDim, kHeadDim)
      .causal()
      .lse(true);
}

// Everything dense and in the logical order [batch, seqlen, heads, head_dim], on the host.
struct Tensors {
  std::vector<float> q, k, v, o, lse;
};

Tensors made_up(const hattn::ForwardProblem& problem) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  const auto fill = [&](const hattn::Extents& shape) {
    std::vector<float> data(static_cast<std::size_t>(shape.elements()));
    for (float& x : data) x = uniform(random);
    return data;
  };
  return {fill(problem.q_shape()), fill(problem.k_shape()), fill(problem.v_shape()), fill(problem.o_shape()),
          fill(problem.lse_shape())};
}

std::size_t at(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t seqlen, std::int64_t heads) {
  return static_cast<std::size_t>(((b * seqlen + s) * heads + h) * kHeadDim);
}

// The largest distance of O and of the log-sum-exp from the same computation in double.
double distance(const Tensors& t) {
  double worst = 0.0;
  std::vector<double> p(kSeqlenKv);
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t h = 0; h < kHeadsQ; ++h) {
      for (std::int64_t i = 0; i < kSeqlenQ; ++i) {
        const float* q = &t.q[at(b, i, h, kSeqlenQ, kHeadsQ)];
        const std::int64_t h_kv = h / (kHeadsQ / kHeadsKv);
        const std::int64_t keys = i + kSeqlenKv - kSeqlenQ + 1;  // causal: the last query meets the last key
        double sum = 0.0;
        for (std::int64_t j = 0; j < keys; ++j) {
          const float* k = &t.k[at(b, j, h_kv, kSeqlenKv, kHeadsKv)];
          double dot = 0.0;
          for (std::int64_t d = 0; d < kHeadDim; ++d) dot += double{q[d]} * double{k[d]};
          p[static_cast<std::size_t>(j)] = std::exp(dot / std::sqrt(double{kHeadDim}));
          sum += p[static_cast<std::size_t>(j)];
        }
        for (std::int64_t d = 0; d < kHeadDim; ++d) {
          double want = 0.0;
          for (std::int64_t j = 0; j < keys; ++j) {
            want += p[static_cast<std::size_t>(j)] / sum *
                    double{t.v[at(b, j, h_kv, kSeqlenKv, kHeadsKv) + static_cast<std::size_t>(d)]};
          }
          const double got = double{t.o[at(b, i, h, kSeqlenQ, kHeadsQ) + static_cast<std::size_t>(d)]};
          // fmax would overlook a NaN.
          worst = std::isnan(got) ? INFINITY : std::fmax(worst, std::fabs(got - want));
        }
        const double lse = double{t.lse[static_cast<std::size_t>((b * kHeadsQ + h) * kSeqlenQ + i)]};
        worst = std::isnan(lse) ? INFINITY : std::fmax(worst, std::fabs(lse - std::log(sum)));
      }
    }
  }
  return worst;
}

int judge(const char* where, const hattn::ForwardPlan& plan, const Tensors& tensors, double allowed) {
  const double found = distance(tensors);
  std::printf("%s: %s\nlargest error %.2e, allowed %.0e: %s\n", where, plan.describe().c_str(), found, allowed,
              found <= allowed ? "ok" : "WRONG");
  return found <= allowed ? 0 : 1;
}

int on_the_cpu() {
  const hattn::ForwardProblem problem = problem_of(hattn::DType::F32);
  const hattn::Device cpu = hattn::Device::cpu();
  const hattn::ForwardPlan plan(problem, cpu);
  Tensors t = made_up(problem);

  hattn::ForwardArgs args;
  args.q = hattn::ConstTensorView::contiguous(t.q.data(), cpu, problem.q_shape());
  args.k = hattn::ConstTensorView::contiguous(t.k.data(), cpu, problem.k_shape());
  args.v = hattn::ConstTensorView::contiguous(t.v.data(), cpu, problem.v_shape());
  args.o = hattn::TensorView::contiguous(t.o.data(), cpu, problem.o_shape());
  args.lse = hattn::TensorView::contiguous(t.lse.data(), cpu, problem.lse_shape());
  plan.run(args, nullptr);
  return judge("CPU", plan, t, 1e-5);
}

#ifdef EXAMPLE_CUDA
int on_the_gpu(const hattn::ForwardProblem& problem) {
  const hattn::Device gpu = hattn::Device::cuda(0);
  check(cudaSetDevice(0));
  const hattn::ForwardPlan plan(problem, gpu);
  Tensors t = made_up(problem);
  const DeviceMemory<__nv_bfloat16> q(rounded(t.q)), k(rounded(t.k)), v(rounded(t.v)), o(t.o.size());
  const DeviceMemory<float> lse(t.lse.size());
  const DeviceMemory<char> workspace(plan.workspace_bytes());

  hattn::ForwardArgs args;
  args.q = hattn::ConstTensorView::contiguous(q.get(), gpu, problem.q_shape());
  args.k = hattn::ConstTensorView::contiguous(k.get(), gpu, problem.k_shape());
  args.v = hattn::ConstTensorView::contiguous(v.get(), gpu, problem.v_shape());
  args.o = hattn::TensorView::contiguous(o.get(), gpu, problem.o_shape());
  args.lse = hattn::TensorView::contiguous(lse.get(), gpu, problem.lse_shape());
  args.workspace = {workspace.get(), plan.workspace_bytes()};

  const Stream stream;
  check(cudaDeviceSynchronize());  // the copies above went to another stream
  plan.run(args, stream.get());    // enqueues and returns
  stream.wait();

  t.lse = lse.to_host();
  t.o = to_floats(o.to_host());
  // Probabilities and results are rounded to bf16, of 8 bits; values are below 1.
  return judge("GPU", plan, t, 1e-2);
}
#endif

}  // namespace

int main() {
  try {
#ifdef EXAMPLE_CUDA
    const hattn::ForwardProblem problem = problem_of(hattn::DType::BF16);
    if (hattn::ok(problem.supported(hattn::Device::cuda(0)))) return on_the_gpu(problem);
    std::printf("not on the GPU: %s\n", hattn::last_error());
#endif
    return on_the_cpu();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
}
