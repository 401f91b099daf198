//! The unsafe layer on the CPU: it computes what it is given by address, and refuses what is wrong before anything is
//! written.

use std::ffi::c_void;
use std::ptr::null_mut;

use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    BackwardProblem, DType, Device, DeviceFacts, Dims, E4M3, Element, Error, ForwardPlan, ForwardProblem, Layout,
    QuantizePlan, Quantizer, Result, Slot, backward_kernels, bf16, kernels,
};

mod common;

use common::dense;

/// Two queries of two heads, three keys of one.
const DIMS: Dims = Dims::new(1, 2, 2, 2).with_seqlen_kv(3).with_heads_kv(1);

/// No stream: the CPU looks at none.
const NO_STREAM: *mut c_void = null_mut();

/// A tensor without gaps in memory that lives.
fn at<T: Element, const R: usize>(data: &[T], shape: [usize; R]) -> RawTensor {
    RawTensor::new(data.as_ptr() as u64, T::DTYPE, Place::Cpu, dense(shape))
}

/// The same, to be written.
fn to<T: Element, const R: usize>(data: &mut [T], shape: [usize; R]) -> RawTensor {
    RawTensor::new(data.as_mut_ptr() as u64, T::DTYPE, Place::Cpu, dense(shape))
}

fn f32s<const R: usize>(address: u64, layout: Layout<R>) -> RawTensor {
    RawTensor::new(address, DType::F32, Place::Cpu, layout)
}

/// The tensors of one run on the CPU.
trait Memory {
    /// The arguments of a run that is right.
    fn args(&mut self) -> RawArgs;

    fn run(&mut self, args: &RawArgs) -> Result<()>;

    /// Whether no output was written since the memory was made.
    fn untouched(&self) -> bool;

    /// Runs, and says what was refused. Nothing may have been written then.
    fn refused(&mut self, args: &RawArgs) -> String {
        let error = self.run(args).unwrap_err();
        assert!(self.untouched(), "{error}");
        error.to_string()
    }

    /// The same with another tensor as an operand.
    fn refused_with(&mut self, slot: Slot, tensor: RawTensor) -> String {
        let args = self.args().with(slot, tensor);
        self.refused(&args)
    }
}

fn address<T>(data: &[T]) -> u64 {
    data.as_ptr() as u64
}

mod forward {
    use super::*;

    struct Tensors {
        q: Vec<f32>,
        kv: Vec<f32>,
        o: Vec<f32>,
        lse: Vec<f32>,
    }

    fn problem() -> ForwardProblem {
        ForwardProblem::builder(DType::F32, DIMS).lse(true).build().unwrap()
    }

    impl Tensors {
        fn new() -> Self {
            Self { q: vec![0.0; 8], kv: vec![2.0; 6], o: vec![-7.0; 8], lse: vec![-7.0; 4] }
        }
    }

    impl Memory for Tensors {
        fn args(&mut self) -> RawArgs {
            let problem = problem();
            RawArgs::new()
                .with(Slot::Q, at(&self.q, problem.q_shape()))
                .with(Slot::K, at(&self.kv, problem.k_shape()))
                .with(Slot::V, at(&self.kv, problem.v_shape()))
                .with(Slot::O, to(&mut self.o, problem.o_shape()))
                .with(Slot::Lse, to(&mut self.lse, problem.lse_shape()))
        }

        fn run(&mut self, args: &RawArgs) -> Result<()> {
            let plan = problem().plan(&Device::cpu()).unwrap();
            // SAFETY: the addresses are those of live vectors and outputs have vectors of their own, or they are refused
            // before they are used.
            unsafe { plan.run_raw(args, NO_STREAM) }
        }

        fn untouched(&self) -> bool {
            self.o.iter().chain(&self.lse).all(|&x| x == -7.0)
        }
    }

    #[test]
    fn it_computes() {
        let mut memory = Tensors::new();
        // Neither the stream nor the workspace is looked at, and what is given again takes the place.
        let args = memory.args().with_workspace(1, usize::MAX);
        let q = *args.get(Slot::Q).unwrap();
        let args = args.with(Slot::Q, f32s(2, dense([1]))).with(Slot::Q, q);
        memory.run(&args).unwrap();
        assert_eq!(memory.o, [2.0; 8]);
        assert!(memory.lse.iter().all(|lse| (lse - 3f32.ln()).abs() < 1e-6), "{:?}", memory.lse);
    }

