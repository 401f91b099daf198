//! Cases ready to run, results judged, and the table of it all.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::{Display, Write as _};
use std::hash::{Hash as _, Hasher as _};

use hopper_attention::DType;
use hopper_attention::reference::Tensor;
use hopper_attention::reference::tolerance::Ratios;
use rayon::prelude::*;
use serde::Serialize;

use crate::data::{Image, Poison};
use crate::mutations::{self, Subject};
use crate::problems::{Case, Grid};
use crate::say;

pub use hopper_attention_verify::forward::{Outputs, Prepared};
pub use hopper_attention_verify::ready::{Ready, Verdict};

/// A case whose results can be broken on purpose.
pub trait Mutated: Ready {
    /// A result in f64, with something wrong about it.
    type Broken;

    /// Each mutation's name and the report on what it makes of a correct result if that passes all the same. No report where the
    /// result cannot be distinguished from a correct one.
    fn mutated(&self, outputs: &Self::Outputs) -> Vec<(&'static str, Option<Option<String>>)>;

    /// The report on a broken result that passes all the same.
    fn passes(&self, broken: &Self::Broken) -> Option<String>;

    /// A correct result passes, and every mutation of it is caught; counts by name how many there were.
    ///
    /// # Panics
    /// When it does not, or one is not.
    fn catch_all(&self, outputs: &Self::Outputs, place: &dyn Display, applied: &mut BTreeMap<&'static str, usize>) {
        let case = self.case();
        let wrong = self.verdict(outputs).wrong;
        assert!(wrong.is_none(), "{place}, {case}: {}", wrong.unwrap_or_default());
        for (name, passes) in self.mutated(outputs) {
            let applied = applied.entry(name).or_default();
            if let Some(passes) = passes {
                assert!(passes.is_none(), "{place}: not caught: {name}, {case}: {}", passes.unwrap_or_default());
                *applied += 1;
            }
        }
    }
}

impl<T: Poison> Mutated for Prepared<T> {
    type Broken = (Tensor, Vec<f64>);

    fn mutated(&self, outputs: &Outputs<T>) -> Vec<(&'static str, Option<Option<String>>)> {
        let [q, k, v] = self.tensors();
        let (o, lse) = (outputs.o.tensor(), outputs.lse.as_ref().map(Image::values).expect("a case with an LSE"));
        let subject = Subject { problem: &self.problem, q: &q, k: &k, v: &v, o: &o, lse: &lse };
        let judged = |broken: Option<_>| broken.map(|broken| self.passes(&broken));
        mutations::ALL.par_iter().map(|mutation| (mutation.name, judged((mutation.apply)(subject)))).collect()
    }

    fn passes(&self, (o, lse): &Self::Broken) -> Option<String> {
        let report = self.expected.check(o, Some(lse)).expect("matching shapes");
        report.passed().then(|| report.to_string())
    }
}

/// The cases that a test of the CPU backend takes of a long list: all, or of `HATTN_TEST_EVERY=N` about one in N. Which ones
/// follows from the cases themselves, so that no pattern of a list has a part in it, and every run takes the same.
///
/// # Panics
/// Where the variable is no count.
fn share(cases: &[Case]) -> Vec<Case> {
    /// Shorter lists are taken whole.
    const LONG: usize = 60;
    let every: u64 = match std::env::var("HATTN_TEST_EVERY") {
        Ok(text) => text.parse().ok().filter(|&n| n > 0).unwrap_or_else(|| panic!("HATTN_TEST_EVERY is {text:?}")),
        Err(_) => 1,
    };
    if every == 1 || cases.len() < LONG {
        return cases.to_vec();
    }
    let is_taken = |case: &&Case| {
        let mut hasher = DefaultHasher::new();
        case.to_string().hash(&mut hasher);
        hasher.finish().is_multiple_of(every)
    };
    let taken: Vec<_> = cases.iter().filter(is_taken).cloned().collect();
    say(&format!("{} of {} cases (HATTN_TEST_EVERY={every})", taken.len(), cases.len()));
    taken
}

/// The CPU backend's verdict on a case.
pub fn on_cpu<P: Ready>(case: &Case) -> Verdict {
    P::of(case).verdict_on_cpu()
}

/// Every mutation of what the CPU backend makes of these cases is caught, and each applies to four of them at least.
///
/// # Panics
/// Where that is not so.
pub fn catch_on_cpu<P: Mutated>(cases: impl IntoIterator<Item = Case>) {
    let cases: Vec<Case> = cases.into_iter().collect();
    let caught = |case: &Case| {
        let (prepared, mut applied) = (P::of(case), BTreeMap::new());
        let outputs = prepared.on_cpu().unwrap_or_else(|why| panic!("{case}: {why}"));
        prepared.catch_all(&outputs, &"cpu", &mut applied);
        applied
    };
    let mut applied = BTreeMap::<&str, usize>::new();
    for of_case in cases.par_iter().with_max_len(1).map(caught).collect::<Vec<_>>() {
        of_case.into_iter().for_each(|(name, count)| *applied.entry(name).or_default() += count);
    }
    assert!(!applied.is_empty(), "no mutation at all");
    for (mutation, applied) in applied {
        assert!(applied >= 4, "{mutation} applied to {applied} cases only");
    }
}

/// Results by row.
#[derive(Debug)]
pub struct Runner {
    rows: Vec<Tally>,
    failures: Vec<String>,
    failed: usize,
}

/// A row's results.
#[derive(Clone, Debug, Serialize)]
struct Tally {
    row: String,
    cases: usize,
    failed: usize,
    /// For each kind of bound the largest error as a fraction of it, of the cases that passed.
    worst: [Worst; 4],
}

/// The largest error as a fraction of its bound.
#[derive(Clone, Debug, Default, Serialize)]
struct Worst {
    ratio: f64,
    /// The case that has it.
    case: String,
}

/// The kinds of bounds, as a table names them.
const KINDS: [&str; 4] = ["row", "tensor", "rms", "common"];

impl Tally {
    /// The largest error of all kinds.
    fn worst(&self) -> (&'static str, &Worst) {
        let worst = KINDS.into_iter().zip(&self.worst);
        worst.max_by(|(_, a), (_, b)| a.ratio.total_cmp(&b.ratio)).expect("four kinds")
    }
}

/// What is recorded of a run.
#[derive(Serialize)]
struct Record<'a> {
    device: &'a str,
    driver: &'a str,
    grid: &'a str,
    cases: usize,
    failed: usize,
    rows: &'a [Tally],
    failures: &'a [String],
}

