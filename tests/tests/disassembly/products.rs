//! The shapes of an sm90 kernel's matrix products: those of its row, and no smaller ones.
//!
//! A product of 64 rows has one instruction for each 16 elements along which it sums, and N columns: `HGMMA.64xNx16`. A product
//! that the compiler, or a library, cut into smaller ones computes the right numbers slowly.

use std::collections::BTreeMap;

use hopper_attention::{DType, KernelInfo, Pass};

use super::Compiled;

/// How many instructions there are of each number of columns.
pub fn columns(compiled: &Compiled) -> BTreeMap<usize, usize> {
    let mut found = BTreeMap::new();
    for line in compiled.lines() {
        // "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;"
        let shape = line.split_once("HGMMA.64x").and_then(|(_, shape)| shape.split('x').next()?.parse().ok());
        *found.entry(shape.unwrap_or(0)).or_insert(0) += usize::from(shape.is_some());
    }
    found.retain(|_, count| *count > 0);
    found
}

/// What is wrong with them. (e4m3 kernels cut their products on purpose, and are not looked at.)
///
/// A forward has products Q K^T, with a column for each key of a block, and P V, with one for each element of V. A backward has
/// five products, with a column for each query or key of a tile, or each element of a vector.
pub fn faults(row: &KernelInfo, compiled: &Compiled) -> Vec<String> {
    if row.dtype() == DType::E4M3 {
        return Vec::new();
    }
    let found = columns(compiled);
    let (keys, values) = (row.tile_n(), row.head_dim_vo());
    let allowed = match row.pass() {
        Pass::Backward => vec![row.tile_m(), keys, row.head_dim_qk(), values],
        _ => vec![keys, values],
    };
    let mut faults: Vec<String> = found
        .iter()
        .filter(|(columns, _)| !allowed.contains(columns))
        .map(|(columns, count)| format!("{count} products of {columns} columns, expected {allowed:?}"))
        .collect();
    if row.pass() == Pass::Forward {
        // Instructions of one product.
        let (of_scores, of_output) = (row.head_dim_qk() / 16, keys / 16);
        let of = |columns| found.get(&columns).copied().unwrap_or(0);
        let whole = |columns, steps: usize| of(columns) >= steps && of(columns).is_multiple_of(steps);
        let sound = match keys == values {
            true => of(keys) >= of_scores + of_output,
            false => whole(keys, of_scores) && whole(values, of_output),
        };
        if !sound {
            faults.push(format!(
                "products by columns are {found:?}, expected {of_scores} of {keys} for scores and {of_output} of {values} for O"
            ));
        }
    }
    faults
}
