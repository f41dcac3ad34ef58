//! The sizes that a VM can have, and the rounding to sections.

use aquifer_page::Bytes;

use crate::error::VmError;

/// The sizes that a VM can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Size at boot, which is the minimum.
    pub(super) boot: Bytes,
    /// The maximum.
    pub(super) max: Bytes,
    /// The smallest step of the device.
    pub(super) block: Bytes,
    /// The unit in which this host gives memory to guests.
    pub(super) section: Bytes,
}

impl Shape {
    /// Returns the size that a VM of `size` gets if `wanted` is requested: at least `wanted`,
    /// whether it grows or shrinks.
    ///
    /// The difference is whole sections (\[Bielski18\], section III-A). Exceptions are a VM that
    /// grows to its maximum or shrinks to its size at boot, and an `exact` order.
    ///
    /// # Errors
    /// [`VmError::Misuse`] if `wanted` is out of range or, if `exact`, not a multiple of the
    /// device's blocks.
    pub(super) fn round(&self, size: Bytes, wanted: Bytes, exact: bool) -> Result<Bytes, VmError> {
        let Self { boot, max, block, section } = *self;
        if wanted > max {
            let why = format!(
                "{wanted} is more than the VM can have: its maximum is {max}, set by --max-memory \
                 of 'aquifer vm start' or --max of 'aquifer vm set'"
            );
            return Err(VmError::Misuse(why));
        }
        if wanted < boot {
            let why = format!("{wanted} is less than the VM booted with: {boot} is the minimum");
            return Err(VmError::Misuse(why));
        }
        if exact {
            let beyond = (wanted - boot).0 % block.0;
            if beyond > 0 {
                let below = Bytes(wanted.0 - beyond);
                let why = format!(
                    "{} bytes cannot be met exactly: the VM's device has blocks of {block}; \
                     request {} bytes or {}",
                    wanted.0,
                    below.0,
                    below.0 + block.0
                );
                return Err(VmError::Misuse(why));
            }
            return Ok(wanted);
        }
        Ok(if wanted >= size {
            Bytes(size.0 + (wanted - size).0.next_multiple_of(section.0)).min(max)
        } else if wanted == boot {
            boot
        } else {
            Bytes(size.0 - (size - wanted).0 / section.0 * section.0)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    const SHAPE: Shape = Shape {
        boot: Bytes::mib(500),
        max: Bytes::mib(2100),
        block: Bytes::mib(2),
        section: Bytes::mib(128),
    };

    fn round(size: u64, wanted: u64) -> u64 {
        SHAPE.round(Bytes::mib(size), Bytes::mib(wanted), false).unwrap().0 >> 20
    }

    #[test]
    fn a_rounded_size_is_never_below_the_requested_size() {
        assert_eq!(round(500, 501), 628);
        assert_eq!(round(500, 628), 628);
        assert_eq!(round(628, 629), 756);
        assert_eq!(round(1012, 760), 884);
        assert_eq!(round(1012, 1011), 1012);
        assert_eq!(round(1012, 884), 884);
        assert_eq!(round(700, 700), 700);
    }

    #[test]
    fn the_ends_are_met_though_they_are_no_whole_sections_away() {
        assert_eq!(round(2036, 2037), 2100);
        assert_eq!(round(510, 500), 500);
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        let refused =
            |mib| SHAPE.round(Bytes::mib(628), Bytes::mib(mib), false).unwrap_err().to_string();
        assert!(refused(2101).contains("more than the VM can have"));
        assert!(refused(499).contains("500MiB is the minimum"));
    }

    #[test]
    fn an_exact_size_is_met_or_refused_with_those_that_are_near() {
        let round = |bytes| SHAPE.round(Bytes::mib(628), Bytes(bytes), true);
        assert_eq!(round(502 << 20).unwrap(), Bytes::mib(502));
        let refused = round((502 << 20) + 1).unwrap_err().to_string();
        assert!(refused.contains("526385152 bytes or 528482304"), "{refused}");
    }
}
