//! The structs and constants of the ABI, and how a struct of another version is read.

use std::ffi::c_void;

use hopper_attention::Slot;

use crate::status::{Failure, Outcome};

/// The version of the ABI, which every struct carries. It changes when something is removed or changes its meaning.
pub const HATTN_ABI_VERSION: u32 = 1;

/// The type of a tensor's elements. 0 is none, so that a forgotten field is refused.
pub type hattn_dtype = i32;
/// IEEE 754 half precision.
pub const HATTN_F16: hattn_dtype = 1;
/// bfloat16.
pub const HATTN_BF16: hattn_dtype = 2;
/// IEEE 754 single precision.
pub const HATTN_F32: hattn_dtype = 3;
/// 8-bit float with 4 exponent and 3 mantissa bits, largest value 448.
pub const HATTN_E4M3: hattn_dtype = 4;

/// Where something is: HATTN_CPU, or the ordinal of a GPU (0 and above) in the CUDA driver's order.
pub type hattn_device = i32;
/// The cores of this machine.
pub const HATTN_CPU: hattn_device = -1;

/// Which keys a query attends to. A query that keeps no key gets output 0 and log-sum-exp -inf.
pub type hattn_mask = i32;
/// Every key.
pub const HATTN_MASK_FULL: hattn_mask = 0;
/// The keys up to the one where the query stands.
pub const HATTN_MASK_CAUSAL: hattn_mask = 1;
/// The keys from window_left before to window_right after the one where the query stands.
pub const HATTN_MASK_WINDOW: hattn_mask = 2;

/// Where the diagonal of a causal mask or window lies when seqlen_q and seqlen_kv differ.
pub type hattn_corner = i32;
/// The last query stands at the last key: query i at key i + seqlen_kv - seqlen_q.
pub const HATTN_BOTTOM_RIGHT: hattn_corner = 0;
/// The first query stands at the first key: query i at key i.
pub const HATTN_TOP_LEFT: hattn_corner = 1;

/// The instruction set that kernels are written for.
pub type hattn_arch = i32;
/// The GPU's own. The CPU takes no other.
pub const HATTN_ARCH_OWN: hattn_arch = 0;
/// Compute capability 8.0 and later.
pub const HATTN_ARCH_SM80: hattn_arch = 80;
/// Compute capability 9.0.
pub const HATTN_ARCH_SM90: hattn_arch = 90;

/// How many elements of Q, K or V of HATTN_E4M3 share a descale factor: a real value is what is stored times its factor.
/// Factors are HATTN_F32 [batch, heads, blocks].
pub type hattn_scaling = i32;
/// All of them: factors [1, 1, 1].
pub const HATTN_PER_TENSOR: hattn_scaling = 0;
/// Those of one sequence and key head, of Q those of all query heads that read it: factors [batch, heads_kv, 1].
pub const HATTN_PER_HEAD: hattn_scaling = 1;
/// 128 rows of one head, as far as they exist: factors [batch, heads, ceil(seqlen / 128)], of Q with heads_q and seqlen_q, of
/// K and V with heads_kv and seqlen_kv.
pub const HATTN_PER_BLOCK: hattn_scaling = 2;

/// A window without a bound on this side.
pub const HATTN_UNBOUNDED: i64 = -1;

/// A CUstream, which is a cudaStream_t, points to one.
pub struct CUstream_st {
    _private: [u8; 0],
}

/// A struct that says how large its caller thinks it is.
///
/// # Safety
/// `repr(C)`, beginning with `struct_size` and `abi_version` as u32, and valid for all bits, 0 included.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its size when it came into this version of the ABI: no caller knows less.
    const LEAST: usize;
}

