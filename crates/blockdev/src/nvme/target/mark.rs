//! The marks by which this program knows its own target objects: their names, which a crash cannot
//! lose.

use std::ops::RangeInclusive;

use aquifer_nvme::proto::Nqn;
use aquifer_page::LeaseId;

/// Start of our subsystems' names: a UUID of version 8 (RFC 9562, section 5.8) that begins with the
/// bytes "aquife". The rest is random. A lender that lost its pages thus never comes back under an
/// old name.
const PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:61717569-6665-8";

/// Numbers of our ports. A port has no other name.
pub(super) const PORTS: RangeInclusive<u16> = 0xa900..=0xa9ff;

/// Returns a fresh random name for a subsystem or a host, with the mark.
pub fn new_name() -> Nqn {
    const FIXED: u128 = 0xffff_ffff_ffff_f000_c000_0000_0000_0000;
    const MARK: u128 = 0x6171_7569_6665_8000_8000_0000_0000_0000;
    Nqn::of_lease(LeaseId(LeaseId::random().0 & !FIXED | MARK))
}

/// Tells whether the name of a subsystem or a host has the mark.
pub(super) fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_names_are_ours_and_differ() {
        let (one, other) = (new_name(), new_name());
        assert!(is_ours(one.as_str()) && is_ours(other.as_str()), "{one}");
        assert_ne!(one, other);
        assert!(!is_ours(Nqn::of_lease(LeaseId(1)).as_str()));
    }
}
