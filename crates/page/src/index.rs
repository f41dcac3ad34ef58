//! Numbers that count different things, each with a type of its own.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{EXTENT_SIZE, PAGE_SIZE};

/// Defines a number with a type of its own, printed as the number alone.
macro_rules! index {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize)]
        pub struct $name(pub $number);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

/// Defines how far the unit of this number is from unit 0.
macro_rules! offset {
    ($name:ident, $size:expr) => {
        impl $name {
            /// Returns the offset in bytes.
            pub const fn offset(self) -> u64 {
                self.0 * $size as u64
            }
        }
    };
}

index! {
    /// The number of a page, from 0, in its region or mapping.
    PageIndex(u64)
}
offset!(PageIndex, PAGE_SIZE);

index! {
    /// The number of a frame, from 0, in the file that keeps the shared pages of a group.
    FrameIndex(u64)
}
offset!(FrameIndex, PAGE_SIZE);

index! {
    /// The number of an extent, from 0, in its volume.
    ExtentIndex(u64)
}
offset!(ExtentIndex, EXTENT_SIZE);

index! {
    /// The number of a thread, from 0, that reads and writes a volume. Each thread has buffers and
    /// connections of its own.
    WorkerId(usize)
}
