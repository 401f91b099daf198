// Times variants of one e4m3 row in turn (build.sh makes them), and compares each with the first: O relative, LSE
// absolute.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.hpp"
using namespace hattn;
#define CK(x)                                                        \
  do {                                                               \
    cudaError_t e_ = (x);                                            \
    if (e_ != cudaSuccess) {                                         \
      printf("cuda %s line %d\n", cudaGetErrorString(e_), __LINE__); \
      exit(1);                                                       \
    }                                                                \
  } while (0)
__device__ unsigned hash_(unsigned x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ (x >> 16);
}
__global__ void fill(__nv_fp8_e4m3* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned a = hash_((unsigned)i * 2 + seed), b = hash_((unsigned)i * 2 + 1 + seed * 7919);
    float u = (a + 1.0f) * 2.3283e-10f, v = b * 2.3283e-10f;
    p[i] = __nv_fp8_e4m3(sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}
__global__ void fillf(float* p, int n, unsigned seed) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] = 0.9f + (hash_(i + seed) % 1000) * 0.0002f;
}
__global__ void diff(const __nv_bfloat16* a, const __nv_bfloat16* b, size_t n, double* out) {
  double s = 0, t = 0;
  unsigned bad = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float x = a[i], y = b[i];
    if (!isfinite(x))
      bad++;
    else {
      s += (double)(x - y) * (x - y);
      t += (double)y * y;
    }
  }
  atomicAdd(out, s);
  atomicAdd(out + 1, t);
  atomicAdd(out + 2, (double)bad);
}
__global__ void difff(const float* a, const float* b, size_t n, float* out) {
  float m = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    float d = fabsf(a[i] - b[i]);
    if (!(d <= m)) m = d;
  }
  atomicMax((int*)out, __float_as_int(m));
}
struct Variant {
  std::string name;
  FwdRow row;
  bool drawn;     // tiles in drawn order, as causal ones are
  bool blocks;    // factors per block
  FwdRow behind;  // launched behind it, where there is one
};
FwdRow row_of(std::string const& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    printf("%s\n", dlerror());
    exit(1);
  }
  FwdRow row = ((FwdRow(*)())dlsym(library, "variant_row"))();
  Status s = row.prepare();
  if ((int)s.code) {
    printf("prepare %s %d %d\n", path.c_str(), (int)s.code, s.detail);
    exit(1);
  }
  return row;
}
int main(int argc, char** argv) {
  int dim = atoi(argv[1]), iters = atoi(argv[2]);
  std::vector<Variant> vs[2];
  for (int i = 3; i < argc; ++i) {
    char order = (char)tolower(argv[i][0]);
    int m = order == 'c';
    std::string n = argv[i] + 2;
    size_t plus = n.find('+');
    FwdRow behind{};
    if (plus != std::string::npos) {
      behind = row_of(n.substr(plus + 1));
      n.resize(plus);
    }
    FwdRow r = row_of(n);
    n = n.substr(n.rfind('/') + 1) + (behind.launch ? " +" : "");
    bool blocks = order != argv[i][0];
    n += std::string(order == 'd' ? " drawn" : "") + (blocks ? " blocks" : "");
    vs[m].push_back({n, r, order != 'f', blocks, behind});
  }
  int dev_sms;
  CK(cudaDeviceGetAttribute(&dev_sms, cudaDevAttrMultiProcessorCount, 0));
  int heads = 2048 / dim;
  size_t tokens = 16384, n = tokens * heads * dim;
  __nv_fp8_e4m3 *q, *k, *v;
  __nv_bfloat16 *o, *ref;
  float *lse, *lref, *f;
  char *counter, *flush;
  double* acc;
  CK(cudaMalloc(&q, n));
  CK(cudaMalloc(&k, n));
  CK(cudaMalloc(&v, n));
  CK(cudaMalloc(&o, 2 * n));
  CK(cudaMalloc(&ref, 2 * n));
  CK(cudaMalloc(&lse, tokens * heads * 4));
  CK(cudaMalloc(&lref, tokens * heads * 4));
  CK(cudaMalloc(&f, 4 << 20));
  CK(cudaMalloc(&counter, 32 << 20));
  CK(cudaMalloc(&flush, 256 << 20));
  CK(cudaMalloc(&acc, 64));
  fill<<<1024, 256>>>(q, n, 1);
  fill<<<1024, 256>>>(k, n, 2);
  fill<<<1024, 256>>>(v, n, 3);
  fillf<<<1024, 256>>>(f, 1 << 20, 4);
  float one[1] = {1.0f};
  CK(cudaMemcpy(f, one, 4, cudaMemcpyHostToDevice));
  CK(cudaDeviceSynchronize());
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<int> lens;
  {
    const char* e = getenv("LENS");
    std::string s = e ? e : "512,1024,2048,4096,8192,16384";
    for (size_t p = 0; p < s.size();) {
      lens.push_back(atoi(s.c_str() + p));
      p = s.find(',', p);
      if (p == std::string::npos) break;
      ++p;
    }
  }
  for (int m = 0; m < 2; ++m)
    for (int len : lens) {
      if (vs[m].empty()) continue;
      int batch = tokens / len;
      auto params = [&](Variant const& variant, FwdRow const& r) {
        FwdParams p{};
        p.output = DType::BF16;
        p.descale_q_group = 1;
        auto d = [&](void* x) {
          return TensorDesc{(uint64_t)x, (int64_t)len * heads * dim, (int64_t)heads * dim, dim};
        };
        p.q = d(q);
        p.k = d(k);
        p.v = d(v);
        p.o = d(o);
        p.lse = {(uint64_t)lse, (int64_t)heads * len, 1, len};
        p.batch = batch;
        p.heads_q = p.heads_kv = heads;
        p.seqlen_q = p.seqlen_kv = len;
        p.head_dim_qk = p.head_dim_vo = dim;
        p.softmax_scale = 1 / sqrtf(dim);
        p.window_left = 1 << 30;
        p.window_right = m ? 0 : 1 << 30;
        int tiles = (len + r.info.tile_m - 1) / r.info.tile_m * heads * batch;
        p.grid = std::min(tiles, dev_sms);
        // As plan/select.rs orders tiles, for 132 multiprocessors and their cache.
        int bh = heads * batch;
        long bytes = (long)len * 2 * dim;
        if (m == 0) {
          p.heads_per_group = 1;
          p.groups = bh;
        } else {
          int g = std::min(16, bh);
          int last = (int)std::min(64L, std::max(16L, (32L << 20) / bytes));
          p.heads_per_group = g;
          p.groups = std::max(0, bh - last) / g + 1;
        }
        bool behind = &r == &variant.behind;
        if (r.info.scores == Scores::F16 || behind) {
          p.range_check = (uint64_t)counter;
          p.range_grid =
              std::min((len + variant.row.info.tile_m - 1) / variant.row.info.tile_m * heads * batch, dev_sms);
        }
        if (variant.drawn && tiles > p.grid) p.tile_counter = (uint64_t)counter + (behind ? 4 : 0);
        int rest = tiles % p.grid;
        if (m == 0 && !behind && p.tile_counter && r.info.split_bytes && rest && tiles / 2 >= p.grid &&
            (p.grid - rest) * ((len + 127) / 128) >= p.grid * 20) {
          p.split_tiles = p.grid + rest;
        }
        TensorDesc* all[] = {&p.descale_q, &p.descale_k, &p.descale_v};
        for (int i = 0; i < 3; ++i) {
          *all[i] = {(uint64_t)f, 0, 0, 0};
          if (variant.blocks) {
            int nb = (len + 127) / 128;
            *all[i] = {(uint64_t)(f + (i + 1) * (1 << 16)), (int64_t)nb * heads, 1, nb};
          }
        }
        return p;
      };
      auto launch = [&](Variant const& variant) {
        Status s = variant.row.launch(params(variant, variant.row), nullptr);
        if ((int)s.code == 0 && variant.behind.launch) {
          s = variant.behind.launch(params(variant, variant.behind), nullptr);
        }
        if ((int)s.code) {
          printf("launch %d %d\n", (int)s.code, s.detail);
          exit(1);
        }
      };
      std::vector<std::vector<float>> ms(vs[m].size());
      std::vector<std::string> checks;
      for (size_t i = 0; i < vs[m].size(); ++i) {
        CK(cudaMemset(o, 0xff, 2 * n));
        CK(cudaMemset(lse, 0xff, tokens * heads * 4));
        launch(vs[m][i]);
        CK(cudaDeviceSynchronize());
        if (i == 0) {
          CK(cudaMemcpy(ref, o, 2 * n, cudaMemcpyDeviceToDevice));
          CK(cudaMemcpy(lref, lse, tokens * heads * 4, cudaMemcpyDeviceToDevice));
        }
        CK(cudaMemset(acc, 0, 64));
        diff<<<1024, 256>>>(o, ref, n, acc);
        difff<<<1024, 256>>>(lse, lref, tokens * heads, (float*)(acc + 4));
        double h[8];
        CK(cudaMemcpy(h, acc, 64, cudaMemcpyDeviceToHost));
        float l;
        memcpy(&l, h + 4, 4);
        char t[99];
        snprintf(t, 99, "rms %.4f bad %.0f lse %.1e", sqrt(h[0] / h[1]), h[2], l);
        checks.push_back(t);
      }
      for (int it = 0; it < iters; ++it)
        for (size_t i = 0; i < vs[m].size(); ++i) {
          CK(cudaMemset(flush, it, 256 << 20));
          CK(cudaDeviceSynchronize());
          usleep(600);
          cudaEventRecord(a);
          launch(vs[m][i]);
          cudaEventRecord(b);
          CK(cudaDeviceSynchronize());
          float t;
          cudaEventElapsedTime(&t, a, b);
          ms[i].push_back(t);
        }
      double flops = 4.0 * len * (double)len * dim * heads * batch * (m ? 0.5 : 1);
      for (size_t i = 0; i < vs[m].size(); ++i) {
        std::sort(ms[i].begin(), ms[i].end());
        float t = ms[i][iters / 2];
        printf("%s %5d d%d %-34s %8.4f ms %6.0f TFLOP/s  %s\n", m ? "causal" : "full  ", len, dim,
               vs[m][i].name.c_str(), t, flops / t / 1e9, checks[i].c_str());
      }
      fflush(stdout);
    }
}
