// The name under which a row's unit and the table know each other.
#pragma once

#include "kernels.hpp"

#define HATTN_FP8_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores, ...) \
  row_sm90_fp8_##dtype##_##mask##_##dqk##_##dvo##_##tile_m##_##tile_n##_##stages##_##scores##_##__VA_ARGS__
