//! The backward's entry.

use std::ffi::{c_int, c_void};

use hopper_attention::{BackwardProblem, Slot};

use super::call::{Call, Given, Problem};
use super::{Biasing, Dropping, INVALID, Numbers, Packing, Refused, answer, read};
use crate::FullBlocks;

/// `hattn_peer_bwd_args`: the header says what the fields mean.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BackwardArgs {
    pub struct_bytes: u64,
    pub q: *const c_void,
    pub k: *const c_void,
    pub v: *const c_void,
    pub o: *const c_void,
    pub d_o: *const c_void,
    pub lse: *const f32,
    pub d_q: *mut c_void,
    pub d_k: *mut c_void,
    pub d_v: *mut c_void,
    pub q_stride: [i64; 3],
    pub k_stride: [i64; 3],
    pub v_stride: [i64; 3],
    pub o_stride: [i64; 3],
    pub d_o_stride: [i64; 3],
    pub d_q_stride: [i64; 3],
    pub d_k_stride: [i64; 3],
    pub d_v_stride: [i64; 3],
    pub numbers: Numbers,
    pub stream: *mut c_void,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub packing: Packing,
    /// As the forward's.
    pub alibi_slopes: *const f32,
    /// As the forward's.
    pub full_block_cnt: *const i32,
    pub full_block_idx: *const i32,
    pub mask_block_cnt: *const i32,
    /// As the forward's.
    pub dropping: Dropping,
    /// As the forward's.
    pub biasing: Biasing,
    /// Its gradient, in its shape and type. Null where it is not asked for.
    pub d_bias: *mut c_void,
}

// As for the forward's.
const _: () = assert!(size_of::<BackwardArgs>() == 440 && std::mem::offset_of!(BackwardArgs, packing) == OLDER_BYTES);
const _: () = assert!(std::mem::offset_of!(BackwardArgs, numbers) == 272);
const _: () = assert!(std::mem::offset_of!(BackwardArgs, stream) == 328);

/// The size that the struct came with.
const OLDER_BYTES: usize = 352;

/// Enqueues a backward: `hattn_peer_bwd` of some library.
pub type Backward = unsafe extern "C" fn(*const BackwardArgs) -> c_int;
/// The scratch of a backward: `hattn_peer_bwd_workspace` of some library.
pub type BackwardWorkspace = unsafe extern "C" fn(*const BackwardArgs, *mut u64) -> c_int;

/// One backward, enqueued on `args.stream` on the current CUDA context; returns a `HATTN_PEER_` status.
///
/// # Safety
/// As for [`hattn_peer_fwd`](super::hattn_peer_fwd).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_bwd(args: *const BackwardArgs) -> c_int {
    answer(|| {
        // SAFETY: the caller's promise; the struct begins with its size and its fields take any bits.
        let args = unsafe { read(args, OLDER_BYTES) }?;
        // SAFETY: the caller vouches for the memory that the fields describe.
        unsafe { args.call()?.run() }
    })
}

/// Writes how many bytes of scratch [`hattn_peer_bwd`] needs for these arguments; returns a `HATTN_PEER_` status.
///
/// # Safety
/// `args` as for [`hattn_peer_fwd`](super::hattn_peer_fwd), addresses and workspace aside, which are not looked at;
/// `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_peer_bwd_workspace(args: *const BackwardArgs, bytes: *mut u64) -> c_int {
    answer(|| {
        // SAFETY: as in `hattn_peer_bwd`.
        let args = unsafe { read(args, OLDER_BYTES) }?;
        if bytes.is_null() {
            return Err(Refused(INVALID, "bytes is null".to_owned()));
        }
        let needed = args.problem()?.workspace_bytes()?;
        // SAFETY: not null, and the caller lets it be written.
        unsafe { bytes.write(needed as u64) };
        Ok(())
    })
}

impl BackwardArgs {
    fn problem(&self) -> Result<Problem, Refused> {
        let forward = self.numbers.forward(self.numbers.sixteen_bits()?, self.packing)?;
        let forward = forward.operand(Slot::AlibiSlopes, !self.alibi_slopes.is_null());
        let forward = forward.block_mask((!self.full_block_cnt.is_null()).then(FullBlocks::form));
        let forward = forward.dropout(self.dropping.option()?).bias(self.biasing.option(self.packing)?).build()?;
        Ok(Problem::Backward(BackwardProblem::builder(&forward).d_bias(!self.d_bias.is_null()).build()?))
    }

