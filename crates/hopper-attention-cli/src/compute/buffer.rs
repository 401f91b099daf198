//! Tensors where a device reads and writes them.

use anyhow::{Result, bail};
#[cfg(feature = "cuda")]
use hopper_attention::cudarc::driver::CudaSlice;
use hopper_attention::{Access, Args, Element, Layout, Operand, TensorMut, TensorRef};

use crate::args::FileLayout;
use crate::layout::{is_in_files_order, strided};

/// A tensor of some type.
pub trait Buffer {
    /// Gives it to a run as an operand.
    fn lend<'a>(&'a mut self, args: Args<'a>, operand: &Operand, layout: FileLayout) -> Result<Args<'a>>;
    /// Has it on the host once the stream is done.
    fn fetch(&mut self) -> Result<()>;
}

/// A tensor of the host.
pub struct OnHost<'h, T>(pub &'h mut [T]);

impl<T: Element> Buffer for OnHost<'_, T> {
    fn lend<'a>(&'a mut self, args: Args<'a>, operand: &Operand, layout: FileLayout) -> Result<Args<'a>> {
        Memory::Host(self.0).lend(args, operand, layout)
    }

    fn fetch(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Memory that a tensor is borrowed from.
pub enum Memory<'a, T> {
    Host(&'a mut [T]),
    #[cfg(feature = "cuda")]
    Cuda(&'a mut CudaSlice<T>),
}

impl<'a, T: Element> Memory<'a, T> {
    /// As an operand, which has the file's order where it has four dimensions and is no list of blocks and no bias.
    pub fn lend(self, args: Args<'a>, operand: &Operand, layout: FileLayout) -> Result<Args<'a>> {
        match *operand.shape() {
            [a] => self.laid_out(args, operand, Layout::contiguous([a])?),
            [a, b] => self.laid_out(args, operand, Layout::contiguous([a, b])?),
            [a, b, c] => self.laid_out(args, operand, Layout::contiguous([a, b, c])?),
            [a, b, c, d] if !is_in_files_order(operand) => {
                self.laid_out(args, operand, Layout::contiguous([a, b, c, d])?)
            }
            [a, b, c, d] => self.laid_out(args, operand, strided(layout, [a, b, c, d])?),
            ref other => bail!("{}: shape {other:?}; allowed: up to four dimensions", operand.slot()),
        }
    }

    fn laid_out<const R: usize>(self, args: Args<'a>, operand: &Operand, layout: Layout<R>) -> Result<Args<'a>> {
        Ok(match (self, operand.access()) {
            (Self::Host(data), Access::Read) => args.read(operand.slot(), TensorRef::host(data, layout)?),
            (Self::Host(data), _) => args.write(operand.slot(), TensorMut::host(data, layout)?),
            #[cfg(feature = "cuda")]
            (Self::Cuda(data), Access::Read) => args.read(operand.slot(), TensorRef::cuda(data.slice(..), layout)?),
            #[cfg(feature = "cuda")]
            (Self::Cuda(data), _) => args.write(operand.slot(), TensorMut::cuda(data.slice_mut(..), layout)?),
        })
    }
}