    #[test]
    fn strides_are_followed() {
        let mut memory = Tensors::new();
        // Keys and values far from each other, the second and third of them alike; the output's heads outside.
        memory.kv = vec![0.0; 100];
        memory.kv[..2].copy_from_slice(&[3.0, 6.0]);
        let shared = Layout::with_strides([1, 3, 1, 2], [0, 40, 0, 1]).unwrap();
        let kv = f32s(address(&memory.kv), shared);
        let args = memory.args().with(Slot::K, kv).with(Slot::V, kv);
        let heads_outside = Layout::with_strides([1, 2, 2, 2], [8, 2, 4, 1]).unwrap();
        let args = args.with(Slot::O, f32s(memory.o.as_mut_ptr() as u64, heads_outside));
        memory.run(&args).unwrap();
        // Queries are 0, so that every key counts alike.
        let want = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0];
        assert!(memory.o.iter().zip(want).all(|(o, want)| (o - want).abs() < 1e-6), "{:?}", memory.o);
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Tensors::new();
        let q = address(&memory.q);
        let text = memory.refused_with(Slot::Q, f32s(q + 2, dense([1, 2, 2, 2])));
        assert_eq!(text, format!("q: address {:#x}; allowed: multiples of 4 bytes, not 0", q + 2));
        let text = memory.refused_with(Slot::K, f32s(0, dense([1, 3, 1, 2])));
        assert_eq!(text, "k: address 0x0; allowed: multiples of 4 bytes, not 0");
        let o = RawTensor::new(address(&memory.o), DType::BF16, Place::Cpu, dense([1, 2, 2, 2]));
        assert_eq!(memory.refused_with(Slot::O, o), "o: dtype bf16; allowed: f32, the problem's");
        let lse = RawTensor::new(address(&memory.lse), DType::F16, Place::Cpu, dense([1, 2, 2]));
        assert_eq!(memory.refused_with(Slot::Lse, lse), "lse: dtype f16; allowed: f32");
        let v = RawTensor::new(address(&memory.kv), DType::F32, Place::Cuda(1), dense([1, 3, 1, 2]));
        assert_eq!(memory.refused_with(Slot::V, v), "v: on device cuda:1; allowed: device cpu, the plan's");
        let text = memory.refused_with(Slot::K, f32s(address(&memory.kv), dense([1, 2, 1, 2])));
        assert_eq!(text, "k: shape [1, 2, 1, 2], expected [1, 3, 1, 2] [batch, seqlen, heads, head_dim]");
        // Another rank is another shape.
        let text = memory.refused_with(Slot::Lse, f32s(address(&memory.lse), dense([4])));
        assert_eq!(text, "lse: shape [4], expected [1, 2, 2] [batch, heads, seqlen]");
        let far = Layout::with_strides([1, 2, 2, 2], [0, i64::MAX / 2, 2, 1]).unwrap();
        let text = memory.refused_with(Slot::Q, f32s(q, far));
        assert!(text.starts_with("q: ") && text.ends_with("; allowed: what fits the address space"), "{text}");
        let text = memory.refused_with(Slot::Q, f32s(u64::MAX - 3, dense([1, 2, 2, 2])));
        assert_eq!(text, "q: 8 elements from address 0xfffffffffffffffc; allowed: what fits the address space");
        let text = memory.refused_with(Slot::DQ, f32s(q, dense([1, 2, 2, 2])));
        assert_eq!(
            text,
            "d_q: given; allowed: the operands of this problem: q, k, v, o, lse, descale_q, descale_k, descale_v, scale_o, amax, \
             cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, alibi_slopes, max_logits, \
             mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx, bias, dropout_state"
        );
        for (slot, verb) in [(Slot::Q, "reads"), (Slot::K, "reads"), (Slot::V, "reads"), (Slot::O, "writes")] {
            let args = memory.args().without(slot);
            let text = memory.refused(&args);
            assert_eq!(text, format!("{slot}: missing; allowed: the tensor that the problem {verb}"));
        }
        let args = memory.args().without(Slot::Lse);
        assert_eq!(memory.refused(&args), "lse: missing; allowed: the tensor that the problem, made with lse, writes");
    }

    #[test]
    fn outputs_have_memory_of_their_own() {
        let mut memory = Tensors::new();
        let text = memory.refused_with(Slot::O, f32s(address(&memory.q), dense([1, 2, 2, 2])));
        assert!(text.starts_with("o: addresses 0x") && text.contains("which meet those of q;"), "{text}");
        // One element is enough, at the end or at the start. All of them lie in one array, so that they meet nothing else.
        let room = [-7f32; 20];
        let part = |first: u64| address(&room) + 4 * first;
        let args = memory.args().with(Slot::O, f32s(part(0), dense([1, 2, 2, 2])));
        let text = memory.refused(&args.with(Slot::Lse, f32s(part(7), dense([1, 2, 2]))));
        assert!(text.starts_with("lse: addresses 0x") && text.contains("which meet those of o;"), "{text}");
        let args = memory.args().with(Slot::Lse, f32s(part(0), dense([1, 2, 2])));
        let text = memory.refused(&args.with(Slot::K, f32s(part(3), dense([1, 3, 1, 2]))));
        assert!(text.starts_with("lse: addresses 0x") && text.contains("which meet those of k;"), "{text}");
        let twice = Layout::with_strides([1, 2, 2, 2], [0, 0, 2, 1]).unwrap();
        let text = memory.refused_with(Slot::O, f32s(address(&memory.o), twice));
        assert!(text.starts_with("o: shape [1, 2, 2, 2] with strides [0, 0, 2, 1] uses elements twice;"), "{text}");
        // Neighbours do not meet.
        let mut both = vec![-7f32; 12];
        let args = memory.args().with(Slot::O, to(&mut both, [1, 2, 2, 2]));
        let args = args.with(Slot::Lse, f32s(both.as_mut_ptr() as u64 + 32, dense([1, 2, 2])));
        memory.run(&args).unwrap();
        assert!(both[..8] == [2.0; 8] && both[8..].iter().all(|lse| (lse - 3f32.ln()).abs() < 1e-6), "{both:?}");
    }

    /// Where there is no element, any address will do.
    #[test]
    fn empty_tensors_are_nowhere() {
        let dims = DIMS.with_seqlen_kv(0);
        let problem = ForwardProblem::builder(DType::F32, dims).build().unwrap();
        let plan = problem.plan(&Device::cpu()).unwrap();
        let (q, mut o) = ([1f32; 8], [f32::NAN; 8]);
        for nowhere in [0, 1, u64::MAX] {
            let args = RawArgs::new()
                .with(Slot::Q, at(&q, problem.q_shape()))
                .with(Slot::K, f32s(nowhere, dense(problem.k_shape())))
                .with(Slot::V, f32s(nowhere, dense(problem.v_shape())))
                .with(Slot::O, to(&mut o, problem.o_shape()));
            // SAFETY: the addresses are those of live arrays, but for tensors without an element.
            unsafe { plan.run_raw(&args, NO_STREAM) }.unwrap();
            assert_eq!(o, [0.0; 8]);
            o = [f32::NAN; 8];
        }
    }
}

