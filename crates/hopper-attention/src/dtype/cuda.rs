//! GPU memory whose element type is known at run time only: an enum with one cudarc view for each element type.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop,
};

use super::{E4M3, bf16, f16};

macro_rules! views {
    ($($name:ident: $type:ty;)*) => {
        /// Memory that is read.
        pub enum AnyView<'a> {
            $($name(CudaView<'a, $type>),)*
        }

        /// Memory that is written.
        pub enum AnyViewMut<'a> {
            $($name(CudaViewMut<'a, $type>),)*
        }

        impl AnyView<'_> {
            /// The context in which it was allocated.
            pub fn context(&self) -> &Arc<CudaContext> {
                match self {
                    $(Self::$name(view) => view.stream().context(),)*
                }
            }

            /// The address, and a guard. The stream waits for earlier writes now. The guard records this use when it is
            /// dropped.
            pub fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
                match self {
                    $(Self::$name(view) => view.device_ptr(stream),)*
                }
            }
        }

        impl AnyViewMut<'_> {
            /// The context in which it was allocated.
            pub fn context(&self) -> &Arc<CudaContext> {
                match self {
                    $(Self::$name(view) => view.stream().context(),)*
                }
            }

            /// The address, and a guard. The stream waits for all earlier uses now. The guard records this use when it is
            /// dropped.
            pub fn device_ptr_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
                match self {
                    $(Self::$name(view) => view.device_ptr_mut(stream),)*
                }
            }
        }

        $(impl Device for $type {
            fn any_view(view: CudaView<'_, Self>) -> AnyView<'_> {
                AnyView::$name(view)
            }

            fn any_view_mut(view: CudaViewMut<'_, Self>) -> AnyViewMut<'_> {
                AnyViewMut::$name(view)
            }
        })*
    };
}

/// What the feature `cuda` needs of an element type.
pub trait Device: DeviceRepr + Sized {
    /// The same view, with the element type as the enum's variant.
    #[doc(hidden)]
    fn any_view(view: CudaView<'_, Self>) -> AnyView<'_>;

    /// As [`any_view`](Self::any_view), for memory that is written.
    #[doc(hidden)]
    fn any_view_mut(view: CudaViewMut<'_, Self>) -> AnyViewMut<'_>;
}

views! {
    F16: f16;
    BF16: bf16;
    E4M3: E4M3;
    F32: f32;
}
