//! Layouts of what a protocol puts on the wire.

/// Defines a structure of this many bytes with exactly these fields, without padding. Its fields
/// are bytes or numbers of `zerocopy::byteorder`, so that it converts to bytes and back in place.
/// The crate that uses it needs `zerocopy`.
#[macro_export]
macro_rules! layout {
    ($(#[$doc:meta])* $name:ident, $size:literal {
        $($(#[$field_doc:meta])* $field:ident: $type:ty,)*
    }) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, ::zerocopy::FromBytes, ::zerocopy::IntoBytes,
            ::zerocopy::Immutable, ::zerocopy::KnownLayout, ::zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}
