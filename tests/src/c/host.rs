//! Cases in host memory, as C would pass them.

use hopper_attention::{DType, Layout};
use hopper_attention_capi::{HATTN_CPU, hattn_tensor};

use super::{BackwardMemory, BlocksMemory, LengthsMemory, Memory, tensor, without_batch};
use crate::alibi::AlibiImage;
use crate::backward;
use crate::bias::BiasImage;
use crate::blocks::BlocksImage;
use crate::data::{Image, Poison};
use crate::packing::Packing;
use crate::runner::{Outputs, Prepared};
use crate::sinks::SinksImage;

/// The tensors of a forward case. There is no workspace.
pub fn memory<T: Poison>(prepared: &Prepared<T>, outputs: &mut Outputs<T>) -> Memory {
    let (q, kv) = (prepared.problem.is_packed_q(), prepared.problem.is_packed_kv());
    Memory {
        q: rows(input(&prepared.q, T::DTYPE), q),
        k: rows(input(&prepared.k, T::DTYPE), kv),
        v: rows(input(&prepared.v, T::DTYPE), kv),
        o: rows(output(&mut outputs.o, T::DTYPE), q),
        lse: outputs.lse.as_mut().map(|lse| rows(output(lse, DType::F32), q)),
        sinks: prepared.sinks.as_ref().map(sinks_input),
        alibi_slopes: prepared.alibi.as_ref().map(slopes_input),
        max_logits: outputs.max_logits.as_mut().map(|logits| output(logits, DType::F32)),
        bias: prepared.bias.as_ref().map(bias_input),
        blocks: prepared.blocks.as_ref().map(blocks_input),
        dropout_state: prepared.dropout_state.as_ref().map(state_input),
        workspace: 0,
        workspace_bytes: 0,
    }
}

/// The tensors of a backward case. There is no workspace.
pub fn backward_memory<T: Poison>(
    prepared: &backward::Prepared<T>,
    outputs: &mut backward::Outputs<T>,
) -> BackwardMemory {
    let forward = prepared.problem.forward();
    let (q, kv) = (forward.is_packed_q(), forward.is_packed_kv());
    BackwardMemory {
        q: rows(input(&prepared.q, T::DTYPE), q),
        k: rows(input(&prepared.k, T::DTYPE), kv),
        v: rows(input(&prepared.v, T::DTYPE), kv),
        o: rows(input(&prepared.o, T::DTYPE), q),
        lse: rows(input(&prepared.lse, DType::F32), q),
        d_o: rows(input(&prepared.d_o, T::DTYPE), q),
        d_lse: prepared.d_lse.as_ref().map(|d_lse| rows(input(d_lse, DType::F32), q)),
        d_q: rows(output(&mut outputs.d_q, T::DTYPE), q),
        d_k: rows(output(&mut outputs.d_k, T::DTYPE), kv),
        d_v: rows(output(&mut outputs.d_v, T::DTYPE), kv),
        sinks: prepared.sinks.as_ref().zip(outputs.d_sinks.as_mut()).map(|(sinks, d_sinks)| {
            let layout = d_sinks.layout();
            [sinks_input(sinks), tensor(d_sinks.inner_mut().as_mut_ptr() as u64, DType::F32, HATTN_CPU, layout)]
        }),
        alibi_slopes: prepared.alibi.as_ref().map(slopes_input),
        bias: prepared.bias.as_ref().zip(outputs.d_bias.as_mut()).map(|(bias, d_bias)| {
            let (dtype, layout) = (d_bias.dtype(), d_bias.layout());
            [bias_input(bias), tensor(d_bias.address_mut() as u64, dtype, HATTN_CPU, layout)]
        }),
        blocks: prepared.blocks.as_ref().map(blocks_input),
        dropout_state: prepared.dropout_state.as_ref().map(state_input),
        workspace: 0,
        workspace_bytes: 0,
    }
}

/// The lists of a packing.
pub fn lengths(packing: &Packing) -> LengthsMemory {
    let list = |list: &Option<Vec<i32>>| list.as_deref().map(list_input);
    LengthsMemory {
        cu_seqlens: [list(&packing.cu_seqlens_q), list(&packing.cu_seqlens_kv)],
        seqused: [list(&packing.seqused_q), list(&packing.seqused_kv)],
    }
}

/// A list of offsets or of lengths.
pub fn list_input(list: &[i32]) -> hattn_tensor {
    let layout = Layout::contiguous([list.len()]).expect("a short list");
    tensor(list.as_ptr() as u64, DType::I32, HATTN_CPU, layout)
}

/// The lists of a block-sparse mask.
pub fn blocks_input(lists: &BlocksImage) -> BlocksMemory {
    BlocksMemory::new(lists, HATTN_CPU, |slot| lists.inner(slot).as_ptr() as u64)
}

/// All bits of the memory of a tensor, with those of gaps and guard bands.
pub fn bits<T: Poison, const R: usize>(image: &Image<T, R>) -> Vec<u32> {
    image.data().iter().map(|x| x.bits()).collect()
}

/// A tensor whose layout has a batch, also where it is packed.
fn rows(tensor: hattn_tensor, packed: bool) -> hattn_tensor {
    if packed { without_batch(tensor) } else { tensor }
}

fn input<T: Poison, const R: usize>(image: &Image<T, R>, dtype: DType) -> hattn_tensor {
    tensor(image.inner().as_ptr() as u64, dtype, HATTN_CPU, image.layout())
}

fn output<T: Poison, const R: usize>(image: &mut Image<T, R>, dtype: DType) -> hattn_tensor {
    let layout = image.layout();
    tensor(image.inner_mut().as_mut_ptr() as u64, dtype, HATTN_CPU, layout)
}

fn bias_input(bias: &BiasImage) -> hattn_tensor {
    tensor(bias.address() as u64, bias.dtype(), HATTN_CPU, bias.layout())
}

/// Slopes that all batches share are one-dimensional.
fn slopes_input(slopes: &AlibiImage) -> hattn_tensor {
    let (layout, address) = (slopes.image().layout(), slopes.image().inner().as_ptr() as u64);
    match slopes.is_per_batch() {
        true => tensor(address, DType::F32, HATTN_CPU, layout),
        false => {
            let layout = Layout::contiguous([layout.shape()[1]]).expect("a short list");
            tensor(address, DType::F32, HATTN_CPU, layout)
        }
    }
}

fn state_input(state: &[i32; 4]) -> hattn_tensor {
    let layout = Layout::contiguous([4]).expect("a short list");
    tensor(state.as_ptr() as u64, DType::I32, HATTN_CPU, layout)
}

fn sinks_input(sinks: &SinksImage) -> hattn_tensor {
    match sinks {
        SinksImage::F32(image) => input(image, DType::F32),
        SinksImage::Bf16(image) => input(image, DType::BF16),
    }
}
