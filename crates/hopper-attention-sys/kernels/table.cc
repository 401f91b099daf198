// The launch table of the sm_90a forward: the rows of fwd.def (as the build trimmed them) in their order. Each row's
// translation unit describes itself; a row listed twice does not link.
#include "sm90/fwd/row.hpp"

namespace hattn {

#define HATTN_FWD_SM90(...) FwdRow HATTN_FWD_SM90_ROW(__VA_ARGS__)() noexcept;
#include "fwd_rows.def"
#undef HATTN_FWD_SM90

FwdTable fwd_table() noexcept {
  static FwdRow const rows[] = {
#define HATTN_FWD_SM90(...) HATTN_FWD_SM90_ROW(__VA_ARGS__)(),
#include "fwd_rows.def"
#undef HATTN_FWD_SM90
  };
  return {rows, sizeof(rows) / sizeof(rows[0])};
}

}  // namespace hattn