    fn call(&self) -> Result<Call<18>, Refused> {
        let [counts, indices, bits, full_counts, full] =
            Given::lists([self.full_block_cnt, self.full_block_idx, self.mask_block_cnt]);
        Ok(Call {
            problem: self.problem()?,
            packing: self.packing,
            tensors: [
                Given::strided(Slot::Q, self.q, self.q_stride),
                Given::strided(Slot::K, self.k, self.k_stride),
                Given::strided(Slot::V, self.v, self.v_stride),
                Given::strided(Slot::O, self.o, self.o_stride),
                Given::contiguous(Slot::Lse, self.lse),
                Given::strided(Slot::DO, self.d_o, self.d_o_stride),
                Given::strided(Slot::DQ, self.d_q, self.d_q_stride),
                Given::strided(Slot::DK, self.d_k, self.d_k_stride),
                Given::strided(Slot::DV, self.d_v, self.d_v_stride),
                Given::contiguous(Slot::AlibiSlopes, self.alibi_slopes),
                counts,
                indices,
                bits,
                full_counts,
                full,
                Given::contiguous(Slot::DropoutState, self.dropping.dropout_state),
                Given::contiguous(Slot::Bias, self.biasing.bias),
                Given::contiguous(Slot::DBias, self.d_bias),
            ],
            workspace: self.workspace,
            workspace_bytes: self.workspace_bytes,
            stream: self.stream,
        })
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::{Bias, DType};

    use super::super::Entry;
    use super::*;

    fn args() -> BackwardArgs {
        // SAFETY: every field is an integer, a float or a raw pointer, and all of them may be 0.
        let zero: BackwardArgs = unsafe { std::mem::zeroed() };
        BackwardArgs { struct_bytes: size_of::<BackwardArgs>() as u64, ..zero }
    }

    #[test]
    fn what_is_wrong_is_told_without_a_gpu() {
        let entry = Entry::own();
        let (backward, workspace) = (entry.backward.expect("ours has it"), entry.backward_workspace.expect("too"));
        let refused = |args: *const BackwardArgs| {
            let mut bytes = 7;
            // SAFETY: null or a live struct, which is refused before any of its addresses is used.
            let both = unsafe { [backward(args), workspace(args, &mut bytes)] };
            assert_eq!((both, bytes), ([INVALID; 2], 7));
            entry.complaint(INVALID)
        };
        assert_eq!(refused(std::ptr::null()), "invalid argument: args is null");
        assert!(
            refused(&BackwardArgs { struct_bytes: 8, ..args() }).ends_with("struct_bytes 8; allowed: 352 and above")
        );
        assert!(
            refused(&BackwardArgs { numbers: Numbers { dtype: 3, ..args().numbers }, ..args() }).contains("dtype: 3")
        );
        // SAFETY: as above; a null in place of an address to write.
        assert_eq!(unsafe { workspace(&args(), std::ptr::null_mut()) }, INVALID);
        assert!(entry.complaint(INVALID).ends_with("bytes is null"));
    }

    const NUMBERS: Numbers = Numbers {
        batch: 2,
        seqlen_q: 5,
        seqlen_kv: 7,
        heads_q: 4,
        heads_kv: 2,
        head_dim_qk: 64,
        head_dim_vo: 32,
        dtype: 1,
        mask: 2,
        corner: 1,
        window_left: 3,
        window_right: -1,
        softmax_scale: 0.5,
        softcap: 0.0,
    };

    #[test]
    fn the_problem_is_what_the_arguments_say() {
        let text = |numbers: Numbers| match (BackwardArgs { numbers, ..args() }).problem() {
            Ok(Problem::Backward(problem)) => problem.to_string(),
            Ok(Problem::Forward(problem) | Problem::Wished(problem, _)) => panic!("{problem}"),
            Err(Refused(status, text)) => format!("{status} {text}"),
        };
        let window =
            "backward bf16 batch 2 seqlen 5x7 heads 4/2 head_dim 64/32 window left 3 right all top-left scale 0.5";
        assert_eq!(text(NUMBERS), window);
        let causal = text(Numbers { mask: 1, corner: 0, window_left: -1, dtype: 0, ..NUMBERS });
        assert_eq!(causal, "backward f16 batch 2 seqlen 5x7 heads 4/2 head_dim 64/32 causal scale 0.5");
        for (wrong, part) in [
            (Numbers { mask: 3, ..NUMBERS }, "1 mask: 3; allowed: 0 (full)"),
            (Numbers { corner: 2, ..NUMBERS }, "1 corner: 2; allowed: 0 (bottom-right)"),
            (Numbers { window_left: -2, ..NUMBERS }, "1 window_left: -2; allowed: 0 and above"),
            (Numbers { seqlen_q: -5, ..NUMBERS }, "1 seqlen_q: -5; allowed: 0 and above"),
            (Numbers { heads_q: 3, ..NUMBERS }, "1 heads_q: 3 with heads_kv 2; allowed: a multiple"),
            (Numbers { softmax_scale: 0.0, ..NUMBERS }, "1 softmax_scale: 0; allowed: finite and above 0"),
        ] {
            assert!(text(wrong).starts_with(part), "{}", text(wrong));
        }
    }

    #[test]
    fn addresses_and_strides_reach_the_raw_layer() {
        let strides = |heads: i64, seqlen: i64, dims: i64| [seqlen * heads * dims, heads * dims, dims];
        let (of_q, of_o) = (strides(4, 5, 64), strides(4, 5, 32));
        let (of_k, of_v) = (strides(2, 7, 64), strides(2, 7, 32));
        let mut data: Vec<Vec<u16>> = vec![vec![0x3f80; 2 * 7 * 4 * 64]; 8]; // ones
        let lse = [f32::NEG_INFINITY; 2 * 4 * 5]; // no row has a part in any gradient
        let addresses: Vec<*mut c_void> = data.iter_mut().map(|data| data.as_mut_ptr().cast()).collect();
        let [q, k, v, o, d_o, d_q, d_k, d_v] = addresses[..] else { panic!("eight tensors") };
        let args = BackwardArgs {
            q,
            k,
            v,
            o,
            d_o,
            lse: lse.as_ptr(),
            d_q,
            d_k,
            d_v,
            q_stride: of_q,
            k_stride: of_k,
            v_stride: of_v,
            o_stride: of_o,
            d_o_stride: of_o,
            d_q_stride: of_q,
            d_k_stride: of_k,
            d_v_stride: of_v,
            numbers: NUMBERS,
            ..args()
        };
        // SAFETY: live memory, as large as the shapes.
        assert_eq!(args.call().and_then(|call| unsafe { call.run_on_cpu() }), Ok(()));
        for (gradient, elements) in data[5..].iter().zip([2 * 5 * 4 * 64, 2 * 7 * 2 * 64, 2 * 7 * 2 * 32]) {
            let (written, rest) = gradient.split_at(elements);
            assert!(written.iter().all(|&bits| bits == 0) && rest.iter().all(|&bits| bits == 0x3f80));
        }
        // A bias of each head and query, and its gradient: 0 too, where no row has a part in any.
        let (bias, mut d_bias) = ([0.5_f32; 4 * 5 * 7], [f32::NAN; 4 * 5 * 7]);
        let form = Bias::new(DType::F32).per_head(true).per_query(true);
        let biasing = Biasing::of(bias.as_ptr().cast(), form);
        let with_bias = BackwardArgs { biasing, d_bias: d_bias.as_mut_ptr().cast(), ..args };
        let Ok(Problem::Backward(problem)) = with_bias.problem() else { panic!("a backward") };
        assert!(problem.wants_d_bias() && problem.forward().bias() == Some(form), "{problem}");
        // SAFETY: as above.
        assert_eq!(with_bias.call().and_then(|call| unsafe { call.run_on_cpu() }), Ok(()));
        assert_eq!(d_bias, [0.0; 4 * 5 * 7]);
        let alone = BackwardArgs { d_bias: d_bias.as_mut_ptr().cast(), ..args };
        assert!(alone.problem().is_err_and(|Refused(_, text)| text.contains("d_bias")));
        let broken = BackwardArgs { d_q_stride: [0; 3], ..args };
        // SAFETY: as above; refused, since the elements of dQ would lie on each other.
        let refused = broken.call().and_then(|call| unsafe { call.run_on_cpu() });
        assert!(refused.is_err_and(|Refused(status, text)| status == INVALID && text.starts_with("d_q")));
    }
}
