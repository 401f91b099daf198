//! A run on the CPU: addresses become slices, which needs more care than a GPU does, since a slice that is written must
//! not meet another one.

use std::ops::Range;

use super::{RawBackward, RawForward, RawFp8, RawQuantize, RawQuantizeTensor, RawTensor};
use crate::quantize::NAMES;
use crate::{
    BackwardArgs, BackwardPlan, DType, Descale, E4M3, Element, Error, ForwardArgs, ForwardPlan, Fp8ForwardArgs,
    Fp8Output, Operand, Quantize, QuantizeArgs, QuantizePlan, Result, Stream, TensorMut, TensorRef, Workspace, bf16,
    f16,
};

/// Computes the plan's problem.
///
/// # Safety
/// As [`ForwardPlan::run_raw`], whose checks of types, shapes and places were made.
pub(super) unsafe fn forward(plan: &ForwardPlan, args: &RawForward) -> Result<()> {
    let mut inputs = vec![("q", bytes("q", &args.q)?), ("k", bytes("k", &args.k)?), ("v", bytes("v", &args.v)?)];
    let mut outputs = vec![("o", bytes("o", &args.o)?)];
    if let Some(lse) = &args.lse {
        outputs.push(("lse", bytes("lse", lse)?));
    }
    if let Some(RawFp8 { descale_q, descale_k, descale_v, scale_o, amax }) = &args.fp8 {
        for (what, descale) in [("descale_q", descale_q), ("descale_k", descale_k), ("descale_v", descale_v)] {
            inputs.push((what, bytes(what, descale)?));
        }
        if let Some(scale_o) = scale_o {
            inputs.push(("scale_o", bytes("scale_o", scale_o)?));
        }
        if let Some(amax) = amax {
            outputs.push(("amax", bytes("amax", amax)?));
        }
    }
    check_apart(&inputs, &outputs)?;
    // SAFETY: the caller's promise, and what was just checked: alignment, size and overlap; the type is the tensors' own.
    unsafe {
        match (args.fp8, plan.problem().output_dtype()) {
            (None, DType::F16) => typed_forward::<f16>(plan, args),
            (None, DType::BF16) => typed_forward::<bf16>(plan, args),
            (None, DType::F32) => typed_forward::<f32>(plan, args),
            (Some(fp8), DType::F16) => fp8_forward::<f16>(plan, args, &fp8),
            (Some(fp8), DType::BF16) => fp8_forward::<bf16>(plan, args, &fp8),
            (Some(fp8), DType::E4M3) => fp8_forward::<E4M3>(plan, args, &fp8),
            (_, got) => {
                Err(Error::Dtype { what: "o", got, allowed: "f16, bf16, f32, or e4m3 of e4m3 operands".into() })
            }
        }
    }
}

/// Computes the plan's problem.
///
/// # Safety
/// As [`BackwardPlan::run_raw`], whose checks of types, shapes and places were made.
pub(super) unsafe fn backward(plan: &BackwardPlan, args: &RawBackward) -> Result<()> {
    let mut inputs = vec![
        ("q", bytes("q", &args.q)?),
        ("k", bytes("k", &args.k)?),
        ("v", bytes("v", &args.v)?),
        ("o", bytes("o", &args.o)?),
        ("lse", bytes("lse", &args.lse)?),
        ("d_o", bytes("d_o", &args.d_o)?),
    ];
    if let Some(d_lse) = &args.d_lse {
        inputs.push(("d_lse", bytes("d_lse", d_lse)?));
    }
    let outputs =
        [("d_q", bytes("d_q", &args.d_q)?), ("d_k", bytes("d_k", &args.d_k)?), ("d_v", bytes("d_v", &args.d_v)?)];
    check_apart(&inputs, &outputs)?;
    // SAFETY: the caller's promise, and what was just checked: alignment, size and overlap; the type is the tensors' own.
    unsafe {
        match plan.problem().dtype() {
            DType::F16 => typed_backward::<f16>(plan, args),
            DType::BF16 => typed_backward::<bf16>(plan, args),
            DType::F32 => typed_backward::<f32>(plan, args),
            got => Err(not_on_the_cpu(got)),
        }
    }
}

