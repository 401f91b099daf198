//! Checks of a run's tensors against the problem: one loop over the list of operands.

use std::ops::Range;

use super::raw::{Place, RawArgs, RawTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::DynLayout;
use crate::operand::{Access, MAX_RANK, Operand, Operands, Presence, Slot};
use crate::plan::{Planned, Target};

/// What the checks need to know of a tensor, whether it was borrowed or given by address.
#[derive(Clone, Copy)]
pub(crate) struct Given<'g> {
    pub slot: Slot,
    pub dtype: DType,
    pub layout: &'g DynLayout,
    pub place: Place,
    /// What a borrowed tensor was lent for. `None` for an address: its caller promises that the run may use the memory.
    pub lent: Option<Access>,
}

impl<'g> From<&'g (Slot, RawTensor)> for Given<'g> {
    fn from((slot, tensor): &'g (Slot, RawTensor)) -> Self {
        Self { slot: *slot, dtype: tensor.dtype, layout: &tensor.layout, place: tensor.place, lent: None }
    }
}

/// Checks presence, type, shape and place of every operand, and that two indices of an output never share an element.
pub(crate) fn operands<'g, C>(
    Planned { operands, target, .. }: &Planned<C>,
    given: impl Iterator<Item = Given<'g>> + Clone,
) -> Result<()> {
    if let Some(other) = given.clone().find(|given| operands.find(given.slot).is_none()) {
        let mut names: Vec<_> = operands.iter().map(|operand| operand.slot().name()).collect();
        names.dedup(); // Written and given factors of the quantiser are two operands with one name.
        let allowed = format!("the operands of this problem: {}", names.join(", "));
        return Err(Error::Value { what: other.slot.name(), got: "given".into(), allowed });
    }
    for operand in operands {
        let tensor = given.clone().find(|given| given.slot == operand.slot());
        if let Some(tensor) = presence(operand, tensor)? {
            one(operand, target, &tensor)?;
        }
    }
    Ok(())
}

/// Checks that an operand is given if it must be, and only if it may be. Returns its tensor.
fn presence<'g>(operand: &Operand, tensor: Option<Given<'g>>) -> Result<Option<Given<'g>>> {
    let what = operand.slot().name();
    let option = operand.belongs_to();
    let refuse = |got: &str, allowed: String| Err(Error::Value { what, got: got.into(), allowed });
    match (operand.presence(), &tensor) {
        (Presence::Required, None) => {
            let verb = match operand.access() {
                Access::Read => "reads",
                Access::Write => "writes",
            };
            let problem = match option {
                "" => "the problem".into(),
                option => format!("the problem, made with {option},"),
            };
            refuse("missing", format!("the tensor that {problem} {verb}"))
        }
        (Presence::Refused, Some(_)) => refuse("given", format!("none, since the problem was made without {option}")),
        _ => Ok(tensor),
    }
}

/// Checks type, shape, place and access of one operand.
fn one<C>(operand: &Operand, target: &Target<C>, tensor: &Given<'_>) -> Result<()> {
    let what = operand.slot().name();
    if tensor.dtype != operand.dtype() {
        // Operands with fewer than four dimensions (descale factors, the LSE, offsets and so on) have a type of their own.
        let whose = if operand.slot().rank() == MAX_RANK { ", the problem's" } else { "" };
        return Err(Error::Dtype { what, got: tensor.dtype, allowed: format!("{}{whose}", operand.dtype()) });
    }
    if tensor.layout.shape() != operand.shape() {
        return Err(Error::Shape {
            tensor: what,
            got: tensor.layout.shape().into(),
            want: operand.shape().into(),
            axes: operand.axes(),
        });
    }
    let in_place = match target {
        _ if operand.slot().may_be_on_the_host() && tensor.place == Place::Cpu => true,
        Target::Cpu => tensor.place == Place::Cpu,
        Target::Gpu(gpu) => gpu.ordinal().is_none_or(|ordinal| tensor.place == Place::Cuda(ordinal)),
    };
    if !in_place {
        let (got, allowed) = (format!("device {}", tensor.place), format!("device {target}, the plan's"));
        return Err(Error::Device { what, got, allowed });
    }
    match (operand.access(), tensor.lent) {
        (Access::Read, _) => Ok(()),
        (Access::Write, Some(Access::Read)) => {
            let (got, allowed) = ("lent for reading".into(), "a tensor that is lent for writing (TensorMut)".into());
            Err(Error::Value { what, got, allowed })
        }
        (Access::Write, _) => tensor.layout.check_written(what),
    }
}

/// Checks, on the CPU, that addresses are aligned and that the address range of each output overlaps no other tensor's.
pub(super) fn apart(operands: &Operands, args: &RawArgs) -> Result<()> {
    for (i, (slot, tensor)) in args.tensors.iter().enumerate() {
        let range = addresses(*slot, tensor)?;
        for (other_slot, other) in args.tensors.iter().take(i) {
            let written = [*slot, *other_slot].map(|slot| is_written(operands, slot));
            let other_range = addresses(*other_slot, other)?;
            let meet = range.start < other_range.end && other_range.start < range.end;
            if !meet || written == [false, false] {
                continue;
            }
            let (output, of_output, met) =
                if written[0] { (slot, &range, other_slot) } else { (other_slot, &other_range, slot) };
            return Err(Error::Layout {
                tensor: output.name(),
                got: format!("addresses {:#x} to {:#x}, which meet those of {met}", of_output.start, of_output.end),
                allowed: "on the CPU, an output whose range of addresses is its own".into(),
            });
        }
    }
    Ok(())
}

fn is_written(operands: &Operands, slot: Slot) -> bool {
    operands.find(slot).is_some_and(|operand| operand.access() == Access::Write)
}

/// The address range of a tensor, from its first byte to the end of its last element, gaps included.
fn addresses(slot: Slot, raw: &RawTensor) -> Result<Range<u64>> {
    if raw.layout.span() == 0 {
        return Ok(0..0);
    }
    let refuse = |got: String, allowed: String| Err(Error::Layout { tensor: slot.name(), got, allowed });
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