mod fp8 {
    use super::*;

    /// One query and two equal keys of e4m3; O is the mean of the values, 2 and -6, times 4.
    struct Tensors {
        zeros: [E4M3; 2],
        v: [E4M3; 2],
        ones: [f32; 1],
        scale_o: [f32; 1],
        o: [E4M3; 1],
        amax: [f32; 1],
    }

    fn plan() -> ForwardPlan {
        let dims = Dims::new(1, 1, 1, 1).with_seqlen_kv(2);
        let options = ForwardProblem::builder(DType::E4M3, dims).output(DType::E4M3).amax(true);
        options.build().unwrap().plan(&Device::cpu()).unwrap()
    }

    impl Tensors {
        fn new() -> Self {
            Self {
                zeros: [E4M3::from_bits(0); 2],
                v: [2.0, -6.0].map(<E4M3 as Element>::from_f32),
                ones: [1.0],
                scale_o: [4.0],
                o: [E4M3::from_bits(0x7f)],
                amax: [f32::NAN],
            }
        }
    }

    impl Memory for Tensors {
        fn args(&mut self) -> RawArgs {
            let plan = plan();
            let problem = plan.problem();
            RawArgs::new()
                .with(Slot::Q, at(&self.zeros, problem.q_shape()))
                .with(Slot::K, at(&self.zeros, problem.k_shape()))
                .with(Slot::V, at(&self.v, problem.v_shape()))
                .with(Slot::O, to(&mut self.o, problem.o_shape()))
                .with(Slot::DescaleQ, at(&self.ones, problem.descale_q_shape()))
                .with(Slot::DescaleK, at(&self.ones, problem.descale_k_shape()))
                .with(Slot::DescaleV, at(&self.ones, problem.descale_v_shape()))
                .with(Slot::ScaleO, at(&self.scale_o, [1]))
                .with(Slot::Amax, to(&mut self.amax, [1]))
        }

