//! Ways in which gradients of the cases may be broken.

pub mod mutations;

use hopper_attention::reference::BackwardPlain;
use rayon::prelude::*;

use crate::data::{Image, Poison};
use crate::runner::Mutated;
use mutations::Subject;

pub use hopper_attention_verify::backward::{Outputs, Prepared};

impl<T: Poison> Mutated for Prepared<T> {
    type Broken = BackwardPlain;

    fn mutated(&self, outputs: &Outputs<T>) -> Vec<(&'static str, Option<Option<String>>)> {
        let d_lse = self.d_lse.as_ref().map(Image::values);
        let subject = Subject {
            problem: &self.problem,
            q: &self.q.tensor(),
            k: &self.k.tensor(),
            v: &self.v.tensor(),
            d_o: &self.d_o.tensor(),
            d_lse: d_lse.as_deref(),
            honest: &outputs.tensors(),
            noise: self.noise(),
        };
        let judged = |broken: Option<_>| broken.map(|broken| self.passes(&broken));
        mutations::ALL.par_iter().map(|mutation| (mutation.name, judged((mutation.apply)(subject)))).collect()
    }

    fn passes(&self, BackwardPlain { d_q, d_k, d_v, .. }: &BackwardPlain) -> Option<String> {
        let report = self.expected.check(d_q, d_k, d_v).expect("matching shapes");
        report.passed().then(|| report.to_string())
    }
}
