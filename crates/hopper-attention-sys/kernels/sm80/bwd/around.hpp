// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/d_bias.hpp"
#include "common/prepare.hpp"
#include "sm80/bwd/traits.hpp"

// Each for the row's kernel, and for the one that packs. Rows of class Blocks have none that packs, and a kernel of
// their own after the backward kernel.
#define HATTN_BWD_SM80_PREPARE(dtype, mask, ...) HATTN_BWD_SM80_PREPARE_##mask(dtype, mask, __VA_ARGS__)
#define HATTN_BWD_SM80_PREPARE_BAND(...)                            \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm80::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm80::BwdTraits, __VA_ARGS__, true)
#define HATTN_BWD_SM80_PREPARE_Full(...) HATTN_BWD_SM80_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM80_PREPARE_Causal(...) HATTN_BWD_SM80_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM80_PREPARE_Window(...) HATTN_BWD_SM80_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM80_PREPARE_Blocks(dtype, mask, ...)                          \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm80::BwdTraits, dtype, mask, __VA_ARGS__) \
  template struct hattn::BwdConvert<hattn::sm80::BwdTraits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>;
#define HATTN_BWD_SM80_CONVERT(dtype, head_dim_qk, head_dim_vo, tile_m, ...)                                    \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__)       \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__, true) \
  HATTN_BWD_SM80_BIAS_##head_dim_qk##_##tile_m(dtype, head_dim_qk, head_dim_vo, tile_m, __VA_ARGS__)
#define HATTN_BWD_SM80_BIAS_64_64(...)
#define HATTN_BWD_SM80_BIAS_64_32(...)
#define HATTN_BWD_SM80_BIAS_128_64(...)
#define HATTN_BWD_SM80_BIAS_128_32(dtype, ...) \
  template struct hattn::BwdBiasGradient<      \
      hattn::sm80::BwdTraits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__>>;