        fn run(&mut self, args: &RawArgs) -> Result<()> {
            // SAFETY: the addresses are those of live arrays and outputs have arrays of their own, or they are refused
            // before they are used.
            unsafe { plan().run_raw(args, NO_STREAM) }
        }

        fn untouched(&self) -> bool {
            self.o[0].is_nan() && self.amax[0].is_nan()
        }
    }

    #[test]
    fn it_computes_with_factors_by_address() {
        let mut memory = Tensors::new();
        let args = memory.args();
        // SAFETY: the addresses are those of live arrays, and outputs have arrays of their own.
        unsafe { plan().run_raw(&args, NO_STREAM) }.unwrap();
        assert_eq!((Element::to_f32(memory.o[0]), memory.amax), (-8.0, [2.0]));
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Tensors::new();
        for slot in [Slot::DescaleQ, Slot::DescaleK, Slot::DescaleV] {
            let args = memory.args().without(slot);
            let text = memory.refused(&args);
            let want = "missing; allowed: the tensor that the problem, made with e4m3 operands, reads";
            assert_eq!(text, format!("{slot}: {want}"));
            let one = address(&memory.ones);
            let half = RawTensor::new(one, DType::F16, Place::Cpu, dense([1, 1, 1]));
            assert_eq!(memory.refused_with(slot, half), format!("{slot}: dtype f16; allowed: f32"));
            let elsewhere = RawTensor::new(one, DType::F32, Place::Cuda(0), dense([1, 1, 1]));
            assert_eq!(
                memory.refused_with(slot, elsewhere),
                format!("{slot}: on device cuda:0; allowed: device cpu, the plan's")
            );
            let text = memory.refused_with(slot, f32s(one + 1, dense([1, 1, 1])));
            assert!(
                text.starts_with(&format!("{slot}: address 0x")) && text.contains("multiples of 4 bytes"),
                "{text}"
            );
            let negative = [-1f32];
            assert_eq!(
                memory.refused_with(slot, at(&negative, [1, 1, 1])),
                format!("{slot}: -1 at [0, 0, 0]; allowed: finite and 0 or more")
            );
        }
        for (slot, made_with, verb) in [(Slot::ScaleO, "an e4m3 output", "reads"), (Slot::Amax, "amax", "writes")] {
            let args = memory.args().without(slot);
            let want = format!("{slot}: missing; allowed: the tensor that the problem, made with {made_with}, {verb}");
            assert_eq!(memory.refused(&args), want);
        }
        let text = memory.refused_with(Slot::Amax, f32s(address(&memory.scale_o), dense([1])));
        assert!(text.starts_with("amax: addresses 0x") && text.contains("which meet those of scale_o;"), "{text}");
        // Of three sizes of elements: O is a byte within the amax.
        let o = RawTensor::new(address(&memory.amax) + 3, DType::E4M3, Place::Cpu, dense([1, 1, 1, 1]));
        let text = memory.refused_with(Slot::O, o);
        assert!(text.starts_with("amax: addresses 0x") && text.contains("which meet those of o;"), "{text}");
    }

    #[test]
    fn other_operands_have_no_factors() {
        let problem = ForwardProblem::builder(DType::F32, DIMS).build().unwrap();
        let (q, kv, mut o, one) = ([0f32; 8], [2f32; 6], [-7f32; 8], [1f32]);
        let args = RawArgs::new()
            .with(Slot::Q, at(&q, problem.q_shape()))
            .with(Slot::K, at(&kv, problem.k_shape()))
            .with(Slot::V, at(&kv, problem.v_shape()))
            .with(Slot::O, to(&mut o, problem.o_shape()))
            .with(Slot::DescaleV, at(&one, [1, 1, 1]));
        // SAFETY: refused before any address is used.
        let error = unsafe { problem.plan(&Device::cpu()).unwrap().run_raw(&args, NO_STREAM) }.unwrap_err();
        assert_eq!(
            error.to_string(),
            "descale_v: given; allowed: none, since the problem was made without e4m3 operands"
        );
        assert_eq!(o, [-7.0; 8]);
    }
}

