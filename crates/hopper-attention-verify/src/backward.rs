//! Backward passes of the same cases: inputs in guarded memory, and gradients judged.

use hopper_attention::reference::{
    BackwardExpected, BackwardPlain, BackwardReport, Modifiers, Tensor, forward_plain_with,
};
use hopper_attention::{Args, BackwardProblem, DType, Device, Layout, Slot, Stream, TensorMut, Workspace};

use crate::alibi::AlibiImage;
use crate::bias::BiasImage;
use crate::blocks::BlocksImage;
use crate::case::Case;
use crate::data::{Image, Input, Poison, Values};
use crate::dropout;
use crate::modifying::Modifying;
use crate::packing::{read, read_numbers, write};
use crate::ready::{Deferred, Ready, Verdict};
use crate::sinks::SinksImage;

/// A case for one element type, with its inputs in guarded memory and what must come out. O and the LSE are those of the
/// plain computation, so that a backward pass is judged by itself. The LSE has a gradient where the case asks for an LSE. The
/// gradient of sinks is asked for where there are sinks, and that of a bias where there is one.
#[derive(Clone, Debug)]
pub struct Prepared<T> {
    /// The case.
    pub case: Case,
    /// The library's problem.
    pub problem: BackwardProblem,
    /// Queries.
    pub q: Image<T, 4>,
    /// Keys.
    pub k: Image<T, 4>,
    /// Values.
    pub v: Image<T, 4>,
    /// The forward pass's output.
    pub o: Image<T, 4>,
    /// The forward pass's log-sum-exp.
    pub lse: Image<f32, 3>,
    /// The gradient of the output.
    pub d_o: Image<T, 4>,
    /// The gradient of the log-sum-exp, where there is one.
    pub d_lse: Option<Image<f32, 3>>,
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
    pub expected: Deferred<BackwardExpected>,
}

/// The outputs of a run.
#[derive(Clone, Debug)]
pub struct Outputs<T> {
    /// The gradient of the queries.
    pub d_q: Image<T, 4>,
    /// The gradient of the keys.
    pub d_k: Image<T, 4>,
    /// The gradient of the values.
    pub d_v: Image<T, 4>,
    /// The gradient of the sinks, where there are any.
    pub d_sinks: Option<Image<f32, 1>>,
    /// The gradient of the bias, where there is one.
    pub d_bias: Option<BiasImage>,
}

impl<T: Poison> Prepared<T> {
    /// Makes the inputs. What must come out is computed when it is asked for.
    pub fn new(case: &Case) -> Self {
        Self::edited(case, |_, _| {})
    }

    /// The same of inputs that were changed before they are rounded: `edit` gets each.
    pub fn edited(case: &Case, edit: impl Fn(Input, &mut Tensor)) -> Self {
        Self::made(case, case.block_lists(), edit)
    }

    /// The same with other lists of blocks, of the same form.
    pub fn with_lists(case: &Case, blocks: Option<BlocksImage>) -> Self {
        Self::made(case, blocks, |_, _| {})
    }

