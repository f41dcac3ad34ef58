//! Names for the values of an enum, for command lines and messages.

/// Implements `ALL`, `Display` and `FromStr` for an enum of unit variants by their names.
macro_rules! named {
    ($type:ident, $what:literal: $($value:ident $name:literal),+) => {
        impl $type {
            /// All values, with their names.
            pub const ALL: &[(Self, &str)] = &[$((Self::$value, $name)),+];
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self { $(Self::$value => $name),+ })
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$value),)+
                    _ => Err(format!(
                        "'{text}' is not a {}; choose one of: {}",
                        $what,
                        [$($name),+].join(", ")
                    )),
                }
            }
        }
    };
}

pub(crate) use named;
