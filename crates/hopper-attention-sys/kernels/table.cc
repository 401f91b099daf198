// The launch tables: the rows of every architecture's list (as the build trimmed them), list after list and in their
// order. Each row is described in the unit that compiles it; a row listed twice does not compile.
#include "common/row.hpp"
#include "quantize/row.hpp"
#include "sm90/fp8/row.hpp"

namespace hattn {

#define HATTN_FWD_SM90(...) FwdRow HATTN_ROW(sm90_fwd, __VA_ARGS__)() noexcept;
#define HATTN_FP8_SM90(...) FwdRow HATTN_FP8_SM90_ROW(__VA_ARGS__)() noexcept;
#define HATTN_FWD_SM80(...) FwdRow HATTN_ROW(sm80_fwd, __VA_ARGS__)() noexcept;
#define HATTN_BWD_SM90(...) BwdRow HATTN_ROW(sm90_bwd, __VA_ARGS__)() noexcept;
#define HATTN_BWD_SM80(...) BwdRow HATTN_ROW(sm80_bwd, __VA_ARGS__)() noexcept;
#include "bwd_rows.def"
#include "fwd_rows.def"
#define HATTN_QUANTIZE(source) QuantizeRow HATTN_QUANTIZE_ROW(source)() noexcept;
#include "quantize_rows.def"
#undef HATTN_QUANTIZE
#undef HATTN_FWD_SM90
#undef HATTN_FP8_SM90
#undef HATTN_FWD_SM80
#undef HATTN_BWD_SM90
#undef HATTN_BWD_SM80

#define HATTN_FWD_SM90(...) HATTN_ROW(sm90_fwd, __VA_ARGS__)(),
#define HATTN_FP8_SM90(...) HATTN_FP8_SM90_ROW(__VA_ARGS__)(),
#define HATTN_FWD_SM80(...) HATTN_ROW(sm80_fwd, __VA_ARGS__)(),
#define HATTN_BWD_SM90(...) HATTN_ROW(sm90_bwd, __VA_ARGS__)(),
#define HATTN_BWD_SM80(...) HATTN_ROW(sm80_bwd, __VA_ARGS__)(),

// One element more than there are rows, which may be none.
Table<FwdRow> fwd_table() noexcept {
  static FwdRow const rows[] = {
#include "fwd_rows.def"
      {}};
  return {rows, sizeof(rows) / sizeof(rows[0]) - 1};
}

#define HATTN_QUANTIZE(source) HATTN_QUANTIZE_ROW(source)(),
Table<QuantizeRow> quantize_table() noexcept {
  static QuantizeRow const rows[] = {
#include "quantize_rows.def"
      {}};
  return {rows, sizeof(rows) / sizeof(rows[0]) - 1};
}

Table<BwdRow> bwd_table() noexcept {
  static BwdRow const rows[] = {
#include "bwd_rows.def"
      {}};
  return {rows, sizeof(rows) / sizeof(rows[0]) - 1};
}

}  // namespace hattn