mod backward {
    use super::*;

    /// Every key is alike, so every weight is a third.
    struct Tensors {
        /// Q, O and dO.
        ones: Vec<f32>,
        kv: Vec<f32>,
        lse: Vec<f32>,
        d_lse: Vec<f32>,
        d_q: Vec<f32>,
        d_k: Vec<f32>,
        d_v: Vec<f32>,
    }

    fn problem() -> BackwardProblem {
        let forward = ForwardProblem::builder(DType::F32, DIMS).softmax_scale(0.5).build().unwrap();
        BackwardProblem::builder(&forward).d_lse(true).build().unwrap()
    }

    impl Tensors {
        fn new() -> Self {
            Self {
                ones: vec![1.0; 8],
                kv: vec![0.0; 6],
                lse: vec![3f32.ln(); 4],
                d_lse: vec![1.0; 4],
                d_q: vec![-7.0; 8],
                d_k: vec![-7.0; 6],
                d_v: vec![-7.0; 6],
            }
        }
    }

    impl Memory for Tensors {
        fn args(&mut self) -> RawArgs {
            let problem = problem();
            let forward = problem.forward();
            RawArgs::new()
                .with(Slot::Q, at(&self.ones, forward.q_shape()))
                .with(Slot::K, at(&self.kv, forward.k_shape()))
                .with(Slot::V, at(&self.kv, forward.v_shape()))
                .with(Slot::O, at(&self.ones, forward.o_shape()))
                .with(Slot::Lse, at(&self.lse, forward.lse_shape()))
                .with(Slot::DO, at(&self.ones, problem.d_o_shape()))
                .with(Slot::DLse, at(&self.d_lse, problem.d_lse_shape()))
                .with(Slot::DQ, to(&mut self.d_q, problem.d_q_shape()))
                .with(Slot::DK, to(&mut self.d_k, problem.d_k_shape()))
                .with(Slot::DV, to(&mut self.d_v, problem.d_v_shape()))
        }

        fn run(&mut self, args: &RawArgs) -> Result<()> {
            let plan = problem().plan(&Device::cpu()).unwrap();
            // SAFETY: the addresses are those of live vectors and outputs have vectors of their own, or they are refused
            // before they are used.
            unsafe { plan.run_raw(args, NO_STREAM) }
        }

        fn untouched(&self) -> bool {
            self.d_q.iter().chain(&self.d_k).chain(&self.d_v).all(|&x| x == -7.0)
        }
    }

