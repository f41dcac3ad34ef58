//! Regions whose lender wants its memory back while nobody has room, and their way back.

use aquifer_control::ledger::Spilled;

use super::*;

const VOLUME: VolumeId = VolumeId(5);

/// A region with a cache of a fixed size, so that the agent may not grow it, and this much in its
/// spill file, in MiB.
fn fixed(spilled: u64) -> RegionMemory {
    let bytes = Bytes::mib(spilled);
    let spilled = Some(Spilled { volume: VOLUME, bytes, homeless: bytes });
    RegionMemory { auto: None, spilled, ..region("items", 1024) }
}

impl Shell {
    /// Lets host b ask for lease 1, and no host offer a place. Returns whether the region may
    /// spill.
    fn may_spill(&mut self) -> bool {
        let (volume, lease, onto) = (VOLUME, LeaseId(1), Vec::new());
        self.hear("b", Message::MemLenFin { lease, generation: 0 });
        self.offers(&[]);
        let spills = true;
        self.begun().contains(&Action::Evacuate { volume, lease, onto, spills })
    }

    fn has_no_room(&mut self) -> &mut Self {
        let (lease, unused, why) = (LeaseId(1), Vec::new(), "no room".to_owned());
        self.done(Work::Lease(lease), Event::EvacuationFailed { lease, unused, why })
    }

    /// Shows the region with so much spilled, and returns whether the host asks for memory then.
    fn borrows_for(&mut self, spilled: u64) -> bool {
        self.shows_caches(50, &[fixed(spilled)]).asks_offers()
    }
}

/// Returns a host whose region has spilled all that it had at host b.
fn spilled() -> Shell {
    let mut shell = with_a_lease();
    for _ in 0..5 {
        assert!(!shell.may_spill(), "a place may turn up");
        shell.has_no_room().after(2);
    }
    assert!(shell.may_spill());
    let (lease, unused) = (LeaseId(1), Vec::new());
    shell.done(Work::Lease(lease), Event::Evacuated { lease, unused });
    shell
}

#[test]
fn pages_may_spill_only_after_their_lender_has_waited() {
    let mut shell = spilled();
    assert!(!shell.told("cannot vacate"));
    // Another recall waits as long.
    let mut again = with_a_lease();
    assert!(!again.may_spill());
    again.has_no_room().after(100);
    assert!(!again.may_spill(), "the lender did not ask meanwhile");
    assert!(!shell.borrows_for(0));
}

#[test]
fn a_host_borrows_for_spilled_pages_until_they_are_back() {
    let mut shell = spilled();
    assert!(shell.borrows_for(1024));
    assert!(shell.told("borrows 1GiB for region items, which"), "{:?}", shell.outputs);
    shell.offers(&[]);
    assert!(shell.told("stay in its file, tries again in 60 s"), "{:?}", shell.outputs);
    assert!(!shell.borrows_for(1024));
    assert!(shell.after(60).borrows_for(1024));
    // A part of it is of use.
    shell.offers(&[("b", 1)]);
    let asked = shell.asks().pop().unwrap();
    let Message::MemBorReq { request, bytes, .. } = asked else { panic!("{asked:?}") };
    shell.hear("b", ack(request, 2, bytes));
    shell.done(Work::Volume(VOLUME), Event::Activated { volume: VOLUME });
    // The engine moves the pages at its leisure.
    assert!(!shell.borrows_for(512));
    assert!(!shell.after(60).borrows_for(0));
}

#[test]
fn an_overloaded_host_does_not_borrow_for_spilled_pages_first() {
    let mut shell = spilled();
    shell.shows_caches(90, &[fixed(1024)]);
    assert!(!shell.told("spill file"));
    shell.offers(&[]);
    assert!(shell.borrows_for(1024));
}
