//! What tells our objects from those of others, and cannot be lost: their names.

use std::ops::RangeInclusive;

use aquifer_fabric::nvme::proto::Nqn;
use aquifer_page::LeaseId;

/// What the names of our subsystems begin with: a UUID of version 8 (RFC 9562, section 5.8: of one's own making) whose first six
/// bytes spell "aquife". The rest is random, so that no lender ever comes back under the name of another, without the pages.
const PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:61717569-6665-8";

/// The numbers of our ports, which have no other name.
pub(super) const PORTS: RangeInclusive<u16> = 0xa900..=0xa9ff;

/// A new name, of a subsystem or a host, that nobody had before.
pub fn new_name() -> Nqn {
    const FIXED: u128 = 0xffff_ffff_ffff_f000_c000_0000_0000_0000;
    const MARK: u128 = 0x6171_7569_6665_8000_8000_0000_0000_0000;
    Nqn::of_lease(LeaseId(LeaseId::random().0 & !FIXED | MARK))
}

/// Whether the name of a subsystem or a host is one of ours.
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
