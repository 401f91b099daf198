//! Borrowed tensors: memory on the host or on a GPU, with a [`Layout`] that was checked against that memory.

use std::fmt;
use std::marker::PhantomData;

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaView, CudaViewMut, DeviceSlice};

#[cfg(feature = "cuda")]
use crate::dtype::{AnyView, AnyViewMut};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::{DynLayout, Layout};
use crate::operand::Access;

/// A tensor that is only read, such as Q, K and V.
///
/// Its layout lies within its memory. The layout may repeat elements (stride 0).
pub struct TensorRef<'a, T, const R: usize> {
    memory: Ref<'a, T>,
    layout: Layout<R>,
}

/// A tensor that is written, such as O, the LSE and the gradients.
///
/// Its layout lies within its memory. No two indices share an element.
pub struct TensorMut<'a, T, const R: usize> {
    memory: Mut<'a, T>,
    layout: Layout<R>,
}

enum Ref<'a, T> {
    Host(&'a [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaView<'a, T>),
}

enum Mut<'a, T> {
    Host(&'a mut [T]),
    #[cfg(feature = "cuda")]
    Cuda(CudaViewMut<'a, T>),
}

/// A borrowed tensor whose element type and rank are known at run time only.
pub(crate) struct AnyTensor<'a> {
    pub memory: Memory<'a>,
    /// What the caller lent the tensor for. A tensor that was lent for reading must not be written.
    pub lent: Access,
    pub dtype: DType,
    pub layout: DynLayout,
    pub numbers: Numbers<'a>,
}

/// What is known of the numbers in a list of offsets or lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numbers<'a> {
    /// Nothing. So it is for other tensors.
    Unknown,
    /// The caller promises that they are right.
    Unchecked,
    /// What they are. They were checked when the list was made.
    Known(&'a [i32]),
}

/// Borrowed memory whose element type is known at run time only.
pub(crate) enum Memory<'a> {
    /// Host memory, by the address of its first element. The pointer's provenance was exposed, so that the address can become a
    /// pointer again.
    Host(u64, PhantomData<&'a mut [u8]>),
    #[cfg(feature = "cuda")]
    Cuda(AnyView<'a>),
    #[cfg(feature = "cuda")]
    CudaMut(AnyViewMut<'a>),
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

    /// A tensor in GPU memory whose first element is the first one of the view `data`.
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

    /// The memory and the layout of a tensor on the host. `None` for a tensor on a GPU.
    pub fn host_parts(&self) -> Option<(&'a [T], Layout<R>)> {
        match self.memory {
            Ref::Host(data) => Some((data, self.layout)),
            #[cfg(feature = "cuda")]
            Ref::Cuda(_) => None,
        }
    }
}

impl<'a, T: Element, const R: usize> From<TensorRef<'a, T, R>> for AnyTensor<'a> {
    fn from(tensor: TensorRef<'a, T, R>) -> Self {
        let memory = match tensor.memory {
            Ref::Host(data) => Memory::Host(data.as_ptr().expose_provenance() as u64, PhantomData),
            #[cfg(feature = "cuda")]
            Ref::Cuda(view) => Memory::Cuda(T::any_view(view)),
        };
        let numbers = Numbers::Unknown;
        Self { memory, lent: Access::Read, dtype: T::DTYPE, layout: tensor.layout.into(), numbers }
    }
}

impl<'a> AnyTensor<'a> {
    /// A list of offsets or lengths.
    pub fn of_list(list: TensorRef<'a, i32, 1>, numbers: Numbers<'a>) -> Self {
        Self { numbers, ..list.into() }
    }
}

impl<'a> TensorRef<'a, i32, 1> {
    /// All of a slice.
    pub(crate) fn list(data: &'a [i32]) -> Self {
        Self { memory: Ref::Host(data), layout: Layout::of_list(data.len()) }
    }

    /// All of a view.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_list(data: CudaView<'a, i32>) -> Self {
        let layout = Layout::of_list(data.len());
        Self { memory: Ref::Cuda(data), layout }
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
    /// [`Error::Layout`] when the layout reaches past the end of `data`, or when two indices share an element
    /// ([`Layout::injective`]).
    pub fn host(data: &'a mut [T], layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        DynLayout::from(layout).check_written("view")?;
        Ok(Self { memory: Mut::Host(data), layout })
    }

    /// A tensor in GPU memory whose first element is the first one of the view `data`.
    ///
    /// # Errors
    /// [`Error::Layout`] when the layout reaches past the end of `data`, or when two indices share an element
    /// ([`Layout::injective`]).
    #[cfg(feature = "cuda")]
    pub fn cuda(data: CudaViewMut<'a, T>, layout: Layout<R>) -> Result<Self> {
        within(layout, data.len())?;
        DynLayout::from(layout).check_written("view")?;
        Ok(Self { memory: Mut::Cuda(data), layout })
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// Lends the tensor for a shorter time, so that the caller can pass it to a call and use it again afterwards.
    pub fn reborrow(&mut self) -> TensorMut<'_, T, R> {
        let memory = match &mut self.memory {
            Mut::Host(data) => Mut::Host(data),
            #[cfg(feature = "cuda")]
            Mut::Cuda(view) => Mut::Cuda(view.slice_mut(..)),
        };
        TensorMut { memory, layout: self.layout }
    }
}

impl<'a, T: Element, const R: usize> From<TensorMut<'a, T, R>> for AnyTensor<'a> {
    fn from(tensor: TensorMut<'a, T, R>) -> Self {
        let memory = match tensor.memory {
            Mut::Host(data) => Memory::Host(data.as_mut_ptr().expose_provenance() as u64, PhantomData),
            #[cfg(feature = "cuda")]
            Mut::Cuda(view) => Memory::CudaMut(T::any_view_mut(view)),
        };
        let numbers = Numbers::Unknown;
        Self { memory, lent: Access::Write, dtype: T::DTYPE, layout: tensor.layout.into(), numbers }
    }
}

