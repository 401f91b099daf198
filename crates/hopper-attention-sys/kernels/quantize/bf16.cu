// The quantising kernels of one source type.
#include "quantize/launch.hpp"

HATTN_QUANTIZE_INSTANCE(BF16)
