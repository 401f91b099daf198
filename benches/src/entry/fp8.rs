//! The entry of forwards of e4m3 operands.

use std::ffi::{c_int, c_void};

use hopper_attention::{DType, ForwardProblem, Scaling, Slot};

use super::call::{Call, Given, Problem, Wish};
use super::problem::refused;
use super::{E4M3, Numbers, Packing, Refused, answer, read};
use crate::point::FullBlocks;

/// `hattn_peer_fwd_fp8_args`: the header says what the fields mean.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Fp8Args {
    pub struct_bytes: u64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *mut c_void,
    pub lse: *mut f32,
    pub q_descale: *const f32,
    pub k_descale: *const f32,
    pub v_descale: *const f32,
    pub q_stride: [i64; 3],
    pub k_stride: [i64; 3],
    pub v_stride: [i64; 3],
    pub o_stride: [i64; 3],
    pub numbers: Numbers,
    pub scaling: i32,
    pub o_dtype: i32,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub half_scores: i32,
    pub wish: i32,
    pub packing: Packing,
    /// Lists of full blocks, and as many counts of partial blocks, as the struct of a forward has them.
    pub full_block_cnt: *const i32,
    pub full_block_idx: *const i32,
    pub mask_block_cnt: *const i32,
}

// As for the forward's.
const _: () = assert!(size_of::<Fp8Args>() == 304 && std::mem::offset_of!(Fp8Args, half_scores) == OLDER_BYTES);
const _: () = assert!(std::mem::offset_of!(Fp8Args, numbers) == 168 && std::mem::offset_of!(Fp8Args, stream) == 232);
const _: () = assert!(std::mem::offset_of!(Fp8Args, packing) == 264);

/// The size that the struct came with.
const OLDER_BYTES: usize = 256;

/// One forward of e4m3 operands, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// As for [`hattn_peer_fwd`](super::hattn_peer_fwd).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_fwd_fp8(args: *const Fp8Args) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read(args, OLDER_BYTES) }?;
        // SAFETY: the caller vouches for the memory that the fields describe.
        unsafe { args.call()?.run() }
    })
}

impl Fp8Args {
    fn problem(&self) -> Result<ForwardProblem, Refused> {
        if self.numbers.dtype != E4M3 {
            return Err(refused("dtype", self.numbers.dtype, "2 (e4m3)"));
        }
        let scaling = match self.scaling {
            0 => Scaling::PerTensor,
            1 => Scaling::PerHead,
            2 => Scaling::PerBlock,
            other => return Err(refused("scaling", other, "0 (per tensor), 1 (per head), 2 (per block)")),
        };
        let output = match self.o_dtype {
            0 => DType::F16,
            1 => DType::BF16,
            other => return Err(refused("o_dtype", other, "0 (f16), 1 (bf16)")),
        };
        let half_scores = match self.half_scores {
            0 => false,
            1 => true,
            other => {
                return Err(refused("half_scores", other, "0 (nothing promised), 1 (Q and K are 14 at most)"));
            }
        };
        let options = self.numbers.forward(DType::E4M3, self.packing)?.lse(!self.lse.is_null());
        let options = options.block_mask((!self.full_block_cnt.is_null()).then(FullBlocks::form));
        Ok(options.scaling(scaling).half_scores(half_scores).output(output).build()?)
    }

    /// The kernel that the caller asks for. `None`: the plan's choice.
    fn wish(&self) -> Result<Option<Wish>, Refused> {
        if self.wish == 0 {
            return Ok(None);
        }
        let part = |shift: u32, bits: u32| (self.wish >> shift) as usize & ((1 << bits) - 1);
        let scores = match part(0, 4) {
            0 => None,
            1 => Some(DType::F16),
            2 => Some(DType::F32),
            _ => return Err(refused("wish", self.wish, "scores (1 f16, 2 f32) + 16 tile_m + 65536 shares")),
        };
        let given = |number: usize| (number > 0).then_some(number);
        Ok(Some(Wish { scores, tile_m: given(part(4, 12)), shares: given(part(16, 8)) }))
    }