    fn made(case: &Case, blocks: Option<BlocksImage>, edit: impl Fn(Input, &mut Tensor)) -> Self {
        let forward = case.problem(T::DTYPE);
        let options = BackwardProblem::builder(&forward).d_lse(case.lse).d_sinks(!case.sinks.is_none());
        let problem = options.d_bias(!case.bias.is_none()).build().expect("a type with gradients");
        let sinks = case.sinks.image(case.dims.heads_q, case.seed);
        let alibi = case.alibi.image(case.dims.batch, case.dims.heads_q, case.seed);
        let bias = case.biases();
        let dropout_state = case.dropout_state();
        let modifying = Modifying::of(sinks.as_ref(), alibi.as_ref(), bias.as_ref(), blocks.as_ref(), dropout_state);
        let belonging = case.packing.belonging(&forward);
        let rows = |side: usize| belonging.as_ref().map(|rows| &rows[side]);
        let input = |input, shape| {
            let layout = case.placement.layout(shape, input != Input::Q);
            let side = usize::from(matches!(input, Input::K | Input::V));
            let mut tensor = case.values.tensor(input, shape, case.seed);
            edit(input, &mut tensor);
            Image::<T, 4>::of(&tensor, layout).of_sequences(rows(side), 1)
        };
        let mut q = input(Input::Q, forward.q_shape());
        let mut k = input(Input::K, forward.k_shape());
        let mut v = input(Input::V, forward.v_shape());
        let mut d_o = input(Input::DO, problem.d_o_shape());
        let lengths = case.packing.lengths();
        let plain = forward_plain_with(
            &forward,
            &lengths,
            [&q.tensor(), &k.tensor(), &v.tensor()],
            modifying.modifiers(&forward),
        );
        let plain = plain.expect("matching shapes");
        // The LSE of a query without keys is its sink. With sinks of -inf it tells which queries these are.
        let without_sinks = match (&sinks, case.values) {
            (Some(sinks), Values::Garbage(Input::DO, _)) => {
                let nothing = vec![f64::NEG_INFINITY; sinks.values().len()];
                let modifiers = Modifiers { sinks: Some(&nothing), ..modifying.modifiers(&forward) };
                let inputs = [&q.tensor(), &k.tensor(), &v.tensor()];
                Some(forward_plain_with(&forward, &lengths, inputs, modifiers).expect("matching shapes").lse)
            }
            _ => None,
        };
        let numbers = case.placement.lse_layout(problem.d_lse_shape());
        let d_lse = problem.takes_d_lse().then(|| {
            let [batch, heads, seqlen] = problem.d_lse_shape();
            let values = case.values.tensor(Input::DO, [batch, heads, seqlen, 1], !case.seed);
            Image::holding(values.data(), numbers).of_sequences(rows(0), 2)
        });
        let expected = {
            let inputs = [q.tensor(), k.tensor(), v.tensor(), d_o.tensor()];
            let (problem, packing, d_lse) = (problem.clone(), case.packing.clone(), d_lse.as_ref().map(Image::values));
            Deferred::new(move || {
                let modifiers = modifying.modifiers(problem.forward());
                let inputs = inputs.each_ref();
                BackwardExpected::with(&problem, &packing.lengths(), inputs, d_lse.as_deref(), modifiers, None)
                    .expect("matching shapes")
            })
        };
        for image in [&mut q, &mut k, &mut v, &mut d_o] {
            case.values.fill(image);
        }
        let mut o = plain.o;
        if matches!(case.values, Values::Garbage(Input::DO, _)) {
            // Nobody reads O of a query without keys either.
            let [_, heads, seqlen] = problem.d_lse_shape();
            let lse = without_sinks.as_ref().unwrap_or(&plain.lse);
            for (i, _) in lse.iter().enumerate().filter(|&(_, &lse)| lse == f64::NEG_INFINITY) {
                o.row_mut(i / seqlen / heads, i % seqlen, i / seqlen % heads).fill(f64::NAN);
            }
        }
        let mut o = Image::of(&o, case.placement.layout(forward.o_shape(), false)).of_sequences(rows(0), 1);
        case.values.fill(&mut o);
        let lse = Image::holding(&plain.lse, numbers).of_sequences(rows(0), 2);
        Self {
            case: case.clone(),
            o,
            lse,
            expected,
            problem,
            q,
            k,
            v,
            d_o,
            d_lse,
            sinks,
            alibi,
            bias,
            blocks,
            dropout_state,
        }
    }

    /// Outputs that were not written yet.
    pub fn outputs(&self) -> Outputs<T> {
        let belonging = self.case.packing.belonging(self.problem.forward());
        let output = |shape, side: usize| {
            let image = Image::poisoned(self.case.placement.layout(shape, false));
            image.of_sequences(belonging.as_ref().map(|rows| &rows[side]), 1)
        };
        Outputs {
            d_q: output(self.problem.d_q_shape(), 0),
            d_k: output(self.problem.d_k_shape(), 1),
            d_v: output(self.problem.d_v_shape(), 1),
            d_sinks: self
                .sinks
                .as_ref()
                .map(|_| Image::poisoned(Layout::contiguous([self.case.dims.heads_q]).expect("a short list"))),
            d_bias: self.case.bias_gradient(),
        }
    }

