//! Which tensors the passes read and write.

use std::collections::BTreeMap;

use hopper_attention::{Access, Operand, Operands, Presence, Slot};

/// The names of one tensor and its factors: in the forward pass, and where they are quantised.
pub struct Quantised {
    pub tensor: Slot,
    pub factors: Slot,
    pub values: Slot,
    pub stored: Slot,
    pub descale: Slot,
}

/// q, k and v.
pub const QUANTISED: [Quantised; 3] = {
    use Slot::*;
    [
        Quantised { tensor: Q, factors: DescaleQ, values: QValues, stored: QStored, descale: QDescale },
        Quantised { tensor: K, factors: DescaleK, values: KValues, stored: KStored, descale: KDescale },
        Quantised { tensor: V, factors: DescaleV, values: VValues, stored: VStored, descale: VDescale },
    ]
};

/// What the file must hold for a pass and the next one: what they read, but for what the first one writes, and for factors,
/// which quantising writes.
pub fn inputs<'a>(first: &'a Operands, next: Option<&'a Operands>) -> BTreeMap<Slot, &'a Operand> {
    let computed = |slot| {
        outputs(first).any(|operand| operand.slot() == slot) || QUANTISED.iter().any(|names| names.factors == slot)
    };
    let read = |operand: &Operand| operand.access() == Access::Read && operand.presence() == Presence::Required;
    let all = first.iter().chain(next.into_iter().flatten());
    all.filter(|operand| read(operand) && !computed(operand.slot())).map(|operand| (operand.slot(), operand)).collect()
}

/// What a pass writes.
pub fn outputs(pass: &Operands) -> impl DoubleEndedIterator<Item = &Operand> {
    pass.iter().filter(|operand| operand.access() == Access::Write && operand.presence() != Presence::Refused)
}
