// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/prepare.hpp"
#include "sm90/bwd/traits.hpp"

// Each for the row's kernels, and for the one that packs.
#define HATTN_BWD_SM90_PREPARE(...)                                 \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm90::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_STATISTICS(hattn::sm90::BwdTraits, __VA_ARGS__, true)
#define HATTN_BWD_SM90_CONVERT(...)                              \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, __VA_ARGS__) \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, __VA_ARGS__, true)