    /// The arguments of a run in host memory.
    pub fn host_args<'a>(&'a self, outputs: &'a mut Outputs<T>) -> Args<'a> {
        let (q, kv) = (self.problem.forward().is_packed_q(), self.problem.forward().is_packed_kv());
        let mut args = self.case.packing.host_args(Args::new());
        if let Some(alibi) = &self.alibi {
            args = alibi.add_to(args);
        }
        if let Some(bias) = &self.bias {
            args = bias.add_to(args);
        }
        if let Some(d_bias) = &mut outputs.d_bias {
            args = d_bias.add_gradient_to(args);
        }
        if let Some(blocks) = &self.blocks {
            args = blocks.add_to(args);
        }
        if let Some(state) = &self.dropout_state {
            args = dropout::add_to(state, args);
        }
        for (slot, image, packed) in [
            (Slot::Q, &self.q, q),
            (Slot::K, &self.k, kv),
            (Slot::V, &self.v, kv),
            (Slot::O, &self.o, q),
            (Slot::DO, &self.d_o, q),
        ] {
            args = read(args, slot, image.inner(), image.layout(), packed);
        }
        args = read_numbers(args, Slot::Lse, self.lse.inner(), self.lse.layout(), q);
        if let Some(d_lse) = &self.d_lse {
            args = read_numbers(args, Slot::DLse, d_lse.inner(), d_lse.layout(), q);
        }
        for (slot, image, packed) in
            [(Slot::DQ, &mut outputs.d_q, q), (Slot::DK, &mut outputs.d_k, kv), (Slot::DV, &mut outputs.d_v, kv)]
        {
            let layout = image.layout();
            args = write(args, slot, image.inner_mut(), layout, packed);
        }
        if let Some((sinks, d_sinks)) = self.sinks.as_ref().zip(outputs.d_sinks.as_mut()) {
            let layout = d_sinks.layout();
            let tensor = TensorMut::host(d_sinks.inner_mut(), layout).expect("a fitting layout");
            args = sinks.add_to(args).write(Slot::DSinks, tensor);
        }
        args
    }

    /// Holds outputs whose guard bands were found intact against the tolerance.
    pub fn judge(&self, outputs: &Outputs<T>) -> BackwardReport {
        let mut all = outputs.tensors();
        let BackwardPlain { d_q, d_k, d_v, d_sinks, d_bias } = &mut all;
        let exact = self.expected.oracle();
        for (got, exact) in [(d_q, &exact.d_q), (d_k, &exact.d_k), (d_v, &exact.d_v)] {
            self.case.values.excuse(got.data_mut(), exact.data());
        }
        // Rows of large garbage may sum to a number.
        for (got, exact) in [(d_sinks, &exact.d_sinks), (d_bias, &exact.d_bias)] {
            self.case.values.excuse(got, exact);
            if matches!(self.case.values, Values::Garbage(..)) {
                // A sum over many rows has infinities of both signs, or of one, as rounding has it.
                for (got, exact) in got.iter_mut().zip(exact) {
                    *got = if got.is_finite() || exact.is_finite() { *got } else { *exact };
                }
            }
        }
        self.expected.check_all(&all).expect("matching shapes")
    }

    /// The root mean square of the plain computation's errors as a share of that of the gradient, for dQ, dK and dV.
    pub fn noise(&self) -> [f64; 3] {
        let (plain, exact) = (self.expected.plain(), self.expected.oracle());
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        [(&plain.d_q, &exact.d_q), (&plain.d_k, &exact.d_k), (&plain.d_v, &exact.d_v)].map(|(plain, exact)| {
            let errors = plain.data().iter().zip(exact.data()).map(|(plain, exact)| plain - exact);
            norm(&mut { errors }) / norm(&mut exact.data().iter().copied())
        })
    }

