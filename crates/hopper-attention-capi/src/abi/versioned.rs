//! The layout of the ABI's structs in bytes, and how a struct of another version is read and filled in.

use super::HATTN_ABI_VERSION;
use crate::status::{Failure, Outcome};

/// A struct that begins with its own size, as the caller's header has it.
///
/// # Safety
/// The struct is `repr(C)` and begins with `struct_size` and `abi_version`, two u32. All bits are valid for it.
pub(crate) unsafe trait Versioned: Copy {
    /// The layout that [`layouts!`] states.
    const LAYOUT: StructLayout;
}

/// The layout of a struct, in bytes. `tests/header.rs` makes `abi/layout.def` and the C header's initialisers of it.
#[doc(hidden)]
pub struct StructLayout {
    /// The name in C.
    pub name: &'static str,
    /// The size that the struct had when it was added to this version of the ABI. No caller knows a smaller one.
    pub least: usize,
    /// The size.
    pub size: usize,
    /// The name and the offset of each field, in order. There is no padding.
    pub fields: &'static [(&'static str, usize)],
}

impl StructLayout {
    /// The sizes that the struct had or may have had in older versions of the header, and the size that it has.
    ///
    /// Each is the end of a field. It is also a multiple of the alignment, as every `sizeof` is.
    pub(super) fn sizes(&self) -> impl Iterator<Item = usize> {
        let ends = self.fields.iter().map(|&(_, offset)| offset).chain([self.size]);
        ends.filter(|&end| end >= self.least && end.is_multiple_of(ALIGNMENT))
    }

    /// The offset of the field `reserved`, which must be 0. `None` for a struct without that field.
    pub(super) const fn reserved(&self) -> Option<usize> {
        let mut at = 0;
        while at < self.fields.len() {
            if matches!(self.fields[at].0.as_bytes(), b"reserved") {
                return Some(self.fields[at].1);
            }
            at += 1;
        }
        None
    }
}

/// States the layouts that the ABI promises, as literal numbers: `LEAST to SIZE bytes`, then each field with its offset.
/// `LEAST` is the struct's first size. It stays as it is when the struct grows.
///
/// The entry `hattn_pair: 16 to 24 bytes { struct_size 0, abi_version 4, first 8, second 16 }` becomes
///
/// - assertions about `hattn_pair`: its size is 24, `second` is at 16, and so on;
/// - an assertion that there is no padding, which has any bytes in C and so could never become a field;
/// - `unsafe impl Versioned for hattn_pair`, with this layout;
/// - an element of `LAYOUTS`.
macro_rules! layouts {
    ($($name:ident: $least:literal to $size:literal bytes { $($field:ident $offset:literal),* $(,)? })*) => {
        $(
            const _: () = {
                let _header: fn(&$name) -> [u32; 2] = |value| [value.struct_size, value.abi_version];
                assert!(offset_of!($name, struct_size) == 0 && offset_of!($name, abi_version) == 4);
                assert!(size_of::<$name>() == $size, concat!("the size of ", stringify!($name)));
                assert!(align_of::<$name>() == ALIGNMENT && $least <= $size && $size <= MOST);
                let mut end = 0;
                $(
                    assert!(offset_of!($name, $field) == $offset, concat!("the offset of ", stringify!($field)));
                    assert!(end == $offset, concat!("padding or an unlisted field before ", stringify!($field)));
                    let bytes = size_of_field(|value: &$name| &value.$field);
                    assert!(bytes == 4 || !matches!(stringify!($field).as_bytes(), b"reserved"), "`read` reads 4 bytes");
                    end = $offset + bytes;
                )*
                assert!(end == $size, concat!("padding or an unlisted field at the end of ", stringify!($name)));
            };

            // SAFETY: the assertions hold the header. The structs that `abi.rs` lists are repr(C). Their fields are integers,
            // floats and raw pointers, for which all bits are valid.
            unsafe impl Versioned for $name {
                const LAYOUT: StructLayout = StructLayout {
                    name: stringify!($name),
                    least: $least,
                    size: $size,
                    fields: &[$((stringify!($field), $offset)),*],
                };
            }
        )*

        /// The layout of every struct.
        #[doc(hidden)]
        pub const LAYOUTS: &[StructLayout] = &[$(<$name as Versioned>::LAYOUT),*];
    };
}

