// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/prepare.hpp"
#include "sm80/bwd/traits.hpp"

// Each for the row's kernel, and for the one that packs.
#define HATTN_BWD_SM80_PREPARE(...)                                 \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm80::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm80::BwdTraits, __VA_ARGS__, true)
#define HATTN_BWD_SM80_CONVERT(...)                              \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_CONVERT(hattn::sm80::BwdTraits, __VA_ARGS__, true)
