//! The shapes of an sm90 kernel's matrix products: those of its row, and no smaller ones. And how their operands lie in shared
//! memory.
//!
//! A product of 64 rows has one instruction for each 16 elements along which it sums, and N columns: `HGMMA.64xNx16`. A product
//! that the compiler, or a library, cut into smaller ones computes the right numbers slowly.

use std::collections::BTreeMap;

use hopper_attention::{DType, KernelInfo, Pass};

use super::Compiled;

/// The upper half of a descriptor of an operand in shared memory, for slabs with rows of 128 bytes and of 64: how they are
/// swizzled, and the bytes of eight rows (`SmemOperand` in `sm90/wgmma.hpp`).
const DESCRIPTORS: [(usize, &str); 2] = [(128, "0x40000040"), (64, "0x80000020")];

/// The bytes of a slab's row: of 64 columns, or of 32 where a head dim is no multiple of 64.
pub fn row_bytes(row: &KernelInfo) -> usize {
    if row.head_dim_qk().is_multiple_of(64) && row.head_dim_vo().is_multiple_of(64) { 128 } else { 64 }
}

/// A descriptor's upper half, of such rows.
pub fn descriptor(row_bytes: usize) -> &'static str {
    DESCRIPTORS.iter().find(|(bytes, _)| *bytes == row_bytes).expect("rows of 64 or 128 bytes").1
}

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
        for (bytes, descriptor) in DESCRIPTORS {
            let made = compiled.lines().filter(|line| line.contains("UMOV") && line.contains(descriptor)).count();
            if (made > 0) != (bytes == row_bytes(row)) {
                faults
                    .push(format!("{made} descriptors of rows of {bytes} bytes, expected rows of {}", row_bytes(row)));
            }
        }
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
