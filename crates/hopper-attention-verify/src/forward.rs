//! Forward passes of a case: inputs in guarded memory, and outputs judged.

use hopper_attention::reference::{Expected, Report, Tensor, forward_with};
use hopper_attention::{Args, DType, Device, ForwardProblem, Layout, Slot, Stream, TensorMut, Workspace};

use crate::alibi::AlibiImage;
use crate::bias::BiasImage;
use crate::blocks::BlocksImage;
use crate::case::Case;
use crate::data::{Garbage, Image, Input, Poison, Values};
use crate::dropout;
use crate::modifying::Modifying;
use crate::packing::{read, write, write_numbers};
use crate::ready::{Deferred, Ready, Verdict};
use crate::sinks::SinksImage;

/// A case for one element type, with its inputs in guarded memory and what must come out.
#[derive(Clone, Debug)]
pub struct Prepared<T> {
    /// The case.
    pub case: Case,
    /// The library's problem.
    pub problem: ForwardProblem,
    /// Queries.
    pub q: Image<T, 4>,
    /// Keys.
    pub k: Image<T, 4>,
    /// Values.
    pub v: Image<T, 4>,
    /// The attention sinks, where the case has any.
    pub sinks: Option<SinksImage>,
    /// The ALiBi slopes, where the case has any.
    pub alibi: Option<AlibiImage>,
    /// The additive bias, where the case has one.
    pub bias: Option<BiasImage>,
    /// The lists of blocks, where the case has any.
    pub blocks: Option<BlocksImage>,
    /// The words of the seed and the offset of dropout, where the case has any.
    pub dropout_state: Option<[i32; 4]>,
    /// What must come out.
    pub expected: Deferred<Expected>,
}

/// The outputs of a run.
#[derive(Clone, Debug)]
pub struct Outputs<T> {
    /// The output.
    pub o: Image<T, 4>,
    /// The log-sum-exp, where it was asked for.
    pub lse: Option<Image<f32, 3>>,
    /// The maximum logits, where they were asked for.
    pub max_logits: Option<Image<f32, 1>>,
}

impl<T: Poison> Prepared<T> {
    /// Makes the inputs. What must come out is computed when it is asked for.
    pub fn new(case: &Case) -> Self {
        Self::edited(case, |_, _| {})
    }

    /// The same of inputs that were changed before they are rounded: `edit` gets each.
    pub fn edited(case: &Case, edit: impl Fn(Input, &mut Tensor)) -> Self {
        let problem = case.problem(T::DTYPE);
        let belonging = case.packing.belonging(&problem);
        let input = |input, shape| {
            let layout = case.placement.layout(shape, input != Input::Q);
            let side = usize::from(input != Input::Q);
            let mut tensor = case.values.tensor(input, shape, case.seed);
            edit(input, &mut tensor);
            Image::<T, 4>::of(&tensor, layout).of_sequences(belonging.as_ref().map(|rows| &rows[side]), 1)
        };
        let mut q = input(Input::Q, problem.q_shape());
        let mut k = input(Input::K, problem.k_shape());
        let mut v = input(Input::V, problem.v_shape());
        let sinks = case.sinks.image(case.dims.heads_q, case.seed);
        let alibi = case.alibi.image(case.dims.batch, case.dims.heads_q, case.seed);
        let (blocks, bias, dropout_state) = (case.block_lists(), case.biases(), case.dropout_state());
        let inputs = [q.tensor(), k.tensor(), v.tensor()];
        for image in [&mut q, &mut k, &mut v] {
            case.values.fill(image);
        }
        // Rows with a part in garbage are not judged, and have NaN for it up to here. A maximum logit is one of all rows. (Garbage
        // in V is no part of a score. That of rows of no sequence, which `fill` puts into all inputs, has no part in anything.)
        let is_garbage =
            matches!(case.values, Values::Garbage(Input::Q | Input::K, garbage) if garbage != Garbage::Nan);
        let filled = (is_garbage && problem.wants_max_logits()).then(|| [q.tensor(), k.tensor()]);
        let expected = {
            let (problem, packing) = (problem.clone(), case.packing.clone());
            let modifying =
                Modifying::of(sinks.as_ref(), alibi.as_ref(), bias.as_ref(), blocks.as_ref(), dropout_state);
            Deferred::new(move || {
                let modifiers = modifying.modifiers(&problem);
                let (lengths, inputs) = (packing.lengths(), inputs.each_ref());
                let expected = Expected::with(&problem, &lengths, inputs, modifiers, 1.0, None);
                let mut expected = expected.expect("matching shapes");
                if let Some([q, k]) = &filled {
                    let any = Tensor::zeros(problem.v_shape());
                    let oracle = forward_with(&problem, &lengths, [q, k, &any], modifiers);
                    expected.expect_max_logits(oracle.expect("matching shapes").max_logits);
                }
                expected
            })
        };
        Self { case: case.clone(), problem, q, k, v, sinks, alibi, bias, blocks, dropout_state, expected }
    }

    /// Outputs that were not written yet.
    pub fn outputs(&self) -> Outputs<T> {
        let lse = self.case.placement.lse_layout(self.problem.lse_shape());
        let belonging = self.case.packing.belonging(&self.problem);
        let rows = belonging.as_ref().map(|[of_q, _]| of_q);
        let o = Image::poisoned(self.case.placement.layout(self.problem.o_shape(), false));
        Outputs {
            o: o.of_sequences(rows, 1),
            lse: self.problem.wants_lse().then(|| Image::poisoned(lse).of_sequences(rows, 2)),
            max_logits: self
                .problem
                .wants_max_logits()
                .then(|| Image::poisoned(Layout::contiguous([self.case.dims.heads_q]).expect("a short list"))),
        }
    }

