//! Offsets and used lengths of sequences as arguments of a run: checked numbers on a device, and numbers that nobody checked.

use std::fmt;

#[cfg(feature = "cuda")]
use cudarc::driver::CudaSlice;

use super::args::{Args, BackwardArgs, ForwardArgs, QuantizeArgs};
use crate::device::Stream;
#[cfg(feature = "cuda")]
use crate::device::upload;
use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::problem::ForwardProblem;
use crate::sequences::{Side, check_covered, check_offsets, check_used};
use crate::tensor::{AnyTensor, Numbers, TensorRef};

/// Where packed sequences begin, checked and on a device: `batch + 1` offsets from 0 up that do not decrease.
///
/// Sequence `i` has the rows from offset `i` to below offset `i + 1`. Make the offsets once for a batch, and lend them to the
/// runs of all layers. A copy of the numbers stays on the host, so that a run can check that the last offset is within its
/// tensors.
///
/// ```
/// use hopper_attention::{SequenceOffsets, Stream};
/// # fn main() -> hopper_attention::Result<()> {
/// let offsets = SequenceOffsets::from_lengths(&Stream::Cpu, [3, 0, 5])?;
/// assert_eq!((offsets.numbers(), offsets.sequences()), (&[0, 3, 3, 8][..], 3));
/// assert!(SequenceOffsets::new(&Stream::Cpu, &[0, 3, 2]).is_err());
/// # Ok(()) }
/// ```
pub struct SequenceOffsets(OnDevice);

/// How many rows of each sequence are used, checked and on a device: `batch` numbers of 0 and above.
///
/// A run checks them against the lengths of its sequences.
pub struct UsedLengths(OnDevice);

/// Numbers on the host, and a copy of them on a GPU if the stream is one of a GPU.
struct OnDevice {
    numbers: Vec<i32>,
    #[cfg(feature = "cuda")]
    copy: Option<CudaSlice<i32>>,
}

impl OnDevice {
    fn new(stream: &Stream, numbers: Vec<i32>) -> Result<Self> {
        #[cfg(not(feature = "cuda"))]
        let Stream::Cpu = stream;
        Ok(Self {
            #[cfg(feature = "cuda")]
            copy: match stream {
                Stream::Cpu => None,
                Stream::Cuda(stream) => Some(upload(stream, &numbers)?),
            },
            numbers,
        })
    }

    fn tensor(&self) -> AnyTensor<'_> {
        #[cfg(feature = "cuda")]
        if let Some(copy) = &self.copy {
            let view = copy.slice(..self.numbers.len());
            return AnyTensor::of_list(TensorRef::cuda_list(view), Numbers::Known(&self.numbers));
        }
        AnyTensor::of_list(TensorRef::list(&self.numbers), Numbers::Known(&self.numbers))
    }
}

impl SequenceOffsets {
    /// Checks offsets, and copies them to the stream's device. On a GPU the call waits for the copy.
    ///
    /// # Errors
    /// - [`Error::Value`]: there is no offset, or one is below 0 or below the one before it.
    /// - [`Error::Driver`]: the GPU has no memory for the copy.
    /// - [`Error::Capture`]: the stream is captured into a CUDA graph.
    pub fn new(stream: &Stream, offsets: &[i32]) -> Result<Self> {
        if offsets.is_empty() {
            let (got, allowed) = ("no number".into(), "batch + 1 offsets".into());
            return Err(Error::Value { what: "offsets", got, allowed });
        }
        check_offsets("offsets", offsets, i32::MAX as usize)?;
        Ok(Self(OnDevice::new(stream, offsets.to_vec())?))
    }

    /// As [`new`](Self::new), from the lengths of the sequences. The first one begins with row 0.
    ///
    /// # Errors
    /// As [`new`](Self::new). [`Error::Value`] also when the sum of the lengths reaches 2^31.
    pub fn from_lengths(stream: &Stream, lengths: impl IntoIterator<Item = usize>) -> Result<Self> {
        let (mut offsets, mut sum) = (vec![0], 0_i32);
        for len in lengths {
            let next = i32::try_from(len).ok().and_then(|len| sum.checked_add(len));
            sum = next.ok_or_else(|| Error::Value {
                what: "lengths",
                got: format!("{sum} rows and {len} more"),
                allowed: "below 2^31 rows in all".into(),
            })?;
            offsets.push(sum);
        }
        Ok(Self(OnDevice::new(stream, offsets)?))
    }

    /// The offsets.
    pub fn numbers(&self) -> &[i32] {
        &self.0.numbers
    }

    /// The number of sequences.
    pub fn sequences(&self) -> usize {
        self.0.numbers.len() - 1
    }
}

impl UsedLengths {
    /// Checks lengths, and copies them to the stream's device. On a GPU the call waits for the copy.
    ///
    /// # Errors
    /// - [`Error::Value`]: a length is below 0.
    /// - [`Error::Driver`]: the GPU has no memory for the copy.
    /// - [`Error::Capture`]: the stream is captured into a CUDA graph.
    pub fn new(stream: &Stream, lengths: &[i32]) -> Result<Self> {
        check_used("lengths", lengths, None, i32::MAX as usize)?;
        Ok(Self(OnDevice::new(stream, lengths.to_vec())?))
    }

    /// The lengths.
    pub fn numbers(&self) -> &[i32] {
        &self.0.numbers
    }
}

impl fmt::Debug for SequenceOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SequenceOffsets").field(&self.0.numbers).finish()
    }
}

