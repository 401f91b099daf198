// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/d_bias.hpp"
#include "common/prepare.hpp"
#include "sm90/bwd/traits.hpp"

#define HATTN_BWD_SM90_PREPARE(...) HATTN_INSTANTIATE_PREPARE(hattn::sm90::BwdTraits, __VA_ARGS__)
#define HATTN_BWD_SM90_CONVERT(dtype, ...)                                    \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, dtype, __VA_ARGS__)       \
  HATTN_INSTANTIATE_CONVERT(hattn::sm90::BwdTraits, dtype, __VA_ARGS__, true) \
  HATTN_INSTANTIATE_BIAS(hattn::sm90::BwdTraits, dtype, __VA_ARGS__)
