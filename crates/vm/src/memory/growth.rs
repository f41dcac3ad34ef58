//! The account that bounds the growth of all VMs together, besides the budget.

use aquifer_control::balance::Move;
use aquifer_page::Bytes;

/// The memory by which all VMs together may grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Memory that is promised to nobody.
    pub free: Bytes,
    /// Memory that is lent, and that its owner can recall.
    pub recallable: Bytes,
}

/// The owner of a host's memory, which a balancer asks.
pub trait GrowthLimit {
    /// Returns the room for VMs; `None` if only the budget bounds them.
    fn room(&self) -> Option<Room>;

    /// Promises a growing VM its new size. Returns whether the owner agreed.
    fn admits(&self, is: &Move) -> bool;

    /// Recalls lent memory, because VMs are to grow by it. The balancer repeats this until it is
    /// back.
    fn recall(&self, bytes: Bytes);
}

/// Returns the part of the budget's free memory that VMs may take now, and the part that they may
/// take once it is recalled. Without a budget of its own, a host has all of its RAM in it.
pub(super) fn within(free: Bytes, room: Option<Room>) -> Room {
    let Some(room) = room else { return Room { free, recallable: Bytes::ZERO } };
    let now = free.min(room.free);
    Room { free: now, recallable: free.saturating_sub(now).min(room.recallable) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_grow_within_the_budget_and_within_the_hosts_memory() {
        let room =
            |free, recallable| Room { free: Bytes::gib(free), recallable: Bytes::gib(recallable) };
        for (budget, host, expected) in [
            (8, None, room(8, 0)),
            (8, Some(room(3, 2)), room(3, 2)),
            (8, Some(room(3, 9)), room(3, 5)),
            (2, Some(room(3, 9)), room(2, 0)),
            (0, Some(room(3, 9)), room(0, 0)),
            (8, Some(room(0, 0)), room(0, 0)),
        ] {
            assert_eq!(within(Bytes::gib(budget), host), expected, "{budget} {host:?}");
        }
    }
}
