// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/d_bias.hpp"
#include "common/prepare.hpp"
#include "sm80/bwd/traits.hpp"

#define HATTN_BWD_SM80_PREPARE(...) HATTN_INSTANTIATE_PREPARE(hattn::sm80::BwdTraits, __VA_ARGS__)
#define HATTN_BWD_SM80_CONVERT(dtype, head_dim_qk, head_dim_vo, tile_m, ...)                                    \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__)       \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__, true) \
  HATTN_BWD_SM80_BIAS_##head_dim_qk##_##tile_m(dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__)
#define HATTN_BWD_SM80_BIAS_64_64(...)
#define HATTN_BWD_SM80_BIAS_64_32(...)
#define HATTN_BWD_SM80_BIAS_128_64(...)
#define HATTN_BWD_SM80_BIAS_128_32(dtype, ...) HATTN_INSTANTIATE_BIAS(hattn::sm80::BwdTraits, dtype, __VA_ARGS__)
