//! GPU memory whose element type is known at run time only: an enum with one cudarc view for each element type.
//!
//! cudarc keeps two events with each allocation: of its latest read, and of its latest write.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    SyncOnDrop,
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
            /// The stream on which it was allocated, and on which it will be freed.
            pub fn stream(&self) -> &Arc<CudaStream> {
                match self {
                    $(Self::$name(view) => view.stream(),)*
                }
            }

            /// The context in which it was allocated.
            pub fn context(&self) -> &Arc<CudaContext> {
                self.stream().context()
            }

            /// The address, and the event of the latest read. The stream waits for earlier writes. The caller records this
            /// use: nothing does so by itself.
            pub fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (u64, Option<&'s CudaEvent>) {
                let (address, guard) = match self {
                    $(Self::$name(view) => view.device_ptr(stream),)*
                };
                (address, event(guard))
            }
        }

        impl AnyViewMut<'_> {
            /// The stream on which it was allocated, and on which it will be freed.
            pub fn stream(&self) -> &Arc<CudaStream> {
                match self {
                    $(Self::$name(view) => view.stream(),)*
                }
            }

            /// The context in which it was allocated.
            pub fn context(&self) -> &Arc<CudaContext> {
                self.stream().context()
            }

            /// The address, and the event of the latest write. The stream waits for all earlier uses. The caller records this
            /// use: nothing does so by itself.
            pub fn device_ptr_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, Option<&'s CudaEvent>) {
                let (address, guard) = match self {
                    $(Self::$name(view) => view.device_ptr_mut(stream),)*
                };
                (address, event(guard))
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

/// The event that a guard would record, taken from the guard. It then records nothing.
///
/// A guard of cudarc cannot say that it failed to record, and it fails where another thread has left an error in the context.
pub fn event(mut guard: SyncOnDrop<'_>) -> Option<&CudaEvent> {
    match &mut guard {
        SyncOnDrop::Record(target) => target.take().map(|(event, _)| event),
        SyncOnDrop::Sync(_) => None,
    }
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
    I32: i32;
}