    fn call(&self) -> Result<Call<13>, Refused> {
        let problem = self.problem()?;
        let [counts, partial, bits, full_counts, full] =
            Given::lists([self.full_block_cnt, self.full_block_idx, self.mask_block_cnt]);
        Ok(Call {
            problem: match self.wish()? {
                None => Problem::Forward(problem),
                Some(wish) => Problem::Wished(problem, wish),
            },
            packing: self.packing,
            tensors: [
                Given::strided(Slot::Q, self.q, self.q_stride),
                Given::strided(Slot::K, self.k, self.k_stride),
                Given::strided(Slot::V, self.v, self.v_stride),
                Given::strided(Slot::O, self.o, self.o_stride),
                Given::contiguous(Slot::Lse, self.lse),
                Given::contiguous(Slot::DescaleQ, self.q_descale),
                Given::contiguous(Slot::DescaleK, self.k_descale),
                Given::contiguous(Slot::DescaleV, self.v_descale),
                counts,
                partial,
                bits,
                full_counts,
                full,
            ],
            workspace: self.workspace,
            workspace_bytes: self.workspace_bytes,
            stream: self.stream,
        })
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::E4M3 as Code;

    use super::super::{Entry, INVALID};
    use super::*;

    fn args() -> Fp8Args {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: Fp8Args = unsafe { std::mem::zeroed() };
        Fp8Args { struct_bytes: size_of::<Fp8Args>() as u64, ..zero }
    }

    /// Of a problem, without its memory.
    fn given(scaling: i32, o_dtype: i32) -> Fp8Args {
        let numbers = Numbers {
            batch: 1,
            seqlen_q: 2,
            seqlen_kv: 130,
            heads_q: 2,
            heads_kv: 1,
            head_dim_qk: 16,
            head_dim_vo: 16,
            dtype: E4M3,
            softmax_scale: 0.25,
            ..args().numbers
        };
        let lse = std::ptr::dangling_mut();
        Fp8Args { numbers, scaling, o_dtype, lse, ..args() }
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        let refused = |args: *const Fp8Args| {
            // SAFETY: null or a live struct, which is refused before any of its addresses is used.
            assert_eq!(unsafe { hattn_peer_fwd_fp8(args) }, INVALID);
            Entry::own().complaint(INVALID)
        };
        assert_eq!(refused(std::ptr::null()), "invalid argument: args is null");
        assert!(refused(&Fp8Args { struct_bytes: 8, ..args() }).ends_with("struct_bytes 8; allowed: 256 and above"));
        assert!(refused(&args()).ends_with("dtype: 0; allowed: 2 (e4m3)"));
    }

    #[test]
    fn the_problem_is_what_the_arguments_say() {
        let text = |args: Fp8Args| args.problem().map_or_else(|Refused(_, text)| text, |problem| problem.to_string());
        let of = |scaling, o| {
            format!("forward e4m3 {scaling} to {o} batch 1 seqlen 2x130 heads 2/1 head_dim 16/16 full scale 0.25 lse")
        };
        assert_eq!(text(given(0, 1)), of("per-tensor", "bf16"));
        assert_eq!(text(given(1, 0)), of("per-head", "f16"));
        assert_eq!(text(given(2, 1)), of("per-block", "bf16"));
        assert_eq!(text(given(3, 1)), "scaling: 3; allowed: 0 (per tensor), 1 (per head), 2 (per block)");
        let promised = |half_scores| Fp8Args { half_scores, ..given(2, 1) };
        assert_eq!(text(promised(1)), of("per-block half-scores", "bf16"));
        assert_eq!(text(promised(2)), "half_scores: 2; allowed: 0 (nothing promised), 1 (Q and K are 14 at most)");
        assert_eq!(text(given(0, 2)), "o_dtype: 2; allowed: 0 (f16), 1 (bf16)");
        let wish = |wish| Fp8Args { wish, ..given(2, 1) }.wish().map_err(|Refused(_, text)| text);
        assert_eq!(wish(0), Ok(None));
        assert_eq!(wish(1), Ok(Some(Wish { scores: Some(DType::F16), tile_m: None, shares: None })));
        let all = Wish { scores: Some(DType::F32), tile_m: Some(128), shares: Some(3) };
        assert_eq!(wish(2 + 16 * 128 + 65536 * 3), Ok(Some(all)));
        assert!(wish(3).unwrap_err().starts_with("wish: 3; allowed: scores"));
    }

    #[test]
    fn an_older_callers_struct_promises_nothing() {
        let given = |struct_bytes| Fp8Args { struct_bytes, scaling: 2, workspace_bytes: 9, half_scores: 1, ..args() };
        let told = |args: &Fp8Args| {
            // SAFETY: a live struct that is at least as large as it says.
            unsafe { read(args, OLDER_BYTES) }.map(|read| (read.scaling, read.workspace_bytes, read.half_scores))
        };
        assert_eq!(told(&given(256)), Ok((2, 9, 0)));
        assert_eq!(told(&given(264)), Ok((2, 9, 1)));
        assert_eq!(told(&given(288)), Ok((2, 9, 1)));
        assert!(told(&given(255)).is_err_and(|Refused(_, text)| text == "struct_bytes 255; allowed: 256 and above"));
    }

    /// Values of one and factors that tell blocks apart: what reaches the CPU backend through the raw layer.
    #[test]
    fn addresses_strides_and_factors_reach_the_raw_layer() {
        let (zeros, ones) = (vec![Code::from_f32(0.0); 2 * 2 * 16], vec![Code::from_f32(1.0); 130 * 16]);
        let mut o = vec![0x7fc0_u16; 2 * 2 * 16];
        let mut lse = [f32::NAN; 4];
        let (for_q, for_k, for_v) = ([1.0_f32; 2], [1.0_f32; 2], [2.0_f32, 67.0]);
        let args = Fp8Args {
            q: zeros.as_ptr().cast(),
            k: ones.as_ptr().cast(),
            v: ones.as_ptr().cast(),
            o: o.as_mut_ptr().cast(),
            lse: lse.as_mut_ptr(),
            q_descale: for_q.as_ptr(),
            k_descale: for_k.as_ptr(),
            v_descale: for_v.as_ptr(),
            q_stride: [64, 32, 16],
            k_stride: [130 * 16, 16, 16],
            v_stride: [130 * 16, 16, 16],
            o_stride: [64, 32, 16],
            ..given(2, 1)
        };
        // SAFETY: live memory, as large as the shapes.
        assert_eq!(args.call().and_then(|call| unsafe { call.run_on_cpu() }), Ok(()));
        // 128 values of 2 and two of 67: their mean is 3.
        assert!(o.iter().all(|&bits| bits == 0x4040), "{o:x?}");
        assert!(lse.iter().all(|lse| (lse - 130.0_f32.ln()).abs() < 1e-3), "{lse:?}");
    }
}