/// The size of the field that a function picks.
pub(super) const fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

pub(super) use layouts;

/// The largest size of any struct, in bytes. A larger `struct_size` is refused, so that a wild one is not followed.
pub(super) const MOST: usize = 4096;
/// The alignment of every struct, in bytes.
pub(super) const ALIGNMENT: usize = 8;

/// Reads a struct that may be older or newer than this library.
///
/// # Safety
/// `pointer` is null or misaligned, or points to 8 readable bytes, and if these hold this ABI's version and a size, to as
/// many readable bytes as they say.
pub(crate) unsafe fn read<T: Versioned>(what: &str, pointer: *const T) -> Outcome<T> {
    const { assert!(align_of::<T>() == ALIGNMENT) };
    let StructLayout { name, size: known, .. } = T::LAYOUT;
    if pointer.is_null() {
        return Err(Failure::argument(what, "a null pointer", format_args!("a pointer to a {name}")));
    }
    if !pointer.is_aligned() {
        let allowed = format_args!("multiples of {ALIGNMENT} bytes");
        return Err(Failure::argument(what, format_args!("address {pointer:p}"), allowed));
    }
    // SAFETY: neither null nor misaligned, so the caller promises a header.
    let [size, version] = unsafe { pointer.cast::<[u32; 2]>().read() };
    if version != HATTN_ABI_VERSION {
        return Err(Failure::abi(what, format_args!("abi_version {version}"), HATTN_ABI_VERSION));
    }
    let size = size as usize;
    let is_newer = size > known && size <= MOST && size.is_multiple_of(ALIGNMENT);
    // SAFETY: the caller promises `size` bytes.
    let surplus = || (known..size).any(|at| unsafe { *pointer.cast::<u8>().add(at) } != 0);
    if !T::LAYOUT.sizes().any(|end| end == size) && (!is_newer || surplus()) {
        let sizes: Vec<_> = T::LAYOUT.sizes().map(|end| end.to_string()).collect();
        let allowed = format!(
            "{} (sizeof({name})), or a larger multiple of {ALIGNMENT} up to {MOST} if the fields that this library does not \
             know are 0",
            sizes.join(", ")
        );
        return Err(Failure::abi(what, format_args!("struct_size {size}"), allowed));
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold that many bytes; all bits, and the zeros after them, are valid for T.
    let value = unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), size.min(known));
        value.assume_init()
    };
    if let Some(at) = const { T::LAYOUT.reserved() } {
        // SAFETY: the field has 4 bytes, which `layouts!` asserts.
        let reserved = unsafe { (&raw const value).byte_add(at).cast::<u32>().read() };
        if reserved != 0 {
            return Err(Failure::argument(what, format_args!("reserved {reserved:#x}"), "0"));
        }
    }
    Ok(value)
}

/// Fills in a struct of the caller, which may be older or newer than this library. Its size and version stay as they are.
/// Fields that only one of the two knows are not written.
///
/// # Safety
/// As [`read`]. The bytes can be written, too.
pub(crate) unsafe fn fill<T: Versioned>(what: &str, pointer: *mut T, value: &T) -> Outcome {
    const HEADER: usize = size_of::<[u32; 2]>();
    // SAFETY: the caller's promise.
    unsafe { read(what, pointer.cast_const()) }?;
    // SAFETY: neither null nor misaligned, since `read` refuses both, so the caller promises a header.
    let size = unsafe { pointer.cast::<u32>().read() } as usize;
    // SAFETY: both structs have that many bytes, since `read` takes no size below the header's. They are two, since `value` is
    // borrowed and the caller promises that its own can be written. All bytes of `value` are initialised: there is no padding.
    unsafe {
        let (from, to) = ((&raw const *value).cast::<u8>(), pointer.cast::<u8>());
        std::ptr::copy_nonoverlapping(from.add(HEADER), to.add(HEADER), size.min(T::LAYOUT.size) - HEADER);
    }
    Ok(())
}
