// The kernels that run before and after a backward kernel, as its launch sees them.
//
// bwd_statistics (prepare.hpp) and bwd_convert (convert.hpp) depend on fewer columns than a row has. They are
// compiled once for all the rows of a list, in a unit of their own. A row's unit calls the functions declared here; the
// other unit defines them (HATTN_INSTANTIATE_*).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.hpp"

namespace hattn {

// The progress of a block of queries that no tile of keys visits.
constexpr int kUnvisited = -(1 << 30);

// bwd_statistics of one row's traits.
template <class Traits>
struct BwdStatistics {
  // Loads the kernel's module on the current device.
  static Status load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

// bwd_convert of `Traits::Unmasked`: it does not depend on the mask.
template <class Traits>
struct BwdConvert {
  static Status load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

}  // namespace hattn

// What the unit around a list says once a row, with the list's traits template and the row's columns.
#define HATTN_INSTANTIATE_STATISTICS(Traits, dtype, mask, ...) \
  template struct hattn::BwdStatistics<Traits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>;
// And once for all rows that differ by their mask alone, with the columns but the mask.
#define HATTN_INSTANTIATE_CONVERT(Traits, dtype, ...) \
  template struct hattn::BwdConvert<Traits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__>>;