    /// The arguments of a run in host memory.
    pub fn host_args<'a>(&'a self, outputs: &'a mut Outputs<T>) -> Args<'a> {
        let (q, kv) = (self.problem.is_packed_q(), self.problem.is_packed_kv());
        let mut args = self.case.packing.host_args(Args::new());
        if let Some(sinks) = &self.sinks {
            args = sinks.add_to(args);
        }
        if let Some(alibi) = &self.alibi {
            args = alibi.add_to(args);
        }
        if let Some(bias) = &self.bias {
            args = bias.add_to(args);
        }
        if let Some(max_logits) = &mut outputs.max_logits {
            let layout = max_logits.layout();
            let tensor = TensorMut::host(max_logits.inner_mut(), layout).expect("a fitting layout");
            args = args.write(Slot::MaxLogits, tensor);
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        if let Some(state) = &self.dropout_state {
            args = dropout::add_to(state, args);
        }
        for (slot, image, packed) in [(Slot::Q, &self.q, q), (Slot::K, &self.k, kv), (Slot::V, &self.v, kv)] {
            args = read(args, slot, image.inner(), image.layout(), packed);
        }
        let layout = outputs.o.layout();
        args = write(args, Slot::O, outputs.o.inner_mut(), layout, q);
        match &mut outputs.lse {
            Some(lse) => {
                let layout = lse.layout();
                write_numbers(args, Slot::Lse, lse.inner_mut(), layout, q)
            }
            None => args,
        }
    }

    /// Holds outputs whose guard bands were found intact against the tolerance.
    pub fn judge(&self, outputs: &Outputs<T>) -> Report {
        let (mut o, mut lse) = (outputs.o.tensor(), outputs.lse.as_ref().map(Image::values));
        let exact = self.expected.oracle();
        self.case.values.excuse(o.data_mut(), exact.o.data());
        if let Some(lse) = &mut lse {
            self.case.values.excuse(lse, &exact.lse);
        }
        let report = match &outputs.max_logits {
            Some(max_logits) => self.expected.check_with(&o, lse.as_deref(), &max_logits.values()),
            None => self.expected.check(&o, lse.as_deref()),
        };
        report.expect("matching shapes")
    }

    /// The inputs as the oracle reads them.
    pub fn tensors(&self) -> [Tensor; 3] {
        [self.q.tensor(), self.k.tensor(), self.v.tensor()]
    }
}

impl<T: Poison> Outputs<T> {
    /// Looks at what a run left in them, for what it may not have done.
    pub fn check_written(&self) -> Result<(), String> {
        self.o.check_written()?;
        self.lse.as_ref().map_or(Ok(()), Image::check_written)?;
        self.max_logits.as_ref().map_or(Ok(()), Image::check_written)
    }
}

impl<T: Poison> Ready for Prepared<T> {
    type Outputs = Outputs<T>;

    const DTYPE: DType = T::DTYPE;

    fn of(case: &Case) -> Self {
        let prepared = Self::new(case);
        prepared.expected.compute();
        prepared
    }

    fn case(&self) -> &Case {
        &self.case
    }

    fn poisoned(&self) -> Outputs<T> {
        self.outputs()
    }

    fn compute(&self, outputs: &mut Outputs<T>) -> hopper_attention::Result<()> {
        let plan = self.problem.plan(&Device::Cpu)?;
        let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
        plan.run(&Stream::Cpu, &mut workspace, self.host_args(outputs))
    }

    fn check_memory(&self, before: &Self, outputs: &Outputs<T>) -> Result<(), String> {
        for (before, after) in [(&before.q, &self.q), (&before.k, &self.k), (&before.v, &self.v)] {
            before.check_unchanged(after.data())?;
        }
        if let Some((before, after)) = before.sinks.as_ref().zip(self.sinks.as_ref()) {
            after.check_unchanged(before)?;
        }
        if let Some((before, after)) = before.alibi.as_ref().zip(self.alibi.as_ref()) {
            after.check_unchanged(before)?;
        }
        if let Some((before, after)) = before.bias.as_ref().zip(self.bias.as_ref()) {
            after.check_unchanged(before)?;
        }
        if before.blocks != self.blocks {
            return Err("the lists of blocks were changed".into());
        }
        if before.dropout_state != self.dropout_state {
            return Err("the state of dropout was changed".into());
        }
        outputs.check_written()
    }

    fn verdict(&self, outputs: &Outputs<T>) -> Verdict {
        (&self.judge(outputs)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layouts::Placement;
    use crate::packing::Packing;
    use hopper_attention::{Mask, bf16};

    /// Garbage in one input and used lengths, where batch entries share K and V: the maximum logits are those of the sequences.
    #[test]
    fn maximum_logits_beside_garbage_in_shared_memory() {
        for garbage in Garbage::ALL {
            for input in [Input::Q, Input::K, Input::V] {
                let packing = Packing { seqused_kv: Some(vec![67, 41]), ..Packing::default() };
                let case = Case {
                    packing,
                    placement: Placement::SharedBatch,
                    values: Values::Garbage(input, garbage),
                    max_logits: true,
                    ..Case::new(6, 90, 16, Mask::Full).heads(2, 2, 2)
                };
                let prepared = Prepared::<bf16>::new(&case);
                if input == Input::V {
                    let logits = &prepared.expected.oracle().max_logits;
                    assert!(logits.iter().all(|logit| logit.value.is_finite()), "{case}");
                }
                let wrong = prepared.verdict_on_cpu().wrong;
                assert!(wrong.is_none(), "{case}: {wrong:?}");
            }
        }
    }
}