impl<T: Element, const R: usize> fmt::Debug for TensorRef<'_, T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.memory {
            Ref::Host(_) => String::from("host"),
            #[cfg(feature = "cuda")]
            Ref::Cuda(view) => format!("cuda:{}", view.stream().context().ordinal()),
        };
        write_tensor(f, "TensorRef", T::DTYPE, &self.layout.into(), &place)
    }
}

impl<T: Element, const R: usize> fmt::Debug for TensorMut<'_, T, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &self.memory {
            Mut::Host(_) => String::from("host"),
            #[cfg(feature = "cuda")]
            Mut::Cuda(view) => format!("cuda:{}", view.stream().context().ordinal()),
        };
        write_tensor(f, "TensorMut", T::DTYPE, &self.layout.into(), &place)
    }
}

impl fmt::Debug for AnyTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, place) = match &self.memory {
            Memory::Host(..) => ("Tensor", String::from("host")),
            #[cfg(feature = "cuda")]
            Memory::Cuda(view) => ("TensorRef", format!("cuda:{}", view.context().ordinal())),
            #[cfg(feature = "cuda")]
            Memory::CudaMut(view) => ("TensorMut", format!("cuda:{}", view.context().ordinal())),
        };
        write_tensor(f, name, self.dtype, &self.layout, &place)
    }
}

/// Prints a tensor's metadata. The elements are left out: they may be many, and may be on a GPU.
fn write_tensor(f: &mut fmt::Formatter<'_>, name: &str, dtype: DType, layout: &DynLayout, place: &str) -> fmt::Result {
    let (shape, stride) = (layout.shape(), layout.stride());
    f.debug_struct(name)
        .field("dtype", &dtype)
        .field("shape", &shape)
        .field("stride", &stride)
        .field("place", &place)
        .finish()
}

/// Refuses a layout that reaches past the end of `elements` elements.
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
    fn tensors_print_what_they_are() {
        let mut data = [0f32; 6];
        let layout = Layout::contiguous([2, 3]).unwrap();
        let want = r#"{ dtype: F32, shape: [2, 3], stride: [3, 1], place: "host" }"#;
        assert_eq!(format!("{:?}", TensorRef::host(&data, layout).unwrap()), format!("TensorRef {want}"));
        assert_eq!(format!("{:?}", TensorMut::host(&mut data, layout).unwrap()), format!("TensorMut {want}"));
    }

    #[test]
    fn a_reborrow_leaves_the_tensor_usable() {
        let mut data = [1f32, 2.0];
        let mut tensor = TensorMut::host(&mut data, Layout::contiguous([2]).unwrap()).unwrap();
        let first = AnyTensor::from(tensor.reborrow()).layout;
        assert_eq!(AnyTensor::from(tensor).layout, first);
    }
}
