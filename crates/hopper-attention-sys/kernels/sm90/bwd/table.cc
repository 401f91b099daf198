// The launch table of the sm_90a backward: the rows of bwd.def (as the build trimmed them) in their order. Each row's
// translation unit describes itself; a row listed twice does not link.
#include "sm90/bwd/row.hpp"

namespace hattn {

#define HATTN_BWD_SM90(...) BwdRow HATTN_BWD_SM90_ROW(__VA_ARGS__)() noexcept;
#include "bwd_rows.def"
#undef HATTN_BWD_SM90

BwdTable bwd_table() noexcept {
  static BwdRow const rows[] = {
#define HATTN_BWD_SM90(...) HATTN_BWD_SM90_ROW(__VA_ARGS__)(),
#include "bwd_rows.def"
#undef HATTN_BWD_SM90
  };
  return {rows, sizeof(rows) / sizeof(rows[0])};
}

}  // namespace hattn