    #[test]
    fn it_computes() {
        let mut memory = Tensors::new();
        let args = memory.args();
        memory.run(&args).unwrap();
        // dP is 0 and delta 2 - 1, so dS is -1/3; four rows of it, times the scale, reach every key.
        let near = |got: &[f32], want: f32| got.iter().all(|x| (x - want).abs() < 1e-6);
        assert!(near(&memory.d_q, 0.0), "{:?}", memory.d_q);
        assert!(near(&memory.d_k, -2.0 / 3.0), "{:?}", memory.d_k);
        assert!(near(&memory.d_v, 4.0 / 3.0), "{:?}", memory.d_v);
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Tensors::new();
        let ones = address(&memory.ones);
        let text = memory.refused_with(Slot::DO, f32s(ones + 2, dense([1, 2, 2, 2])));
        assert_eq!(text, format!("d_o: address {:#x}; allowed: multiples of 4 bytes, not 0", ones + 2));
        let o = RawTensor::new(ones, DType::BF16, Place::Cpu, dense([1, 2, 2, 2]));
        assert_eq!(memory.refused_with(Slot::O, o), "o: dtype bf16; allowed: f32, the problem's");
        let d_lse = RawTensor::new(address(&memory.d_lse), DType::F16, Place::Cpu, dense([1, 2, 2]));
        assert_eq!(memory.refused_with(Slot::DLse, d_lse), "d_lse: dtype f16; allowed: f32");
        let lse = RawTensor::new(address(&memory.lse), DType::F32, Place::Cuda(0), dense([1, 2, 2]));
        assert_eq!(memory.refused_with(Slot::Lse, lse), "lse: on device cuda:0; allowed: device cpu, the plan's");
        let d_v = RawTensor::new(address(&memory.d_v), DType::F32, Place::Cuda(1), dense([1, 3, 1, 2]));
        assert_eq!(memory.refused_with(Slot::DV, d_v), "d_v: on device cuda:1; allowed: device cpu, the plan's");
        // Gradients of K and V have key heads, not query heads.
        let text = memory.refused_with(Slot::DK, f32s(address(&memory.d_q), dense([1, 2, 2, 2])));
        assert_eq!(text, "d_k: shape [1, 2, 2, 2], expected [1, 3, 1, 2] [batch, seqlen, heads, head_dim]");
        let args = memory.args().without(Slot::DLse);
        assert_eq!(
            memory.refused(&args),
            "d_lse: missing; allowed: the tensor that the problem, made with d_lse, reads"
        );
        for (slot, verb) in [(Slot::O, "reads"), (Slot::Lse, "reads"), (Slot::DO, "reads"), (Slot::DQ, "writes")] {
            let args = memory.args().without(slot);
            let text = memory.refused(&args);
            assert_eq!(text, format!("{slot}: missing; allowed: the tensor that the problem {verb}"));
        }
        let text = memory.refused_with(Slot::Counts, f32s(ones, dense([3, 2])));
        assert_eq!(
            text,
            "counts: given; allowed: the operands of this problem: q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v, \
             cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, d_sinks, alibi_slopes, \
             mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx, bias, dbias, dropout_state"
        );
    }

    #[test]
    fn outputs_have_memory_of_their_own() {
        let mut memory = Tensors::new();
        let text = memory.refused_with(Slot::DQ, f32s(address(&memory.ones), dense([1, 2, 2, 2])));
        assert!(text.starts_with("d_q: addresses 0x") && text.contains("which meet those of q;"), "{text}");
        let text = memory.refused_with(Slot::DV, f32s(address(&memory.d_k), dense([1, 3, 1, 2])));
        assert!(text.starts_with("d_v: addresses 0x") && text.contains("which meet those of d_k;"), "{text}");
        let text = memory.refused_with(Slot::Lse, f32s(address(&memory.d_k) + 4, dense([1, 2, 2])));
        assert!(text.starts_with("d_k: addresses 0x") && text.contains("which meet those of lse;"), "{text}");
        let twice = Layout::with_strides([1, 2, 2, 2], [0, 0, 2, 1]).unwrap();
        let text = memory.refused_with(Slot::DQ, f32s(address(&memory.d_q), twice));
        assert!(text.starts_with("d_q: shape") && text.contains("uses elements twice"), "{text}");
    }
}

mod quantize {
    use super::*;

    /// K and V of one key of eight values each, and counts.
    struct Tensors {
        values: Vec<f32>,
        k: Vec<E4M3>,
        v: Vec<E4M3>,
        descale_k: Vec<f32>,
        descale_v: Vec<f32>,
        counts: Vec<f32>,
    }

    const SHAPE: [usize; 4] = [1, 1, 1, 8];

    fn plan() -> QuantizePlan {
        let problem = ForwardProblem::builder(DType::E4M3, Dims::new(1, 1, 1, 8)).build().unwrap();
        Quantizer::builder(&problem, DType::F32).build().unwrap().plan(&Device::cpu()).unwrap()
    }

    impl Tensors {
        fn new() -> Self {
            let nan = || vec![E4M3::from_bits(0x7f); 8];
            Self {
                values: vec![1.0, -2.0, 448.0, 500.0, 0.0, 0.5, -0.25, 3.5],
                k: nan(),
                v: nan(),
                descale_k: vec![-7.0],
                descale_v: vec![1.0],
                counts: vec![-7.0; 6],
            }
        }
    }