impl fmt::Debug for UsedLengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UsedLengths").field(&self.0.numbers).finish()
    }
}

impl<'a> Args<'a> {
    /// Adds checked offsets as [`Slot::CuSeqlensQ`] or [`Slot::CuSeqlensKv`].
    #[must_use]
    pub fn offsets(self, slot: Slot, offsets: &'a SequenceOffsets) -> Self {
        self.with(slot, offsets.0.tensor())
    }

    /// Adds checked lengths as [`Slot::SequsedQ`] or [`Slot::SequsedKv`].
    #[must_use]
    pub fn used(self, slot: Slot, lengths: &'a UsedLengths) -> Self {
        self.with(slot, lengths.0.tensor())
    }

    /// Adds offsets or used lengths whose numbers nobody has checked, such as those that another kernel writes on a GPU.
    ///
    /// # Safety
    /// The numbers are what [`Lengths::check`](crate::Lengths::check) allows when the work starts, and they do not change until it is
    /// done. On the CPU this is no condition: a run
    /// checks the numbers.
    ///
    /// What other numbers do on a GPU: the kernels clamp them as [`clamp_sequences`](crate::clamp_sequences) says. Rows
    /// are then wrong, or not written. No memory outside of the tensors is read or written. What rows of outputs hold that
    /// two sequences claim is not promised.
    #[must_use]
    pub unsafe fn lengths_unchecked(self, slot: Slot, numbers: TensorRef<'a, i32, 1>) -> Self {
        self.with(slot, AnyTensor::of_list(numbers, Numbers::Unchecked))
    }

    /// Checks numbers that are known on the host against the problem. On a GPU also refuses numbers of which nothing is known.
    pub(super) fn check_lengths(&self, problem: &ForwardProblem, on_gpu: bool) -> Result<()> {
        for side in Side::BOTH {
            let [of_offsets, of_used] = side.slots();
            let mut known = [None; 2];
            for (slot, known) in [of_offsets, of_used].into_iter().zip(&mut known) {
                match self.get(slot).map(|tensor| tensor.numbers) {
                    Some(Numbers::Known(numbers)) => *known = Some(numbers),
                    Some(Numbers::Unknown) if on_gpu => {
                        let got = "numbers on a GPU that were not checked".into();
                        let allowed = "SequenceOffsets, UsedLengths, or the unsafe lengths_unchecked".into();
                        return Err(Error::Value { what: slot.name(), got, allowed });
                    }
                    _ => {}
                }
            }
            let (rows, [offsets, used]) = (side.rows(problem), known);
            // Their order was checked when they were made. So the last one is the largest.
            if offsets.and_then(|offsets| offsets.last()).is_some_and(|&last| last as usize > rows) {
                check_offsets(of_offsets.name(), offsets.unwrap_or_default(), rows)?;
            }
            // Offsets that nobody checked may make sequences of any length.
            if let Some(used) = used.filter(|_| offsets.is_some() || !problem.wants(of_offsets)) {
                check_used(of_used.name(), used, offsets, rows)?;
            }
            // Used lengths that nobody checked make no sequence longer.
            if !(problem.wants(of_used) && used.is_none()) {
                check_covered(problem, side, (offsets, used))?;
            }
        }
        Ok(())
    }
}

/// The setters of offsets and used lengths, which are the same for every pass.
macro_rules! lengths {
    ($($args:ident)*) => {$(
        impl<'a> $args<'a> {
            /// Where each sequence of a packed Q begins: `batch + 1` offsets.
            ///
            /// They must be given exactly when the problem was made with
            /// [`packed_q(true)`](crate::ForwardProblemBuilder::packed_q).
            pub fn cu_seqlens_q(self, offsets: &'a SequenceOffsets) -> Self {
                Self(self.0.offsets(Slot::CuSeqlensQ, offsets))
            }

            /// Where each sequence of packed K and V begins: `batch + 1` offsets.
            ///
            /// They must be given exactly when the problem was made with
            /// [`packed_kv(true)`](crate::ForwardProblemBuilder::packed_kv).
            pub fn cu_seqlens_kv(self, offsets: &'a SequenceOffsets) -> Self {
                Self(self.0.offsets(Slot::CuSeqlensKv, offsets))
            }

            /// How many rows of each sequence of Q are used: `batch` lengths.
            ///
            /// They must be given exactly when the problem was made with
            /// [`used_q(true)`](crate::ForwardProblemBuilder::used_q).
            pub fn seqused_q(self, lengths: &'a UsedLengths) -> Self {
                Self(self.0.used(Slot::SequsedQ, lengths))
            }

            /// How many rows of each sequence of K and V are used: `batch` lengths.
            ///
            /// They must be given exactly when the problem was made with
            /// [`used_kv(true)`](crate::ForwardProblemBuilder::used_kv).
            pub fn seqused_kv(self, lengths: &'a UsedLengths) -> Self {
                Self(self.0.used(Slot::SequsedKv, lengths))
            }

            /// Offsets or used lengths whose numbers nobody has checked, by the name of their operand.
            ///
            /// # Safety
            /// As [`Args::lengths_unchecked`].
            pub unsafe fn lengths_unchecked(self, slot: Slot, numbers: TensorRef<'a, i32, 1>) -> Self {
                // SAFETY: the caller's promise.
                Self(unsafe { self.0.lengths_unchecked(slot, numbers) })
            }
        }
    )*};
}

lengths!(ForwardArgs BackwardArgs QuantizeArgs);
