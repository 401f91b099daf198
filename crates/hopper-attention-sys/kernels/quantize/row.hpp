// The name under which a source type's translation unit and the table know each other.
#pragma once

#include "kernels.hpp"

#define HATTN_QUANTIZE_ROW(source) row_quantize_##source
