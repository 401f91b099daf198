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

/// How many instructions there are of each number of columns: HGMMA, of e4m3 QGMMA.
pub fn columns(compiled: &Compiled) -> BTreeMap<usize, usize> {
    let mut found = BTreeMap::new();
    for line in compiled.lines() {
        // "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24 ;"
        let shape = line.split_once("GMMA.64x").and_then(|(_, shape)| shape.split('x').next()?.parse().ok());
        *found.entry(shape.unwrap_or(0)).or_insert(0) += usize::from(shape.is_some());
    }
    found.retain(|_, count| *count > 0);
    found
}

/// What is wrong with them.
///
/// A forward has products Q K^T, with a column for each key of a block, and P V, with one for each element of V. A backward has
/// five products, with a column for each query or key of a tile, or each element of a vector. `of_places`: instructions beside those,
/// each with a column for each key of a block.
pub fn faults(row: &KernelInfo, of_places: usize, compiled: &Compiled) -> Vec<String> {
    let mut found = columns(compiled);
    let of_keys = found.entry(row.tile_n()).or_insert(0);
    if of_places > *of_keys {
        return vec![format!("{of_keys} products of {} columns, expected {of_places} for places alone", row.tile_n())];
    }
    *of_keys -= of_places;
    if row.dtype() == DType::E4M3 {
        return faults_of_e4m3(row, &found);
    }
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

/// The same of e4m3. An instruction sums along 32 elements. V has eight columns more, of ones: their product is the sum of the
/// weights. The kernels cut P V into parts on purpose, which have all these columns together. A part is no narrower than 40, but
/// for the eight of the sum above head dim 128.
fn faults_of_e4m3(row: &KernelInfo, found: &BTreeMap<usize, usize>) -> Vec<String> {
    let (keys, values) = (row.tile_n(), row.head_dim_vo() + 8);
    let (of_scores, of_output) = (row.head_dim_qk() / 32, keys / 32);
    let narrow = |columns: usize| columns < 40 && !(columns == 8 && row.head_dim_vo() > 128);
    let mut faults: Vec<String> = found
        .iter()
        .filter(|(columns, _)| narrow(**columns))
        .map(|(columns, count)| format!("{count} products of {columns} columns, expected 40 and more"))
        .collect();
    // Parts of P V may be as wide as the scores of a block.
    let wide = found.get(&keys).copied().unwrap_or(0);
    let others: usize =
        found.iter().filter(|(columns, _)| **columns != keys).map(|(columns, count)| columns * count).sum();
    let sound = (1..=16).any(|products| {
        let rest = (products * values * of_output).checked_sub(others).filter(|rest| rest.is_multiple_of(keys));
        let scores = rest.and_then(|rest| wide.checked_sub(rest / keys));
        scores.is_some_and(|scores| scores > 0 && scores.is_multiple_of(of_scores))
    });
    if !sound {
        faults.push(format!(
            "products by columns are {found:?}, expected {of_scores} of {keys} for scores and {of_output} of {values} in parts for O"
        ));
    }
    faults
}

/// Worthless if it passed anything.
#[test]
fn products_of_e4m3_are_told_from_others() {
    let Some(row) = hopper_attention::kernels().iter().find(|row| row.dtype() == DType::E4M3 && row.tile_n() == 128)
    else {
        println!("skipped: no such row of e4m3 operands in this build");
        return;
    };
    let (scores, sums) = (row.head_dim_qk() / 32, row.head_dim_vo() + 8);
    let of = |counts: &[(usize, usize)]| faults_of_e4m3(row, &counts.iter().copied().collect());
    assert_eq!(of(&[(128, 3 * scores), (sums, 8)]), Vec::<String>::new());
    assert!(of(&[(128, 3 * scores + 1), (sums, 8)])[0].contains("expected"));
    assert!(of(&[(128, 3 * scores), (sums, 7)])[0].contains("in parts for O"));
    assert!(of(&[(128, 3 * scores), (sums - 8, 8)])[0].contains("in parts for O"));
    assert!(of(&[(128, 3 * scores), (16, sums / 2)])[0].contains("of 16 columns"));
}
