//! Borrowed tensors: memory on the host or on a GPU, and a [`Layout`] that was checked against it.

use crate::{Element, Error, Layout, Result};

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaView, CudaViewMut};

/// A tensor that is only read, such as Q, K and V. Its layout lies within its memory; it may repeat elements (stride 0).
pub struct TensorRef<'a, T, const R: usize> {
    memory: Ref<'a, T>,
    layout: Layout<R>,
}

/// A tensor that is written: O, the LSE or a gradient. Its layout lies within its memory and no two indices share an element.
pub struct TensorMut<'a, T, const R: usize> {
    memory: Mut<'a, T>,
    layout: Layout<R>,
}

pub(crate) enum Ref<'a, T> {
    Host(&'a [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaView<'a, T>),
}

pub(crate) enum Mut<'a, T> {
    Host(&'a mut [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaViewMut<'a, T>),
}

/// A checked tensor in host memory: `layout` lies within `data`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRef<'a, T, const R: usize> {
    pub data: &'a [T],
    pub layout: Layout<R>,
}

/// A checked tensor in host memory: `layout` lies within `data` and is injective.
#[derive(Debug)]
pub(crate) struct HostMut<'a, T, const R: usize> {
    pub data: &'a mut [T],
    pub layout: Layout<R>,
}

impl<'a, T: Element, const R: usize> TensorRef<'a, T, R> {
    /// A tensor in host memory whose first element is `data[0]`.
    ///
    /// # Errors
    /// [`Error::Layout`] when the layout reaches past the end of `data`.
    pub fn host(data: &'a [T], layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        Ok(Self { memory: Ref::Host(data), layout })
    }

    /// A tensor on a GPU whose first element is the view's first.
    ///
    /// # Errors
    /// [`Error::Layout`] when the layout reaches past the end of `data`.
    #[cfg(feature = "cuda")]
    pub fn cuda(data: CudaView<'a, T>, layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        Ok(Self { memory: Ref::Cuda(data), layout })
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// Memory and layout when the tensor is on the host.
    pub fn host_parts(&self) -> Option<(&'a [T], Layout<R>)> {
        self.as_host().map(|host| (host.data, host.layout))
    }

    pub(crate) fn as_host(&self) -> Option<HostRef<'a, T, R>> {
        match self.memory {
            Ref::Host(data) => Some(HostRef { data, layout: self.layout }),
            #[cfg(feature = "cuda")]
            Ref::Cuda(_) => None,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&self) -> Option<&CudaView<'a, T>> {
        match &self.memory {
            Ref::Host(_) => None,
            Ref::Cuda(view) => Some(view),
        }
    }
}

impl<T, const R: usize> Clone for TensorRef<'_, T, R> {
    fn clone(&self) -> Self {
        let memory = match &self.memory {
            Ref::Host(data) => Ref::Host(data),
            #[cfg(feature = "cuda")]
            Ref::Cuda(view) => Ref::Cuda(view.slice(..)),
        };
        Self { memory, layout: self.layout }
    }
}

impl<'a, T: Element, const R: usize> TensorMut<'a, T, R> {
    /// A tensor in host memory whose first element is `data[0]`.
    ///
    /// # Errors
    /// [`Error::Layout`] when the layout reaches past the end of `data` or uses an element twice.
    pub fn host(data: &'a mut [T], layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        without_overlap(layout)?;
        Ok(Self { memory: Mut::Host(data), layout })
    }

    /// A tensor on a GPU whose first element is the view's first.
    ///
    /// # Errors
    /// [`Error::Layout`] when the layout reaches past the end of `data` or uses an element twice.
    #[cfg(feature = "cuda")]
    pub fn cuda(data: CudaViewMut<'a, T>, layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        without_overlap(layout)?;
        Ok(Self { memory: Mut::Cuda(data), layout })
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// The same tensor for a shorter time, so that it can be handed to a call and used again.
    pub fn reborrow(&mut self) -> TensorMut<'_, T, R> {
        let memory = match &mut self.memory {
            Mut::Host(data) => Mut::Host(data),
            #[cfg(feature = "cuda")]
            Mut::Cuda(view) => Mut::Cuda(view.slice_mut(..)),
        };
        TensorMut { memory, layout: self.layout }
    }

    pub(crate) fn as_host(&mut self) -> Option<HostMut<'_, T, R>> {
        match &mut self.memory {
            Mut::Host(data) => Some(HostMut { data, layout: self.layout }),
            #[cfg(feature = "cuda")]
            Mut::Cuda(_) => None,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&mut self) -> Option<&mut CudaViewMut<'a, T>> {
        match &mut self.memory {
            Mut::Host(_) => None,
            Mut::Cuda(view) => Some(view),
        }
    }
}

fn within<const R: usize>(layout: Layout<R>, elements: usize) -> Result<()> {
    if layout.span() <= elements {
        return Ok(());
    }
    Err(Error::Layout {
        tensor: "view",
        got: format!("shape {:?} with strides {:?} spans {} elements", layout.shape(), layout.stride(), layout.span()),
        allowed: format!("up to the {elements} of its memory"),
    })
}

pub(crate) fn without_overlap<const R: usize>(layout: Layout<R>) -> Result<()> {
    if layout.injective() {
        return Ok(());
    }
    Err(Error::Layout {
        tensor: "view",
        got: format!("shape {:?} with strides {:?} uses elements twice", layout.shape(), layout.stride()),
        allowed: "for a tensor that is written, dimensions that step over each other".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_checked_at_construction() {
        let layout = Layout::contiguous([2, 3]).unwrap();
        let mut data = [0f32; 6];
        assert!(TensorRef::host(&data, layout).is_ok());
        assert!(TensorMut::host(&mut data, layout).is_ok());
        let text = TensorRef::host(&data[1..], layout).err().unwrap().to_string();
        assert_eq!(text, "view: shape [2, 3] with strides [3, 1] spans 6 elements; allowed: up to the 5 of its memory");
        assert!(TensorMut::host(&mut data[1..], layout).is_err());
        assert!(TensorRef::<f32, 2>::host(&[], Layout::contiguous([0, 3]).unwrap()).is_ok());
    }

    #[test]
    fn outputs_do_not_overlap_themselves() {
        let broadcast = Layout::with_strides([2, 3], [0, 1]).unwrap();
        let mut data = [0f32; 6];
        assert!(TensorRef::host(&data, broadcast).is_ok());
        let text = TensorMut::host(&mut data, broadcast).err().unwrap().to_string();
        assert!(text.contains("uses elements twice"), "{text}");
    }

    #[test]
    fn a_reborrow_leaves_the_tensor_usable() {
        let mut data = [1f32, 2.0];
        let mut tensor = TensorMut::host(&mut data, Layout::contiguous([2]).unwrap()).unwrap();
        tensor.reborrow().as_host().unwrap().data[0] = 5.0;
        assert_eq!(tensor.as_host().unwrap().data, [5.0, 2.0]);
    }
}