/// Quantises what there is.
///
/// # Safety
/// As [`QuantizePlan::run_raw`], whose checks of types, shapes and places were made.
pub(super) unsafe fn quantize(plan: &QuantizePlan, args: &RawQuantize) -> Result<()> {
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    for (of, tensor) in NAMES.iter().zip([&args.q, &args.k, &args.v]) {
        let Some(RawQuantizeTensor { values, stored, descale, given }) = tensor else { continue };
        inputs.push((of.values, bytes(of.values, values)?));
        outputs.push((of.stored, bytes(of.stored, stored)?));
        let factors = if *given { &mut inputs } else { &mut outputs };
        factors.push((of.descale, bytes(of.descale, descale)?));
    }
    if let Some(counts) = &args.counts {
        outputs.push(("counts", bytes("counts", counts)?));
    }
    check_apart(&inputs, &outputs)?;
    // SAFETY: the caller's promise, and what was just checked: alignment, size and overlap; the type is the source's.
    unsafe {
        match plan.quantizer().source() {
            DType::F16 => typed_quantize::<f16>(plan, args),
            DType::BF16 => typed_quantize::<bf16>(plan, args),
            DType::F32 => typed_quantize::<f32>(plan, args),
            got => Err(not_on_the_cpu(got)),
        }
    }
}

fn not_on_the_cpu(got: DType) -> Error {
    Error::Dtype { what: "q, k and v", got, allowed: "f16, bf16, f32".into() }
}

