//! The choice of the leases that an overloaded lender recalls.

use aquifer_page::{Bytes, LeaseId};

/// Returns the fewest leases to recall that bring `used` to `target`. Of the sets of that size, it
/// picks one that takes little more than needed. If all leases do not suffice, it returns all.
///
/// `stored` has the bytes in each lease that is not recalled yet. `leaving` is the sum of the bytes
/// in recalled leases, which count as gone. Each returned lease comes with the use expected after
/// it.
pub(crate) fn fewest(
    used: Bytes,
    leaving: Bytes,
    target: Bytes,
    stored: impl IntoIterator<Item = (LeaseId, Bytes)>,
) -> Vec<(LeaseId, Bytes)> {
    let mut expected = used.saturating_sub(leaving);
    let mut left: Vec<_> = stored.into_iter().collect();
    left.sort_by_key(|&(lease, bytes)| (bytes, lease));
    let mut chosen = Vec::new();
    while expected > target {
        let needed = expected - target;
        // Ascending: the first lease that suffices alone is the smallest that does. Else the
        // largest comes nearest.
        let enough = left.partition_point(|&(_, bytes)| bytes < needed);
        if left.is_empty() {
            break;
        }
        let (lease, bytes) = left.remove(enough.min(left.len() - 1));
        expected = expected.saturating_sub(bytes);
        chosen.push((lease, expected));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(used: u64, leaving: u64, target: u64, stored: &[u64]) -> Vec<(u128, u64)> {
        let stored =
            stored.iter().enumerate().map(|(id, &mib)| (LeaseId(id as u128), Bytes::mib(mib)));
        let picked = fewest(Bytes::mib(used), Bytes::mib(leaving), Bytes::mib(target), stored);
        picked.into_iter().map(|(lease, expected)| (lease.0, expected.0 >> 20)).collect()
    }

    #[test]
    fn the_smallest_lease_that_suffices_alone_is_taken() {
        assert_eq!(chosen(900, 0, 600, &[100, 800, 300, 400]), [(2, 600)]);
    }

    #[test]
    fn several_are_taken_largest_first_where_none_suffices_alone() {
        assert_eq!(chosen(900, 0, 400, &[100, 300, 250, 400]), [(3, 500), (0, 400)]);
    }

    #[test]
    fn bytes_that_are_leaving_count_as_gone() {
        assert_eq!(chosen(900, 300, 600, &[100, 200]), []);
        assert_eq!(chosen(900, 200, 600, &[100, 200]), [(0, 600)]);
    }

    #[test]
    fn all_are_taken_even_empty_ones_where_all_do_not_suffice() {
        assert_eq!(chosen(900, 0, 100, &[0, 200]), [(1, 700), (0, 700)]);
    }
}