    impl Memory for Tensors {
        /// K with factors that are written, V with given ones.
        fn args(&mut self) -> RawArgs {
            RawArgs::new()
                .with(Slot::KValues, at(&self.values, SHAPE))
                .with(Slot::KStored, to(&mut self.k, SHAPE))
                .with(Slot::KDescale, to(&mut self.descale_k, [1, 1, 1]))
                .with(Slot::VValues, at(&self.values, SHAPE))
                .with(Slot::VStored, to(&mut self.v, SHAPE))
                .with(Slot::VDescaleGiven, at(&self.descale_v, [1, 1, 1]))
                .with(Slot::Counts, to(&mut self.counts, [3, 2]))
        }

        fn run(&mut self, args: &RawArgs) -> Result<()> {
            // SAFETY: the addresses are those of live arrays and outputs have arrays of their own, or they are refused
            // before they are used.
            unsafe { plan().run_raw(args, NO_STREAM) }
        }

        fn untouched(&self) -> bool {
            self.k.iter().chain(&self.v).all(|x| x.is_nan()) && self.descale_k == [-7.0] && self.counts == [-7.0; 6]
        }
    }

    #[test]
    fn it_computes_with_factors_written_and_given() {
        let mut memory = Tensors::new();
        let args = memory.args();
        // SAFETY: the addresses are those of live vectors, and outputs have vectors of their own.
        unsafe { plan().run_raw(&args, NO_STREAM) }.unwrap();
        assert_eq!((&memory.descale_k[..], &memory.descale_v[..]), (&[500.0 / 448.0][..], &[1.0][..]));
        let v: Vec<f32> = memory.v.iter().map(|&x| Element::to_f32(x)).collect();
        assert_eq!(v, [1.0, -2.0, 448.0, 448.0, 0.0, 0.5, -0.25, 3.5]);
        assert_eq!(Element::to_f32(memory.k[3]), 448.0);
        // Of V the 500 was too large for its factor.
        assert_eq!(memory.counts, [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn the_operands_of_a_tensor_belong_together() {
        let mut memory = Tensors::new();
        for (left_out, want) in [
            (Slot::KValues, "k.values: missing; allowed: what k.stored and k.descale are made of"),
            (Slot::KStored, "k.stored: missing; allowed: where k.values is stored"),
            (Slot::KDescale, "k.descale: missing; allowed: the factors of k.values"),
            (Slot::VValues, "v.values: missing; allowed: what v.stored and v.descale are made of"),
            (Slot::VStored, "v.stored: missing; allowed: where v.values is stored"),
            (Slot::VDescaleGiven, "v.descale: missing; allowed: the factors of v.values"),
        ] {
            let args = memory.args().without(left_out);
            assert_eq!(memory.refused(&args), want);
        }
        let mut more = [0f32];
        let twice = memory.args().with(Slot::VDescale, to(&mut more, [1, 1, 1]));
        let want = "v.descale: given twice; allowed: factors to be written, or to be read";
        assert_eq!(memory.refused(&twice), want);
        let twice = memory.args().with(Slot::KDescaleGiven, at(&more, [1, 1, 1]));
        assert_eq!(memory.refused(&twice), want.replace("v.", "k."));
        // Of Q nothing was given: its factors alone are nothing.
        let alone = memory.args().with(Slot::QDescaleGiven, at(&more, [1, 1, 1]));
        let want = "q.values: missing; allowed: what q.stored and q.descale are made of";
        assert_eq!(memory.refused(&alone), want);
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Tensors::new();
        let values = address(&memory.values);
        let halves = RawTensor::new(values, DType::BF16, Place::Cpu, dense(SHAPE));
        assert_eq!(memory.refused_with(Slot::KValues, halves), "k.values: dtype bf16; allowed: f32, the problem's");
        let wide = f32s(values, dense(SHAPE));
        assert_eq!(memory.refused_with(Slot::VStored, wide), "v.stored: dtype f32; allowed: e4m3, the problem's");
        let elsewhere = RawTensor::new(values, DType::F32, Place::Cuda(0), dense(SHAPE));
        assert_eq!(
            memory.refused_with(Slot::KValues, elsewhere),
            "k.values: on device cuda:0; allowed: device cpu, the plan's"
        );
        let text = memory.refused_with(Slot::VValues, f32s(values + 1, dense(SHAPE)));
        assert!(text.starts_with("v.values: address 0x") && text.contains("multiples of 4 bytes"), "{text}");
        let text = memory.refused_with(Slot::VDescaleGiven, f32s(0, dense([1, 1, 1])));
        assert_eq!(text, "v.descale: address 0x0; allowed: multiples of 4 bytes, not 0");
        let two = [1f32; 2];
        let text = memory.refused_with(Slot::VDescaleGiven, at(&two, [1, 2, 1]));
        assert_eq!(text, "v.descale: shape [1, 2, 1], expected [1, 1, 1] [batch, heads, blocks]");
        let shared = Layout::with_strides([3, 2], [0, 1]).unwrap();
        let counts = f32s(address(&memory.counts), shared);
        let text = memory.refused_with(Slot::Counts, counts);
        assert!(text.starts_with("counts: shape [3, 2] with strides [0, 1] uses elements twice"), "{text}");
        let stored = memory.k.as_ptr() as u64;
        let over = RawTensor::new(stored + 7, DType::E4M3, Place::Cpu, dense(SHAPE));
        let text = memory.refused_with(Slot::VStored, over);
        assert!(text.starts_with("v.stored: addresses 0x") && text.contains("which meet those of k.stored;"), "{text}");
        memory.descale_v = vec![f32::INFINITY];
        let args = memory.args();
        assert_eq!(memory.refused(&args), "v.descale: inf at [0, 0, 0]; allowed: finite and above 0");
    }
}

/// A plan for a GPU that was only described is looked at and not run, in any build; one without kernels has none.
#[test]
fn a_plan_for_a_described_gpu_has_no_raw_launch() {
    let dims = Dims::new(2, 4, 2, 64).with_heads_kv(1);
    let forward = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
    let backward = BackwardProblem::builder(&forward).build().unwrap();
    let e4m3 = ForwardProblem::builder(DType::E4M3, dims).build().unwrap();
    let quantizer = Quantizer::builder(&e4m3, DType::BF16).build().unwrap();
    let h100 = DeviceFacts::h100_sxm();
    // Alignment and workspace are looked at before: the numbers must be good ones.
    let on_gpu = |args: RawArgs, operands: &hopper_attention::Operands| {
        let required = operands.iter().filter(|row| row.presence() == hopper_attention::Presence::Required);
        required.fold(args.with_workspace(0x1000, 1 << 40), |args, row| {
            let raw = |layout: Layout<4>| RawTensor::new(0x1000, row.dtype(), Place::Cuda(0), layout);
            let tensor = match *row.shape() {
                [a, b, c, d] => raw(dense([a, b, c, d])),
                [a, b, c] => RawTensor::new(0x1000, row.dtype(), Place::Cuda(0), dense([a, b, c])),
                _ => unreachable!("{row:?}"),
            };
            args.with(row.slot(), tensor)
        })
    };
    let want = "plan: on a GPU that was only described; allowed: a plan that was made on a GPU";
    let planned = [
        forward.plan_for(&h100).map(|plan| {
            let args = on_gpu(RawArgs::new(), plan.operands());
            // SAFETY: refused before any address is used.
            unsafe { plan.run_raw(&args, NO_STREAM) }
        }),
        backward.plan_for(&h100).map(|plan| {
            let args = on_gpu(RawArgs::new(), plan.operands());
            // SAFETY: as above.
            unsafe { plan.run_raw(&args, NO_STREAM) }
        }),
        quantizer.plan_for(&h100).map(|plan| {
            let args = on_gpu(RawArgs::new(), plan.operands());
            // SAFETY: as above.
            unsafe { plan.run_raw(&args, NO_STREAM) }
        }),
    ];
    for planned in planned {
        match planned {
            Ok(run) => assert_eq!(run.unwrap_err().to_string(), want),
            Err(error) => {
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                assert!(kernels().is_empty() && backward_kernels().is_empty(), "{error}");
            }
        }
    }
}

#[test]
fn what_is_given_can_be_looked_at() {
    let data = [bf16::ONE; 4];
    let q = at(&data, [1, 2, 1, 2]);
    let args = RawArgs::new().with(Slot::Q, q);
    assert_eq!((args.get(Slot::Q), args.get(Slot::K)), (Some(&q), None));
    assert_eq!((Place::Cpu.to_string(), Place::Cuda(3).to_string()), ("cpu".into(), "cuda:3".into()));
    let text = format!("{args:?}");
    assert!(text.contains("BF16") && text.contains("Cpu"), "{text}");
}
