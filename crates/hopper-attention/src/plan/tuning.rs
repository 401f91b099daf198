//! Which kernel was measured to be the fastest for a problem on a GPU: [`Tuning`].

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::select::{Choice, select, select_row};
use crate::arch::DeviceFacts;
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;
use crate::table::KernelInfo;

/// Measurements: the kernels that were the fastest, by version of this library, GPU and problem.
///
/// `hattn tune` writes them, and [`plan_tuned`](ForwardProblem::plan_tuned) reads them. The built-in ranking decides if there
/// is no measurement for a problem, or if this build has no such kernel that computes the problem.
///
/// As text there is one line for each measurement. A line has four fields, separated by tabs:
/// 1. the version of this library;
/// 2. the name of the GPU (the card);
/// 3. the problem, as it prints itself, without the softmax scale, `lse`, the instruction set, `sm_margin` and
///    `workspace_limit`;
/// 4. the kernel, as [`KernelInfo`] prints itself.
///
/// Empty lines and lines that begin with `#` are ignored.
///
/// ```
/// use hopper_attention::{DType, Device, Dims, ForwardProblem, Tuning};
/// # fn main() -> hopper_attention::Result<()> {
/// let text = "0.2.0\tNVIDIA H100 80GB HBM3\tforward bf16 batch 1 seqlen 8x8 heads 1/1 head_dim 8/8 full\tsm90 fwd ...\n";
/// let tuning: Tuning = text.parse()?;
/// let problem = ForwardProblem::builder(DType::BF16, Dims::new(1, 8, 1, 8)).build()?;
/// let plan = problem.plan_tuned(&Device::cpu(), &tuning)?; // the CPU has one way
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    /// From version, card and problem to the kernel.
    rows: BTreeMap<[String; 3], String>,
}

impl Tuning {
    /// Sets the kernel for a problem on a card, for this version of the library. An earlier entry is replaced.
    ///
    /// Problems that differ only in the softmax scale, the LSE, the instruction set, the margin or the limit of the workspace have
    /// one entry.
    pub fn set(&mut self, card: &str, problem: &ForwardProblem, row: &KernelInfo) {
        self.rows.insert(key(card, problem), row.to_string());
    }

    /// The kernel for a problem on a card, as [`KernelInfo`] prints itself. `None` where there is no measurement.
    pub fn row(&self, card: &str, problem: &ForwardProblem) -> Option<&str> {
        if self.rows.is_empty() {
            return None; // Saves making the key: a whole plan takes only a few microseconds.
        }
        self.rows.get(&key(card, problem)).map(String::as_str)
    }

    /// The number of measurements, of all versions and cards.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no measurement.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// As [`select`], but takes the measured kernel if it is among `rows` and computes the problem.
    ///
    /// # Errors
    /// As [`select`].
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPUs have rows to choose from"))]
    pub(crate) fn select(
        &self,
        problem: &ForwardProblem,
        card: &str,
        gpu: &DeviceFacts,
        rows: &[KernelInfo],
    ) -> Result<Choice> {
        let noted = self.row(card, problem).and_then(|name| rows.iter().find(|row| row.to_string() == name));
        let tuned = noted.and_then(|row| select_row(problem, gpu, row, None, rows).ok());
        match tuned {
            Some(choice) => Ok(Choice { tuned: true, ..choice }),
            None => select(problem, gpu, rows),
        }
    }
}

fn key(card: &str, problem: &ForwardProblem) -> [String; 3] {
    [env!("CARGO_PKG_VERSION").into(), card.into(), problem.shape()]
}

