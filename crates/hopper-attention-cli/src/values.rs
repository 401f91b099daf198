//! Tensors on the host: elements of any type, by the names of the operands that they are.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use hopper_attention::reference::Tensor;
use hopper_attention::{DType, E4M3, Element, Layout, Lengths, Slot, bf16, f16};
use hopper_attention_benches::memory;

/// The tensors of a problem. Those of four dimensions lie in the file's order, and all without gaps.
pub type Tensors = BTreeMap<Slot, Values>;

/// A tensor that the file or an earlier pass has left.
pub fn tensor(tensors: &Tensors, slot: Slot) -> Result<&Values> {
    tensors.get(&slot).with_context(|| format!("{slot} was neither read nor computed"))
}

/// The offsets and used lengths that the file holds.
pub fn lengths(tensors: &Tensors) -> Lengths<'_> {
    let list = |slot| match tensors.get(&slot) {
        Some(Values::I32(list)) => Some(&list[..]),
        _ => None,
    };
    Lengths {
        cu_seqlens_q: list(Slot::CuSeqlensQ),
        cu_seqlens_kv: list(Slot::CuSeqlensKv),
        seqused_q: list(Slot::SequsedQ),
        seqused_kv: list(Slot::SequsedKv),
    }
}

/// The words of the seed and the offset of dropout, where there is any.
pub fn dropout_state(tensors: &Tensors) -> Option<[i32; 4]> {
    match tensors.get(&Slot::DropoutState) {
        Some(Values::I32(words)) => words[..].try_into().ok(),
        _ => None,
    }
}

/// The elements of a tensor.
pub enum Values {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    E4m3(Vec<E4M3>),
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// The same of the elements, whatever their type.
macro_rules! each {
    ($values:expr, $elements:ident => $work:expr) => {
        match $values {
            Values::Bf16($elements) => $work,
            Values::F16($elements) => $work,
            Values::E4m3($elements) => $work,
            Values::F32($elements) => $work,
            Values::I32($elements) => $work,
        }
    };
}
pub(crate) use each;

impl Values {
    /// NaN, so that an element that is never written cannot pass for a result.
    pub fn unwritten(dtype: DType, shape: &[usize]) -> Result<Self> {
        Ok(match dtype {
            DType::BF16 => Self::Bf16(nan(shape)?),
            DType::F16 => Self::F16(nan(shape)?),
            DType::E4M3 => Self::E4m3(nan(shape)?),
            DType::F32 => Self::F32(nan(shape)?),
            // There is no NaN. What is read replaces the zeros.
            DType::I32 => Self::I32(nan(shape)?),
            other => bail!("dtype {other}; allowed: bf16, f16, e4m3, f32, i32"),
        })
    }

    /// These numbers, rounded.
    pub fn fill(&mut self, numbers: impl Iterator<Item = f32>) {
        each!(self, elements => elements.iter_mut().zip(numbers).for_each(|(to, number)| *to = Element::from_f32(number)));
    }

    pub fn dtype(&self) -> DType {
        fn of<T: Element>(_: &[T]) -> DType {
            T::DTYPE
        }
        each!(self, elements => of(elements))
    }

    pub fn len(&self) -> usize {
        each!(self, elements => elements.len())
    }

    /// The same numbers, rounded to another type.
    pub fn converted(self, dtype: DType) -> Result<Self> {
        if self.dtype() == dtype {
            return Ok(self);
        }
        let mut other = Self::unwritten(dtype, &[self.len()])?;
        each!(self, elements => other.fill(elements.into_iter().map(Element::to_f32)));
        Ok(other)
    }

    pub fn bytes(&self) -> &[u8] {
        each!(self, elements => bytemuck::cast_slice(elements))
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        each!(self, elements => bytemuck::cast_slice_mut(elements))
    }

    /// How many are NaN, and how many are infinite.
    pub fn count_nonfinite(&self) -> (usize, usize) {
        each!(self, elements => elements.iter().fold((0, 0), |(nan, infinite), &value| {
            let value = Element::to_f32(value);
            (nan + usize::from(value.is_nan()), infinite + usize::from(value.is_infinite()))
        }))
    }

    /// All of them, in f64.
    pub fn wide(&self) -> Result<Vec<f64>> {
        let mut wide = memory::reserved(self.len())?;
        each!(self, elements => wide.extend(elements.iter().map(|&value| f64::from(Element::to_f32(value)))));
        Ok(wide)
    }

    /// Those that a layout picks, in f64.
    pub fn tensor(&self, layout: &Layout<4>) -> Tensor {
        each!(self, elements => Tensor::from_strided(elements, layout))
    }
}

fn nan<T: Element>(shape: &[usize]) -> Result<Vec<T>> {
    let len = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    let len = len.with_context(|| format!("shape {shape:?}; allowed: a number of elements that fits the machine"))?;
    memory::filled(len, T::from_f32(f32::NAN))
}
