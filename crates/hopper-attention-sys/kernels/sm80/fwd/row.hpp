// The name under which a row's unit and the table know each other.
#pragma once

#include "kernels.hpp"

#define HATTN_FWD_SM80_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages) \
  row_sm80_fwd_##dtype##_##mask##_##dqk##_##dvo##_##tile_m##_##tile_n##_##stages