impl FromStr for Tuning {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
        let rows = lines.map(|(index, line)| {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                [version, card, shape, row] if fields.iter().all(|field| !field.trim().is_empty()) => {
                    Ok(([version, card, shape].map(String::from), row.into()))
                }
                _ => Err(Error::Value {
                    what: "tuning",
                    got: format!("line {} with {} fields: {line:?}", index + 1, fields.len()),
                    allowed: "version, card, shape and row between tabs".into(),
                }),
            }
        });
        Ok(Self { rows: rows.collect::<Result<_>>()? })
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# The fastest kernel for each shape, measured by `hattn tune`: version, card, shape, kernel.")?;
        self.rows.iter().try_for_each(|([version, card, shape], row)| writeln!(f, "{version}\t{card}\t{shape}\t{row}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, MaskClass, Modifiers, Pass};
    use crate::dtype::DType;
    use crate::mask::Mask;
    use crate::problem::Dims;

    const H100: DeviceFacts = DeviceFacts::h100_sxm();
    const CARD: &str = "NVIDIA H100 80GB HBM3";

    fn rows() -> [KernelInfo; 3] {
        [(192, MaskClass::Causal), (128, MaskClass::Causal), (128, MaskClass::Full)].map(|(tile_m, mask)| KernelInfo {
            row: 0,
            pass: Pass::Forward,
            arch: Arch::Sm90,
            dtype: DType::BF16,
            mask,
            head_dim_qk: 64,
            head_dim_vo: 64,
            tile_m,
            tile_n: 128,
            stages: 2,
            threads: 384,
            smem_bytes: 200 << 10,
            scores: DType::F32,
            split_bytes: 0,
            most_shares: 1,
            sums_bytes: 0,
            packs: false,
            drops: [false; 2],
            adds_bias: [false; 2],
            modifiers: Modifiers::Either,
        })
    }

    fn problem(seqlen: usize) -> ForwardProblem {
        let dims = Dims::new(1, seqlen, 2, 64).with_heads_kv(1);
        ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build().unwrap()
    }

    #[test]
    fn the_noted_row_is_taken_for_its_shape_and_card_alone() {
        let mut tuning = Tuning::default();
        let tile = |tuning: &Tuning, card: &str, problem: &ForwardProblem| {
            let choice = tuning.select(problem, card, &H100, &rows()).unwrap();
            (choice.kernel.tile_m, choice.tuned)
        };
        assert_eq!(tile(&tuning, CARD, &problem(4096)), (128, false));
        tuning.set(CARD, &problem(4096), &rows()[0]);
        assert_eq!(tile(&tuning, CARD, &problem(4096)), (192, true));
        // The LSE and the scale do not change which kernel is the fastest, so the entry holds for this problem too.
        assert_eq!(
            tile(&tuning, CARD, &problem(4096).to_builder().lse(true).softmax_scale(2.0).build().unwrap()),
            (192, true)
        );
        assert_eq!(tile(&tuning, CARD, &problem(8192)), (128, false));
        assert_eq!(tile(&tuning, "another card", &problem(4096)), (128, false));
        let choice = tuning.select(&problem(4096), CARD, &H100, &rows()).unwrap();
        assert!(choice.to_string().contains(", tuned, grid 44 for 44 tiles"), "{choice}");
        tuning.set(CARD, &problem(4096), &rows()[1]);
        assert_eq!((tile(&tuning, CARD, &problem(4096)), tuning.len()), ((128, true), 1));
    }

    #[test]
    fn a_row_that_does_not_fit_or_is_gone_leaves_it_to_the_rule() {
        let mut tuning = Tuning::default();
        tuning.set(CARD, &problem(64), &rows()[2]); // A kernel for full masks. The problem is causal.
        tuning.set(CARD, &problem(65), &KernelInfo { tile_n: 176, ..rows()[0] });
        for seqlen in [64, 65] {
            assert!(tuning.row(CARD, &problem(seqlen)).is_some());
            let ruled = select(&problem(seqlen), &H100, &rows()).unwrap();
            assert_eq!(tuning.select(&problem(seqlen), CARD, &H100, &rows()), Ok(ruled));
        }
        let refused = tuning.select(&problem(64), CARD, &H100, &rows()[2..]).unwrap_err();
        assert_eq!(refused, select(&problem(64), &H100, &rows()[2..]).unwrap_err());
    }

    #[test]
    fn text_and_back() {
        let mut tuning = Tuning::default();
        assert!(tuning.is_empty() && tuning.to_string().parse() == Ok(tuning.clone()));
        for seqlen in [100, 20, 3] {
            tuning.set(CARD, &problem(seqlen), &rows()[1]);
        }
        let text = tuning.to_string();
        assert_eq!(text.parse(), Ok(tuning));
        let line = format!(
            "{}\t{CARD}\tforward bf16 batch 1 seqlen 20x20 heads 2/1 head_dim 64/64 causal\t\
             sm90 fwd bf16 causal head_dim 64/64 tile 128x128 stages 2\n",
            env!("CARGO_PKG_VERSION")
        );
        assert!(text.contains(&line), "{text}");
        // Lines of other versions are kept, and ignored.
        let other: Tuning = line.replacen(env!("CARGO_PKG_VERSION"), "0.0.1", 1).parse().unwrap();
        assert_eq!((other.len(), other.row(CARD, &problem(20))), (1, None));
    }

    #[test]
    fn what_is_no_line_is_refused_with_its_number() {
        for (text, part) in [
            ("# fine\n\n0.1.0\tcard\tshape", "line 3 with 3 fields"),
            ("a\tb\tc\td\te", "with 5"),
            ("a\t\tc\td", "with 4"),
        ] {
            let error = text.parse::<Tuning>().unwrap_err().to_string();
            assert!(error.contains(part) && error.ends_with("version, card, shape and row between tabs"), "{error}");
        }
    }
}
