// The kernels before and after the backward kernel, for the rows of bwd.def: what their unit consists of.
#pragma once

#include "common/convert.hpp"
#include "common/prepare.hpp"
#include "sm80/bwd/traits.hpp"

// One line a row, and one a row whatever its mask.
#define HATTN_BWD_SM80_PREPARE(dtype, mask, dqk, dvo, tile_m, tile_n, stages) \
  template struct hattn::Prepare<                                             \
      hattn::sm80::BwdTraits<hattn::DType::dtype, hattn::MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>;
#define HATTN_BWD_SM80_CONVERT(dtype, dqk, dvo, tile_m, tile_n, stages) \
  template struct hattn::Convert<                                       \
      hattn::sm80::BwdTraits<hattn::DType::dtype, hattn::MaskClass::Full, dqk, dvo, tile_m, tile_n, stages>>;