/// Failures that are printed and recorded; one broken kernel fails in hundreds of ways.
const FAILURES_KEPT: usize = 40;

impl Runner {
    /// With these rows, by the names that they print.
    pub fn new<R: ToString>(rows: impl IntoIterator<Item = R>) -> Self {
        let rows = rows
            .into_iter()
            .map(|row| Tally { row: row.to_string(), cases: 0, failed: 0, worst: Default::default() })
            .collect();
        Self { rows, failures: Vec::new(), failed: 0 }
    }

    /// Takes a verdict on a row.
    pub fn take(&mut self, row: usize, case: &Case, dtype: DType, verdict: Verdict) {
        let tally = &mut self.rows[row];
        tally.cases += 1;
        match verdict.wrong {
            Some(wrong) => {
                tally.failed += 1;
                self.failed += 1;
                if self.failures.len() < FAILURES_KEPT {
                    self.failures.push(format!("{}: {dtype} {case}: {wrong}", tally.row));
                }
            }
            None => {
                let Ratios { row, tensor, rms, common, .. } = verdict.ratios;
                for (worst, ratio) in tally.worst.iter_mut().zip([row, tensor, rms, common]) {
                    if ratio >= worst.ratio {
                        *worst = Worst { ratio, case: format!("{dtype} {case}") };
                    }
                }
            }
        }
    }

    /// Takes the CPU backend's verdicts on cases, or on a share of them (`share`).
    pub fn take_cpu<P: Ready>(&mut self, row: usize, cases: &[Case]) {
        let cases = share(cases);
        let verdicts: Vec<Verdict> = cases.par_iter().with_max_len(1).map(on_cpu::<P>).collect();
        for (case, verdict) in cases.iter().zip(verdicts) {
            self.take(row, case, P::DTYPE, verdict);
        }
    }

    /// The same of one row, to the end: fails if one of the cases does.
    pub fn all_on_cpu<P: Ready>(what: &str, cases: &[Case]) {
        let mut runner = Self::new([what]);
        runner.take_cpu::<P>(0, cases);
        runner.finish();
    }

    /// Adds all rows up in the only row of another runner.
    pub fn pour_into(self, other: &mut Self) {
        let sum = &mut other.rows[0];
        for row in self.rows {
            sum.cases += row.cases;
            sum.failed += row.failed;
            for (sum, worst) in sum.worst.iter_mut().zip(row.worst) {
                if worst.ratio >= sum.ratio {
                    *sum = Worst { case: format!("{}: {}", row.row, worst.case), ..worst };
                }
            }
        }
        other.failed += self.failed;
        other.failures.extend(self.failures);
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut table = String::from("  cases  failed  error as a share of its bound: row, tensor, rms, common  row\n");
        for tally in &self.rows {
            // Writing to a String cannot fail.
            let _ = write!(table, "{:>7} {:>7}", tally.cases, tally.failed);
            tally.worst.iter().for_each(|worst| {
                let _ = write!(table, " {:>7.3}", worst.ratio);
            });
            let _ = writeln!(table, "  {}", tally.row);
            if let (kind, Worst { case, .. }) = tally.worst()
                && !case.is_empty()
            {
                let _ = writeln!(table, "{:>34}worst ({kind}): {case}", "");
            }
        }
        let cases: usize = self.rows.iter().map(|row| row.cases).sum();
        let _ = write!(table, "{} rows, {cases} cases, {} failed", self.rows.len(), self.failed);
        table
    }

    /// Writes the table as JSON to the path in `HATTN_TEST_RECORD`, with the pass's name before its ending, if there is
    /// one: what is committed of a run on a GPU.
    pub fn record(&self, pass: &str, grid: Grid, device: &str, driver: &str) {
        let Some(path) = std::env::var_os("HATTN_TEST_RECORD") else { return };
        let path = std::path::PathBuf::from(path).with_extension(format!("{pass}.json"));
        let record = Record {
            device,
            driver,
            grid: grid.pick("small", "full"),
            cases: self.rows.iter().map(|row| row.cases).sum(),
            failed: self.failed,
            rows: &self.rows,
            failures: &self.failures,
        };
        let text = serde_json::to_string_pretty(&record).expect("plain data");
        std::fs::write(&path, text + "\n").unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// Prints the table, and fails if a case failed or a row had none.
    pub fn finish(self) {
        say(&self.table());
        for failure in &self.failures {
            say(failure);
        }
        let idle: Vec<_> = self.rows.iter().filter(|row| row.cases == 0).map(|row| &row.row).collect();
        assert!(idle.is_empty(), "rows that took no case: {idle:?}");
        assert!(!self.rows.is_empty(), "no rows at all");
        assert_eq!(self.failed, 0, "cases failed; the first: {}", self.failures[0]);
    }
}