    /// Whether no input was written since `before`.
    pub fn check_unchanged(&self, before: &Self) -> Result<(), String> {
        let inputs = [&self.q, &self.k, &self.v, &self.o, &self.d_o];
        let then = [&before.q, &before.k, &before.v, &before.o, &before.d_o];
        then.iter().zip(inputs).try_for_each(|(then, now)| then.check_unchanged(now.data()))?;
        before.lse.check_unchanged(self.lse.data())?;
        if let Some((then, now)) = before.sinks.as_ref().zip(self.sinks.as_ref()) {
            now.check_unchanged(then)?;
        }
        if let Some((then, now)) = before.alibi.as_ref().zip(self.alibi.as_ref()) {
            now.check_unchanged(then)?;
        }
        if let Some((then, now)) = before.bias.as_ref().zip(self.bias.as_ref()) {
            now.check_unchanged(then)?;
        }
        if before.blocks != self.blocks {
            return Err("the lists of blocks were changed".into());
        }
        if before.dropout_state != self.dropout_state {
            return Err("the state of dropout was changed".into());
        }
        match (&before.d_lse, &self.d_lse) {
            (Some(then), Some(now)) => then.check_unchanged(now.data()),
            _ => Ok(()),
        }
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
        self.check_unchanged(before)?;
        outputs.check_written()
    }

    fn verdict(&self, outputs: &Outputs<T>) -> Verdict {
        (&self.judge(outputs)).into()
    }
}

impl<T: Poison> Outputs<T> {
    /// Looks at what a run left in them, for what it may not have done.
    pub fn check_written(&self) -> Result<(), String> {
        [&self.d_q, &self.d_k, &self.d_v].into_iter().try_for_each(Image::check_written)?;
        self.d_sinks.as_ref().map_or(Ok(()), Image::check_written)?;
        self.d_bias.as_ref().map_or(Ok(()), BiasImage::check_written)
    }

    /// The gradients as the tolerance reads them.
    pub fn tensors(&self) -> BackwardPlain {
        let d_sinks = self.d_sinks.as_ref().map_or_else(Vec::new, Image::values);
        let d_bias = self.d_bias.as_ref().map_or_else(Vec::new, BiasImage::values);
        BackwardPlain { d_q: self.d_q.tensor(), d_k: self.d_k.tensor(), d_v: self.d_v.tensor(), d_sinks, d_bias }
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::{Mask, bf16};

    use super::*;
    use crate::data::Garbage;
    use crate::sinks::Sinks;

    /// A query without keys has an O' of 0 and an LSE' of the sink. Garbage in its O and its dO reaches no gradient.
    #[test]
    fn garbage_in_queries_without_keys_beside_sinks() {
        let mut spoiled = 0;
        for (turn, garbage) in Garbage::ALL.into_iter().enumerate() {
            for sinks in [Sinks::None, Sinks::Normal, Sinks::Large, Sinks::Mixed] {
                let case = Case::new(40, 13, 16, Mask::causal()).heads(2, 6, 2);
                let values = Values::Garbage(Input::DO, garbage);
                let case = Case { values, sinks, lse: turn % 2 == 0, seed: turn as u64, ..case };
                let prepared = Prepared::<bf16>::new(&case);
                // (The sinks of a case do not change which queries have keys.)
                let is_spoiled = |o: &f64| !o.is_finite() || o.abs() > 1e30;
                let rows = |batch: usize, head: usize| (0..40 - 13).map(move |query| [batch, query, head]);
                let all = (0..2).flat_map(|batch| (0..6).flat_map(move |head| rows(batch, head)));
                let o = prepared.o.tensor();
                for [batch, query, head] in all {
                    assert!(o.row(batch, query, head).iter().all(is_spoiled), "{case}: {batch} {query} {head}");
                    spoiled += 1;
                }
                let wrong = prepared.verdict_on_cpu().wrong;
                assert!(wrong.is_none(), "{case}: {wrong:?}");
            }
        }
        assert_eq!(spoiled, 16 * 2 * 6 * 27);
    }
}
