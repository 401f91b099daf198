//! What the cases of all passes have in common, and what comes of a run.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use hopper_attention::DType;
use hopper_attention::reference::tolerance::Ratios;
use hopper_attention::reference::{BackwardReport, Report};
use rayon::prelude::*;

use crate::case::Case;

/// What must come out, which is computed when it is first asked for. Clones share it.
#[derive(Clone)]
pub struct Deferred<E>(Arc<(OnceLock<E>, Maker<E>)>);

type Maker<E> = Box<dyn Fn() -> E + Send + Sync>;

impl<E> Deferred<E> {
    /// What `make` gives.
    pub fn new(make: impl Fn() -> E + Send + Sync + 'static) -> Self {
        Self(Arc::new((OnceLock::new(), Box::new(make))))
    }

    /// Computes it now, if that was not done yet.
    pub fn compute(&self) -> &E {
        let (made, make) = &*self.0;
        // Not in `get_or_init`: a thread that computes in parallel may take another task meanwhile, which asks for it too, and
        // would wait for itself.
        made.get().unwrap_or_else(|| {
            let new = make();
            made.get_or_init(|| new)
        })
    }
}

impl<E: Clone + Send + Sync + 'static> From<E> for Deferred<E> {
    fn from(made: E) -> Self {
        Self::new(move || made.clone())
    }
}

impl<E> Deref for Deferred<E> {
    type Target = E;

    fn deref(&self) -> &E {
        self.compute()
    }
}

impl<E> fmt::Debug for Deferred<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.0.get().is_some() { "Deferred(made)" } else { "Deferred" })
    }
}

/// A case of a pass, prepared for one element type: what forwards and backwards have in common.
pub trait Ready: Clone + Send + Sync + Sized {
    /// What a run writes.
    type Outputs: Send + Sync;

    /// The element type.
    const DTYPE: DType;

    /// Makes the inputs and computes what must come out.
    fn of(case: &Case) -> Self;

    /// The case.
    fn case(&self) -> &Case;

    /// Outputs that were not written yet.
    fn poisoned(&self) -> Self::Outputs;

    /// Runs the CPU backend.
    ///
    /// # Errors
    /// The library's.
    fn compute(&self, outputs: &mut Self::Outputs) -> hopper_attention::Result<()>;

    /// Whether no input was written since `before`, and the outputs were, whole and without a stray write.
    ///
    /// # Errors
    /// What was written that should not have been, or was not written.
    fn check_memory(&self, before: &Self, outputs: &Self::Outputs) -> Result<(), String>;

    /// Holds outputs whose guard bands were found intact against the tolerance.
    fn verdict(&self, outputs: &Self::Outputs) -> Verdict;

    /// The verdict on a run: on its outputs, or on what is wrong already.
    fn verdict_on(&self, ran: Result<Self::Outputs, String>) -> Verdict {
        ran.map_or_else(Verdict::failed, |outputs| self.verdict(&outputs))
    }

    /// Prepares cases on all cores.
    fn all(cases: &[Case]) -> Vec<Self> {
        cases.par_iter().map(Self::of).collect()
    }

    /// What the CPU backend makes of it.
    ///
    /// # Errors
    /// What was refused, or what is wrong with the memory afterwards.
    fn on_cpu(&self) -> Result<Self::Outputs, String> {
        let before = self.clone();
        let mut outputs = self.poisoned();
        self.compute(&mut outputs).map_err(|error| error.to_string())?;
        self.check_memory(&before, &outputs)?;
        Ok(outputs)
    }

    /// The verdict on that.
    fn verdict_on_cpu(&self) -> Verdict {
        self.verdict_on(self.on_cpu())
    }
}

/// What came of one run.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// For each kind of bound the largest error as a fraction of it.
    pub ratios: Ratios,
    /// The report in words.
    pub report: String,
    /// What is wrong, if anything is.
    pub wrong: Option<String>,
}

impl Verdict {
    fn new(ratios: Ratios, passed: bool, report: String) -> Self {
        Self { ratios, wrong: (!passed).then(|| report.clone()), report }
    }

    /// A run that failed before it could be judged.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::new(Ratios::default(), false, why.into())
    }
}

impl From<&Report> for Verdict {
    fn from(report: &Report) -> Self {
        Self::new(report.ratios(), report.passed(), report.to_string())
    }
}

impl From<&BackwardReport> for Verdict {
    fn from(report: &BackwardReport) -> Self {
        Self::new(report.ratios(), report.passed(), report.to_string())
    }
}
