//! Sizes in bytes, and the forms in which people and machines write them.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{EXTENT_SIZE, PAGE_SIZE};

/// A number of bytes.
///
/// People write a size as `2G`, `512MiB` or `4096`. Units are powers of 1024, with or without `iB`
/// or `B`, in either case. A size serializes as a plain number and deserializes from both forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// The reason why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a size: {why}; write for example 4096, 512MiB or 2G")]
pub struct ParseBytesError {
    text: String,
    why: &'static str,
}

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// Returns `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// Returns `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// Returns `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// Returns the fewest whole pages that hold this many bytes.
    pub const fn pages(self) -> u64 {
        self.0.div_ceil(PAGE_SIZE as u64)
    }

    /// Returns the fewest whole extents that hold this many bytes.
    pub const fn extents(self) -> u64 {
        self.0.div_ceil(EXTENT_SIZE)
    }

    /// Returns this size, rounded up to whole extents.
    pub const fn round_up_to_extents(self) -> Self {
        Self(self.extents() * EXTENT_SIZE)
    }

    /// Returns the difference, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns the sum, or the largest size if the sum does not fit.
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns this size times `share` (0.0 and up), rounded down.
    pub fn scaled(self, share: f64) -> Self {
        Self((self.0 as f64 * share) as u64)
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    /// Writes the size in the largest unit that is not larger than it, with one decimal if it is
    /// not whole: `1.5GiB`, `64MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = match self.0 {
            n if n >= 1 << 40 => (40, "TiB"),
            n if n >= 1 << 30 => (30, "GiB"),
            n if n >= 1 << 20 => (20, "MiB"),
            n if n >= 1 << 10 => (10, "KiB"),
            _ => (0, "B"),
        };
        let text = if self.0.trailing_zeros() >= shift {
            format!("{}{unit}", self.0 >> shift)
        } else {
            format!("{:.1}{unit}", self.0 as f64 / (1u64 << shift) as f64)
        };
        f.pad(&text)
    }
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let err = |why| ParseBytesError { text: text.to_owned(), why };
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(err("the unit is not one of B, K, M, G, T (or KiB, MiB, GiB, TiB)")),
        };
        if number.is_empty() {
            return Err(err("it has no number"));
        }
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(Self).ok_or_else(|| err("it is too large"));
        }
        let value: f64 = number.parse().map_err(|_| err("the number is malformed or too large"))?;
        let scaled = value * (1u64 << shift) as f64;
        if scaled.fract() != 0.0 || scaled >= u64::MAX as f64 {
            return Err(err("it is not a whole number of bytes"));
        }
        Ok(Self(scaled as u64))
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;

        impl Visitor<'_> for BytesVisitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512MiB\" or a number of bytes")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Bytes, E> {
                Ok(Bytes(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Bytes, E> {
                u64::try_from(value).map(Bytes).map_err(|_| E::custom("a size cannot be negative"))
            }

            /// Accepts whole numbers only. JSON does not tell 4096 from 4096.0.
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Bytes, E> {
                let is_whole = value.fract() == 0.0 && (0.0..u64::MAX as f64).contains(&value);
                is_whole
                    .then_some(Bytes(value as u64))
                    .ok_or_else(|| E::custom("a size is a whole number of bytes"))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(BytesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_common_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512MiB", 512 << 20),
            ("512 MB", 512 << 20),
            ("2G", 2 << 30),
            ("2g", 2 << 30),
            ("1.5G", 3 << 29),
            (" 1T ", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn a_malformed_size_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "no number"),
            ("G", "no number"),
            ("12parsecs", "the unit"),
            ("-1G", "the unit"),
            ("99999999999T", "too large"),
            ("1.0001K", "whole number of bytes"),
        ] {
            let error = text.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_fits() {
        for (bytes, text) in [
            (0, "0B"),
            (1000, "1000B"),
            (64 << 20, "64MiB"),
            (3 << 29, "1.5GiB"),
            (1 << 40, "1TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn extents_round_up() {
        assert_eq!(Bytes(1).round_up_to_extents(), Bytes(EXTENT_SIZE));
        assert_eq!(Bytes(EXTENT_SIZE).extents(), 1);
        assert_eq!(Bytes::ZERO.extents(), 0);
    }
}