/// # Safety
/// As [`forward`], with tensors of elements of `T`.
unsafe fn typed_forward<T: Operand<Out = T>>(plan: &ForwardPlan, args: &RawForward) -> Result<()> {
    // SAFETY: each is valid, aligned and of this type; what is written meets nothing else.
    let args = unsafe {
        ForwardArgs {
            q: input::<T, 4>(&args.q)?,
            k: input::<T, 4>(&args.k)?,
            v: input::<T, 4>(&args.v)?,
            o: output::<T, 4>(&args.o)?,
            lse: match &args.lse {
                Some(lse) => Some(output::<f32, 3>(lse)?),
                None => None,
            },
        }
    };
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// # Safety
/// As [`forward`], with operands of e4m3 and an output of `O`.
unsafe fn fp8_forward<O: Fp8Output>(plan: &ForwardPlan, args: &RawForward, fp8: &RawFp8) -> Result<()> {
    // SAFETY: each is valid, aligned and of this type; what is written meets nothing else.
    let args = unsafe {
        Fp8ForwardArgs {
            q: input::<E4M3, 4>(&args.q)?,
            k: input::<E4M3, 4>(&args.k)?,
            v: input::<E4M3, 4>(&args.v)?,
            descale_q: input::<f32, 3>(&fp8.descale_q)?,
            descale_k: input::<f32, 3>(&fp8.descale_k)?,
            descale_v: input::<f32, 3>(&fp8.descale_v)?,
            o: output::<O, 4>(&args.o)?,
            lse: match &args.lse {
                Some(lse) => Some(output::<f32, 3>(lse)?),
                None => None,
            },
            scale_o: match &fp8.scale_o {
                Some(scale_o) => Some(input::<f32, 1>(scale_o)?),
                None => None,
            },
            amax: match &fp8.amax {
                Some(amax) => Some(output::<f32, 1>(amax)?),
                None => None,
            },
        }
    };
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run_fp8(&Stream::Cpu, &mut workspace, args)
}

/// # Safety
/// As [`backward`], with tensors of elements of `T`.
unsafe fn typed_backward<T: Operand<Out = T>>(plan: &BackwardPlan, args: &RawBackward) -> Result<()> {
    // SAFETY: each is valid, aligned and of this type; what is written meets nothing else.
    let args = unsafe {
        BackwardArgs {
            q: input::<T, 4>(&args.q)?,
            k: input::<T, 4>(&args.k)?,
            v: input::<T, 4>(&args.v)?,
            o: input::<T, 4>(&args.o)?,
            lse: input::<f32, 3>(&args.lse)?,
            d_o: input::<T, 4>(&args.d_o)?,
            d_lse: match &args.d_lse {
                Some(d_lse) => Some(input::<f32, 3>(d_lse)?),
                None => None,
            },
            d_q: output::<T, 4>(&args.d_q)?,
            d_k: output::<T, 4>(&args.d_k)?,
            d_v: output::<T, 4>(&args.d_v)?,
        }
    };
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// # Safety
/// As [`quantize`], with values of `T`.
unsafe fn typed_quantize<T: Operand>(plan: &QuantizePlan, args: &RawQuantize) -> Result<()> {
    let tensor = |raw: &Option<RawQuantizeTensor>| -> Result<Option<Quantize<'_, T>>> {
        let Some(RawQuantizeTensor { values, stored, descale, given }) = raw else { return Ok(None) };
        // SAFETY: each is valid, aligned and of this type; what is written meets nothing else.
        unsafe {
            Ok(Some(Quantize {
                values: input::<T, 4>(values)?,
                stored: output::<E4M3, 4>(stored)?,
                descale: if *given {
                    Descale::Given(input::<f32, 3>(descale)?)
                } else {
                    Descale::FromAmax(output::<f32, 3>(descale)?)
                },
            }))
        }
    };
    let args = QuantizeArgs {
        q: tensor(&args.q)?,
        k: tensor(&args.k)?,
        v: tensor(&args.v)?,
        counts: match &args.counts {
            // SAFETY: as above.
            Some(counts) => Some(unsafe { output::<f32, 2>(counts) }?),
            None => None,
        },
    };
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// # Safety
/// The tensor's memory is valid for reading, aligned for `T` and no larger than a slice may be.
unsafe fn input<'a, T: Element, const R: usize>(raw: &RawTensor<R>) -> Result<TensorRef<'a, T, R>> {
    let data: &[T] = match raw.layout.span() {
        0 => &[],
        // SAFETY: the caller's promise.
        span => unsafe { std::slice::from_raw_parts(raw.address as usize as *const T, span) },
    };
    TensorRef::host(data, raw.layout)
}

/// # Safety
/// As [`input`], and the memory is valid for writing and nothing else uses it.
unsafe fn output<'a, T: Element, const R: usize>(raw: &RawTensor<R>) -> Result<TensorMut<'a, T, R>> {
    let data: &mut [T] = match raw.layout.span() {
        0 => &mut [],
        // SAFETY: the caller's promise.
        span => unsafe { std::slice::from_raw_parts_mut(raw.address as usize as *mut T, span) },
    };
    TensorMut::host(data, raw.layout)
}

/// A tensor's name and addresses.
type Named = (&'static str, Range<u64>);

/// Whether each output meets neither an input nor another output.
fn check_apart(inputs: &[Named], outputs: &[Named]) -> Result<()> {
    for (i, output) in outputs.iter().enumerate() {
        inputs.iter().chain(&outputs[..i]).try_for_each(|other| apart(output, other))?;
    }
    Ok(())
}

/// The addresses of a tensor, from its first to its last byte, gaps included.
fn bytes<const R: usize>(tensor: &'static str, raw: &RawTensor<R>) -> Result<Range<u64>> {
    if raw.layout.span() == 0 {
        return Ok(0..0);
    }
    let refuse = |got: String, allowed: String| Err(Error::Layout { tensor, got, allowed });
    let size = raw.dtype.bytes() as u64;
    if raw.address == 0 || !raw.address.is_multiple_of(size) {
        let allowed = format!("multiples of {size} bytes, not 0");
        return refuse(format!("address {:#x}", raw.address), allowed);
    }
    let span = raw.layout.span() as u64;
    match span.checked_mul(size).filter(|&bytes| bytes <= isize::MAX as u64) {
        Some(bytes) if raw.address.checked_add(bytes).is_some_and(|end| usize::try_from(end).is_ok()) => {
            Ok(raw.address..raw.address + bytes)
        }
        _ => refuse(format!("{span} elements from address {:#x}", raw.address), "what fits the address space".into()),
    }
}

fn apart((name, output): &Named, (other_name, other): &Named) -> Result<()> {
    if output.is_empty() || other.is_empty() || output.end <= other.start || other.end <= output.start {
        return Ok(());
    }
    Err(Error::Layout {
        tensor: name,
        got: format!("addresses {:#x} to {:#x}, which meet those of {other_name}", output.start, output.end),
        allowed: "on the CPU, an output whose range of addresses is its own".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::{Place, RawWorkspace};
    use crate::{Device, Dims, ForwardProblem, Layout};

    const DIMS: Dims =
        Dims { batch: 1, seqlen_q: 2, seqlen_kv: 3, heads_q: 2, heads_kv: 1, head_dim_qk: 2, head_dim_vo: 2 };

    struct Memory {
        q: Vec<f32>,
        kv: Vec<f32>,
        o: Vec<f32>,
        lse: Vec<f32>,
    }

    impl Memory {
        fn new() -> Self {
            Self { q: vec![0.0; 8], kv: vec![2.0; 6], o: vec![-7.0; 8], lse: vec![-7.0; 4] }
        }

        fn args(&mut self) -> RawForward {
            let problem = problem();
            let tensor = |address: *const f32, shape| RawTensor {
                address: address as u64,
                dtype: DType::F32,
                place: Place::Cpu,
                layout: Layout::contiguous(shape).unwrap(),
            };
            RawForward {
                q: tensor(self.q.as_ptr(), problem.q_shape()),
                k: tensor(self.kv.as_ptr(), problem.k_shape()),
                v: tensor(self.kv.as_ptr(), problem.v_shape()),
                o: tensor(self.o.as_mut_ptr(), problem.o_shape()),
                lse: Some(RawTensor {
                    address: self.lse.as_mut_ptr() as u64,
                    dtype: DType::F32,
                    place: Place::Cpu,
                    layout: Layout::contiguous(problem.lse_shape()).unwrap(),
                }),
                fp8: None,
                workspace: RawWorkspace::default(),
            }
        }

        /// Runs, and says what was refused; nothing may have been written then.
        fn refused(&mut self, edit: impl FnOnce(&mut RawForward)) -> String {
            let mut args = self.args();
            edit(&mut args);
            let plan = problem().plan(&Device::cpu()).unwrap();
            // SAFETY: the addresses are those of live vectors, or refused before they are used.
            let error = unsafe { plan.run_raw(&args, std::ptr::null_mut()) }.unwrap_err();
            assert!(self.o.iter().chain(&self.lse).all(|&x| x == -7.0), "{error}");
            error.to_string()
        }
    }

    fn problem() -> ForwardProblem {
        ForwardProblem::new(DType::F32, DIMS).unwrap().lse(true)
    }

    #[test]
    fn it_computes() {
        let mut memory = Memory::new();
        let plan = problem().plan(&Device::cpu()).unwrap();
        let args = memory.args();
        // SAFETY: the addresses are those of live vectors, and outputs have vectors of their own.
        unsafe { plan.run_raw(&args, std::ptr::null_mut()) }.unwrap();
        assert_eq!(memory.o, [2.0; 8]);
        assert!(memory.lse.iter().all(|lse| (lse - 3f32.ln()).abs() < 1e-6), "{:?}", memory.lse);
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Memory::new();
        let text = memory.refused(|args| args.q.address += 2);
        assert!(text.starts_with("q: address 0x") && text.ends_with("allowed: multiples of 4 bytes, not 0"), "{text}");
        let text = memory.refused(|args| args.k.address = 0);
        assert!(text.starts_with("k: address 0x0;"), "{text}");
        let text = memory.refused(|args| args.o.dtype = DType::BF16);
        assert_eq!(text, "o: dtype bf16; allowed: f32, the problem's");
        let text = memory.refused(|args| args.lse.as_mut().unwrap().dtype = DType::F16);
        assert_eq!(text, "lse: dtype f16; allowed: f32, as every log-sum-exp");
        let text = memory.refused(|args| args.v.place = Place::Cuda(1));
        assert_eq!(text, "v: on cuda:1; allowed: cpu, the plan's");
        let text = memory.refused(|args| args.lse = None);
        assert!(text.starts_with("lse: missing"), "{text}");
        let text = memory.refused(|args| args.k.layout = Layout::contiguous([1, 2, 1, 2]).unwrap());
        assert!(text.starts_with("k: shape [1, 2, 1, 2], expected [1, 3, 1, 2]"), "{text}");
        let text = memory.refused(|args| {
            args.q.layout = Layout::with_strides([1, 2, 2, 2], [0, i64::MAX / 2, 2, 1]).unwrap();
        });
        assert!(text.ends_with("what fits the address space"), "{text}");
    }

    /// One query and two equal keys of e4m3; O is the mean of the values, 2 and -6, times 4.
    #[test]
    fn it_computes_e4m3_operands() {
        let dims =
            Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 1, head_dim_vo: 1 };
        let problem = ForwardProblem::new(DType::E4M3, dims).unwrap().output(DType::E4M3).unwrap().amax(true).unwrap();
        let (kv, mut o) = ([2.0, -6.0].map(<E4M3 as Element>::from_f32), [E4M3::from_bits(0x7f)]);
        let (ones, zeros, factor, mut amax) = ([1f32], [E4M3::from_bits(0); 2], [4f32], [f32::NAN]);
        let one = |address: *const f32| RawTensor {
            address: address as u64,
            dtype: DType::F32,
            place: Place::Cpu,
            layout: Layout::contiguous([1, 1, 1]).unwrap(),
        };
        let scalar = |address: *const f32| RawTensor {
            address: address as u64,
            dtype: DType::F32,
            place: Place::Cpu,
            layout: Layout::contiguous([1]).unwrap(),
        };
        let tensor = |address: *const E4M3, shape| RawTensor {
            address: address as u64,
            dtype: DType::E4M3,
            place: Place::Cpu,
            layout: Layout::contiguous(shape).unwrap(),
        };
        let fp8 = RawFp8 {
            descale_q: one(ones.as_ptr()),
            descale_k: one(ones.as_ptr()),
            descale_v: one(ones.as_ptr()),
            scale_o: Some(scalar(factor.as_ptr())),
            amax: Some(scalar(amax.as_mut_ptr())),
        };
        let args = RawForward {
            q: tensor(zeros.as_ptr(), problem.q_shape()),
            k: tensor(zeros.as_ptr(), problem.k_shape()),
            v: tensor(kv.as_ptr(), problem.v_shape()),
            o: tensor(o.as_mut_ptr(), problem.o_shape()),
            lse: None,
            fp8: Some(fp8),
            workspace: RawWorkspace::default(),
        };
        let plan = problem.plan(&Device::cpu()).unwrap();
        // SAFETY: the addresses are those of live arrays, or refused before they are used.
        let run = |args: &RawForward| unsafe { plan.run_raw(args, std::ptr::null_mut()) };
        let refused = |fp8| run(&RawForward { fp8, ..args }).unwrap_err().to_string();
        assert_eq!(refused(None), "fp8: missing; allowed: the factors of e4m3 operands");
        let half = Some(RawFp8 { descale_k: RawTensor { dtype: DType::F16, ..fp8.descale_k }, ..fp8 });
        assert_eq!(refused(half), "descale_k: dtype f16; allowed: f32, as every factor and amax");
        let elsewhere = Some(RawFp8 { descale_v: RawTensor { place: Place::Cuda(0), ..fp8.descale_v }, ..fp8 });
        assert_eq!(refused(elsewhere), "descale_v: on cuda:0; allowed: cpu, the plan's");
        assert!(refused(Some(RawFp8 { amax: None, ..fp8 })).starts_with("amax: missing"));
        let meeting = Some(RawFp8 { amax: fp8.scale_o, ..fp8 });
        assert!(refused(meeting).contains("which meet those of scale_o"));
        run(&args).unwrap();
        assert_eq!((Element::to_f32(o[0]), amax), (-8.0, [2.0]));

        let mut memory = Memory::new();
        let text = memory.refused(|args| args.fp8 = Some(fp8));
        assert_eq!(text, "fp8: given; allowed: none, since the operands are not e4m3");
    }

    #[test]
    fn outputs_have_memory_of_their_own() {
        let mut memory = Memory::new();
        let text = memory.refused(|args| args.o.address = args.q.address);
        assert!(text.starts_with("o: addresses 0x") && text.contains("meet those of q"), "{text}");
        let text = memory.refused(|args| args.lse.as_mut().unwrap().address = args.o.address + 28);
        assert!(text.starts_with("lse: addresses 0x") && text.contains("meet those of o"), "{text}");
        let text = memory.refused(|args| {
            args.o.layout = Layout::with_strides([1, 2, 2, 2], [0, 0, 2, 1]).unwrap();
        });
        assert!(text.starts_with("o: shape") && text.contains("uses elements twice"), "{text}");
    }
}
