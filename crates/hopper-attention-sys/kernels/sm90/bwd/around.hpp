// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/d_bias.hpp"
#include "common/prepare.hpp"
#include "sm90/bwd/traits.hpp"

// Each for the row's kernels, and for the one that packs. Rows of class Blocks have none that packs, and a kernel of
// their own after the backward kernel.
#define HATTN_BWD_SM90_PREPARE(dtype, mask, ...) HATTN_BWD_SM90_PREPARE_##mask(dtype, mask, __VA_ARGS__)
#define HATTN_BWD_SM90_PREPARE_BAND(...)                            \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm90::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm90::BwdTraits, __VA_ARGS__, true)
#define HATTN_BWD_SM90_PREPARE_Full(...) HATTN_BWD_SM90_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM90_PREPARE_Causal(...) HATTN_BWD_SM90_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM90_PREPARE_Window(...) HATTN_BWD_SM90_PREPARE_BAND(__VA_ARGS__)
#define HATTN_BWD_SM90_PREPARE_Blocks(dtype, mask, ...)                          \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm90::BwdTraits, dtype, mask, __VA_ARGS__) \
  template struct hattn::BwdConvert<hattn::sm90::BwdTraits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>;
#define HATTN_BWD_SM90_CONVERT(dtype, ...)                                    \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, dtype, __VA_ARGS__)       \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, dtype, __VA_ARGS__, true) \
  template struct hattn::BwdBiasGradient<                                     \
      hattn::sm90::BwdTraits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__>>;