/// Declares structs of the ABI: adds what all of them have, and makes each [`Versioned`]. `struct_size >= LEAST` stands for
/// the first field.
macro_rules! versioned {
    ($(
        $(#[$about:meta])*
        pub struct $name:ident {
            $(#[$of_size:meta])*
            struct_size >= $least:literal,
            $($(#[$of_field:meta])* $field:ident: $type:ty,)*
        }
    )*) => {$(
        written! {
            $name:
            $(#[$about])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub struct $name {
                $(#[$of_size])*
                pub struct_size: u32,
                /// HATTN_ABI_VERSION.
                pub abi_version: u32,
                $($(#[$of_field])* pub $field: $type,)*
            }
        }

        // SAFETY: integers, floats and raw pointers, with the header first.
        unsafe impl Versioned for $name {
            const NAME: &'static str = stringify!($name);
            const LEAST: usize = $least;
        }
    )*};
}

/// Keeps the text of items with a type. cbindgen expands no macro, and tests/header.rs gives it the texts.
macro_rules! written {
    ($name:ident: $($item:tt)*) => {
        $($item)*

        impl $name {
            /// The declarations in Rust.
            #[doc(hidden)]
            pub const TEXT: &'static str = stringify!($($item)*);
        }
    };
}
pub(crate) use written;

/// The tensors of a struct of arguments: each operand with the field that has it.
macro_rules! tensors {
    ($args:ident: $($slot:ident $field:ident),*) => {
        impl $args {
            /// Its tensors, by the names of their operands.
            pub(crate) fn tensors(&self) -> [(Slot, *const hattn_tensor); [$(Slot::$slot),*].len()] {
                [$((Slot::$slot, self.$field)),*]
            }
        }
    };
}

/// Declares the problem of a pass: the fields that both passes have stand here. What follows `dtype` and the pass's flag lies
/// behind them.
macro_rules! problem {
    (
        $(#[$about:meta])*
        pub struct $name:ident {
            $(#[$of_size:meta])*
            struct_size >= $least:literal,
            $(#[$of_dtype:meta])*
            dtype,
            $(#[$of_flag:meta])*
            $flag:ident,
            $($behind:tt)*
        }
    ) => {
        versioned! {
            $(#[$about])*
            #[derive(Default, PartialEq)]
            pub struct $name {
                $(#[$of_size])*
                struct_size >= $least,
                $(#[$of_dtype])*
                dtype: hattn_dtype,
                /// Which keys a query attends to.
                mask: hattn_mask,
                /// Where a causal mask or a window is aligned.
                corner: hattn_corner,
                $(#[$of_flag])*
                $flag: i32,
                /// Sequences; may be 0.
                batch: i64,
                /// Queries in a sequence; may be 0.
                seqlen_q: i64,
                /// Keys in a sequence; may be 0.
                seqlen_kv: i64,
                /// Query heads, a multiple of heads_kv: head h reads key head h / (heads_q / heads_kv).
                heads_q: i64,
                /// Key and value heads.
                heads_kv: i64,
                /// Length of a query and of a key.
                head_dim_qk: i64,
                /// Length of a value and of an output.
                head_dim_vo: i64,
                /// With HATTN_MASK_WINDOW: keys kept before a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
                window_left: i64,
                /// With HATTN_MASK_WINDOW: keys kept after a query's own; HATTN_UNBOUNDED: all. Otherwise not looked at.
                window_right: i64,
                /// The factor on Q K^T, finite and above 0; 0 for 1 / sqrt(head_dim_qk).
                softmax_scale: f32,
                $($behind)*
            }
        }
    };
}

problem! {
    /// The forward pass O = softmax(mask(softmax_scale * Q K^T)) V, as numbers. Begin with HATTN_FORWARD_PROBLEM_INIT.
    ///
    /// Q is [batch, seqlen_q, heads_q, head_dim_qk], K [batch, seqlen_kv, heads_kv, head_dim_qk],
    /// V [batch, seqlen_kv, heads_kv, head_dim_vo], O [batch, seqlen_q, heads_q, head_dim_vo].
    pub struct hattn_forward_problem {
        /// sizeof(hattn_forward_problem).
        struct_size >= 104,
        /// Of Q, K, V and O: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too. HATTN_E4M3: of Q, K and V, which have factors then.
        dtype,
        /// 1: the log-sum-exp of each row is an output; 0: it is not.
        lse,
        /// Which kernels compute it; a GPU that does not run them, or a build without them, has no plan.
        arch: hattn_arch,
        /// Of O: 0 for dtype, of HATTN_E4M3 operands for HATTN_BF16; these may have HATTN_F16 and HATTN_E4M3 too.
        output: hattn_dtype,
        /// With HATTN_E4M3 operands: how many elements share a factor. Otherwise 0.
        scaling: hattn_scaling,
        /// With HATTN_E4M3 operands, 1: the largest magnitude of O is an output; 0: it is not. Otherwise 0.
        amax: i32,
        /// With HATTN_E4M3 operands, 1: scores may be summed in half precision, which is faster on a GPU where no stored element of
        /// Q and K is larger than 14 in magnitude, and hattn_quantize_run of this problem makes none. The kernel looks: where one is
        /// larger, or a NaN, another kernel computes all again, and it takes twice as long and more. 0: single precision. Otherwise 0.
        half_scores: i32,
    }
}

versioned! {
    /// Taking Q, K and V to operands of HATTN_E4M3, as numbers. Begin with HATTN_QUANTIZE_PROBLEM_INIT.
    ///
    /// A factor is max(amax / 448, the smallest normal number), amax the largest finite magnitude that shares it, and what is
    /// stored the nearest to the value times 1 / factor, or 448 with its sign where that is larger; what is not finite is stored
    /// as NaN. Of Q and K it is 14 in place of 448 where the forward problem has half_scores.
    pub struct hattn_quantize_problem {
        /// sizeof(hattn_quantize_problem).
        struct_size >= 32,
        /// What the operands are for: sizes, HATTN_E4M3 and the scaling.
        forward: *const hattn_forward_problem,
        /// Of the values: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too.
        source: hattn_dtype,
        /// 1: Q and K are rotated before, by signs and a Hadamard transform over the head dim, which leaves Q K^T as it is and
        /// spreads outliers; 0: they are not.
        hadamard: i32,
        /// With hadamard: of the signs; queries and keys that meet have the same. Otherwise not looked at.
        seed: u64,
    }
}

problem! {
    /// The gradients of the forward pass with respect to Q, K and V, as numbers. Begin with HATTN_BACKWARD_PROBLEM_INIT.
    ///
    /// dQ, dK, dV and dO, the gradient of the output, have the shapes of Q, K, V and O.
    pub struct hattn_backward_problem {
        /// sizeof(hattn_backward_problem).
        struct_size >= 104,
        /// Of Q, K, V, O and all gradients but the log-sum-exp's: HATTN_F16 or HATTN_BF16; on the CPU HATTN_F32 too.
        dtype,
        /// 1: a gradient of the log-sum-exp is an input; 0: it is not.
        d_lse,
        /// 1: the same inputs, plan and device give the same bits, which may cost time on a GPU; 0: that is not promised
        /// there.
        deterministic: i32,
        /// Which kernels compute it; a GPU that does not run them, or a build without them, has no plan.
        arch: hattn_arch,
        /// 0.
        reserved: u32,
    }
}

versioned! {
    /// Borrowed memory. Begin with HATTN_TENSOR_INIT.
    pub struct hattn_tensor {
        /// sizeof(hattn_tensor).
        struct_size >= 96,
        /// The first element. Inputs are only read. Anything where there is no element.
        data: *mut c_void,
        /// Of the elements.
        dtype: hattn_dtype,
        /// Where the memory is.
        device: hattn_device,
        /// 4: [batch, seqlen, heads, head_dim]. 3: [batch, heads, seqlen], the log-sum-exp, or [batch, heads, blocks], factors.
        /// 2: [3, 2], counts. 1: a single number.
        ndim: i32,
        /// 0.
        reserved: i32,
        /// Sizes; from ndim on not looked at.
        shape: [i64; 4],
        /// From one element to the next, in elements; the innermost is 1. From ndim on not looked at.
        stride: [i64; 4],
    }
}

versioned! {
    /// What a forward pass reads and writes. Begin with HATTN_FORWARD_ARGS_INIT.
    pub struct hattn_forward_args {
        /// sizeof(hattn_forward_args).
        struct_size >= 64,
        /// Queries.
        q: *const hattn_tensor,
        /// Keys.
        k: *const hattn_tensor,
        /// Values.
        v: *const hattn_tensor,
        /// The output.
        o: *const hattn_tensor,
        /// The log-sum-exp of each row, natural log, HATTN_F32: given exactly when the problem says so, otherwise null.
        lse: *const hattn_tensor,
        /// Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
        workspace: *mut c_void,
        /// At least what hattn_forward_plan_workspace_size says.
        workspace_bytes: usize,
        /// The factors of Q, K and V, HATTN_F32, finite and above 0 (which the CPU checks): given exactly with HATTN_E4M3
        /// operands, otherwise null.
        descale_q: *const hattn_tensor,
        /// As descale_q.
        descale_k: *const hattn_tensor,
        /// As descale_q.
        descale_v: *const hattn_tensor,
        /// What O is multiplied by before it is rounded, one HATTN_F32: given exactly with an output of HATTN_E4M3, otherwise null.
        scale_o: *const hattn_tensor,
        /// The largest magnitude of O before that, one HATTN_F32, written: given exactly when the problem says so, otherwise
        /// null.
        amax: *const hattn_tensor,
    }
}

impl hattn_forward_problem {
    /// The optional operands that it may ask for, with the fields that do.
    pub(crate) fn asked_for(&self) -> [(Slot, i32); 2] {
        [(Slot::Lse, self.lse), (Slot::Amax, self.amax)]
    }
}

tensors! {
    hattn_forward_args: Q q, K k, V v, O o, Lse lse, DescaleQ descale_q, DescaleK descale_k, DescaleV descale_v,
                        ScaleO scale_o, Amax amax
}

impl Default for hattn_forward_args {
    /// Null pointers, and a header that is still to be filled in.
    fn default() -> Self {
        // SAFETY: integers and raw pointers, for which 0 is valid.
        unsafe { std::mem::zeroed() }
    }
}

versioned! {
    /// One tensor to quantise. Begin with HATTN_QUANTIZE_TENSOR_INIT.
    pub struct hattn_quantize_tensor {
        /// sizeof(hattn_quantize_tensor).
        struct_size >= 40,
        /// What is read, of the source type.
        values: *const hattn_tensor,
        /// What is written, HATTN_E4M3.
        stored: *const hattn_tensor,
        /// Its factors, HATTN_F32 as the scaling says: written, or read.
        descale: *const hattn_tensor,
        /// 1: the factors are given, finite and above 0 (which the CPU checks); 0: they are made of the largest magnitudes.
        given: i32,
        /// 0.
        reserved: u32,
    }
}

versioned! {
    /// What a quantiser reads and writes. Begin with HATTN_QUANTIZE_ARGS_INIT.
    pub struct hattn_quantize_args {
        /// sizeof(hattn_quantize_args).
        struct_size >= 56,
        /// Queries; null where they are not quantised.
        q: *const hattn_quantize_tensor,
        /// Keys; null where they are not quantised.
        k: *const hattn_quantize_tensor,
        /// Values; null where they are not quantised.
        v: *const hattn_quantize_tensor,
        /// Where to count, HATTN_F32 [3, 2], of q, k and v: elements that were too large and stored as 448 (or 14), and those that
        /// were not finite. Null where it is not wanted.
        counts: *const hattn_tensor,
        /// Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
        workspace: *mut c_void,
        /// At least what hattn_quantize_plan_workspace_size says.
        workspace_bytes: usize,
    }
}

versioned! {
    /// What a backward pass reads and writes. Begin with HATTN_BACKWARD_ARGS_INIT.
    pub struct hattn_backward_args {
        /// sizeof(hattn_backward_args).
        struct_size >= 104,
        /// Queries.
        q: *const hattn_tensor,
        /// Keys.
        k: *const hattn_tensor,
        /// Values.
        v: *const hattn_tensor,
        /// The forward pass's output.
        o: *const hattn_tensor,
        /// The forward pass's log-sum-exp, HATTN_F32. A row of -inf has no part in any gradient, and its own is 0.
        lse: *const hattn_tensor,
        /// The gradient of the output.
        d_o: *const hattn_tensor,
        /// The gradient of the log-sum-exp, HATTN_F32: given exactly when the problem says so, otherwise null.
        d_lse: *const hattn_tensor,
        /// The gradient of the queries, overwritten.
        d_q: *const hattn_tensor,
        /// The gradient of the keys, overwritten: the sum over the query heads that read them.
        d_k: *const hattn_tensor,
        /// The gradient of the values, overwritten: the sum over the query heads that read them.
        d_v: *const hattn_tensor,
        /// Scratch memory on the plan's device, aligned to 16 bytes; null where the plan needs none.
        workspace: *mut c_void,
        /// At least what hattn_backward_plan_workspace_size says.
        workspace_bytes: usize,
    }
}

tensors! {
    hattn_backward_args: Q q, K k, V v, O o, Lse lse, DO d_o, DLse d_lse, DQ d_q, DK d_k, DV d_v
}

/// No struct grows past this, so that a wild `struct_size` is refused instead of followed.
const MOST: usize = 4096;

/// Reads a struct that may be older or newer than this library.
///
/// # Safety
/// `pointer` is null or misaligned, or points to 8 readable bytes, and if these hold this ABI's version and a size, to as
/// many readable bytes as they say.
pub(crate) unsafe fn read<T: Versioned>(what: &str, pointer: *const T) -> Outcome<T> {
    if pointer.is_null() {
        return Err(Failure::argument(what, "a null pointer", format_args!("a {}", T::NAME)));
    }
    if !pointer.is_aligned() {
        let allowed = format_args!("multiples of {} bytes", align_of::<T>());
        return Err(Failure::argument(what, &format!("address {pointer:p}"), allowed));
    }
    // SAFETY: neither null nor misaligned, so the caller promises a header.
    let [size, version] = unsafe { pointer.cast::<[u32; 2]>().read() };
    if version != HATTN_ABI_VERSION {
        let text = format!("{what}: abi_version {version}; allowed: {HATTN_ABI_VERSION}, which this library speaks");
        return Err(Failure::Abi(text));
    }
    let (size, known) = (size as usize, size_of::<T>());
    let refuse = |size: usize, allowed: String| {
        Err(Failure::Abi(format!("{what}: struct_size {size}; allowed: {allowed} (sizeof({}))", T::NAME)))
    };
    if !(T::LEAST..=MOST).contains(&size) {
        return refuse(size, format!("{} to {MOST}", T::LEAST));
    }
    // SAFETY: the caller promises `size` bytes.
    let surplus = (known..size).any(|at| unsafe { *pointer.cast::<u8>().add(at) } != 0);
    if surplus {
        return refuse(size, format!("{known}, or more if the fields that this library does not know are 0"));
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold that many bytes; all bits, and the zeros after them, are valid for T.
    unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), size.min(known));
        Ok(value.assume_init())
    }
}

// The layout that the ABI promises: abi/layout.def.
include!(concat!(env!("OUT_DIR"), "/layout.rs"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::HATTN_ERROR_ABI;

    /// A problem in memory of any size.
    #[repr(C, align(8))]
    struct Block([u8; 8192]);

    fn block(size: u32, version: u32) -> Block {
        let mut block = Block([0; 8192]);
        block.0[..4].copy_from_slice(&size.to_ne_bytes());
        block.0[4..8].copy_from_slice(&version.to_ne_bytes());
        block
    }

    fn text(block: &Block) -> Result<hattn_forward_problem, String> {
        // SAFETY: aligned, and larger than any size that is followed.
        unsafe { read("problem", (&raw const *block).cast::<hattn_forward_problem>()) }.map_err(|failure| {
            assert_eq!(failure.status(), HATTN_ERROR_ABI);
            failure.to_string()
        })
    }

    #[test]
    fn sizes_and_versions_are_those_that_exist() {
        assert_eq!(text(&block(104, 1)).unwrap().batch, 0);
        assert_eq!(text(&block(104, 2)).unwrap_err(), "problem: abi_version 2; allowed: 1, which this library speaks");
        for size in [0, 103, 4097, u32::MAX] {
            let want = format!("problem: struct_size {size}; allowed: 104 to 4096 (sizeof(hattn_forward_problem))");
            assert_eq!(text(&block(size, 1)).unwrap_err(), want);
        }
    }

    #[test]
    fn fields_of_a_newer_caller_must_be_zero() {
        let mut newer = block(128, 1);
        newer.0[24] = 3;
        assert_eq!(text(&newer).unwrap().batch, 3);
        newer.0[127] = 1;
        assert!(text(&newer).unwrap_err().starts_with("problem: struct_size 128; allowed: 120, or more if"));
        // Past what the caller says is not the struct's.
        newer.0[127] = 0;
        newer.0[128] = 1;
        assert!(text(&newer).is_ok());
    }

    #[test]
    fn fields_that_an_older_caller_does_not_know_are_zero() {
        let mut older = block(104, 1);
        older.0[104..120].fill(1);
        let read = text(&older).unwrap();
        assert_eq!((read.output, read.scaling, read.amax, read.half_scores), (0, 0, 0, 0));
    }
}
