//! Each operation of an engine, with the engine killed at each of its points in turn.

use std::panic::{AssertUnwindSafe, catch_unwind};

use aquifer_page::LeaseId;

use super::super::Scheme;
use super::world::{Random, Shape, World, Wrong};
use crate::effect;
use crate::handover::Round;
use crate::policy::PolicyKind;

const OTHER: LeaseId = LeaseId(2);

const SHAPE: Shape = Shape {
    pages: 24,
    frames: 16,
    policy: PolicyKind::Fifo,
    scheme: Scheme::OnDemand,
    shares: true,
    moves: true,
    copies: false,
    lags: false,
};

/// Leases with second copies, which lag behind or do not.
const COPIED: [Shape; 2] =
    [Shape { copies: true, ..SHAPE }, Shape { copies: true, lags: true, ..SHAPE }];

/// Runs `what` in a region, and checks all pages afterwards. Returns whether an engine was killed.
#[track_caller]
fn scene(killed_at: Option<u64>, before: &dyn Fn(&World), what: &dyn Fn(&World)) -> bool {
    scene_of(SHAPE, killed_at, before, what)
}

#[track_caller]
fn scene_of(
    shape: Shape,
    killed_at: Option<u64>,
    before: &dyn Fn(&World),
    what: &dyn Fn(&World),
) -> bool {
    let world = World::new(shape, Random::new(1), true);
    let done = catch_unwind(AssertUnwindSafe(|| {
        before(&world);
        world.schedule.fuse.set(killed_at);
        what(&world);
        let was_killed = world.schedule.fuse.take().is_none();
        if shape.copies {
            read_from_either(&world);
        }
        while !world.fetch_postcopy(true) {}
        world.read_all();
        world.evict_all();
        world.read_all();
        if shape.copies {
            world.mend();
        }
        world.migrate_by(&[Round::Copy], Round::Last, || {});
        world.read_all();
        assert!(
            !world.lender.was_trespassed(),
            "a host changed what a lender has of another host's region"
        );
        was_killed
    }));
    effect::set(None);
    done.unwrap_or_else(|why| {
        let why = why.downcast::<Wrong>().map_or_else(|_| "a panic".to_owned(), |wrong| wrong.0);
        panic!("killed at point {killed_at:?}:\n{}\n{why}", world.log.borrow().join("\n"));
    })
}

/// Runs the scene once for each point of `what`, and kills the running engine there.
#[track_caller]
fn at_each_point(before: impl Fn(&World), what: impl Fn(&World)) {
    at_each_point_of(SHAPE, &before, &what);
}

#[track_caller]
fn at_each_point_with_copies(before: impl Fn(&World), what: impl Fn(&World)) {
    COPIED.into_iter().for_each(|shape| at_each_point_of(shape, &before, &what));
}

#[track_caller]
fn at_each_point_of(shape: Shape, before: &dyn Fn(&World), what: &dyn Fn(&World)) {
    let mut point = 0;
    while scene_of(shape, Some(point), before, what) {
        point += 1;
    }
    assert!(point > 0, "nothing was killed");
}

fn write(world: &World, pages: impl IntoIterator<Item = u64>) {
    let host = world.host();
    pages.into_iter().for_each(|page| world.touch(&host, page, true));
}

/// Writes pages such that the volume has them, some are dirty again, and some are absent.
fn some_of_each(world: &World) {
    write(world, 0..20);
    world.persist();
    write(world, (4..20).step_by(3));
}

#[test]
fn an_engine_killed_while_it_persists_loses_nothing() {
    at_each_point(some_of_each, |world| {
        world.persist();
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_evicts_loses_nothing() {
    at_each_point(some_of_each, World::evict_all);
}

#[test]
fn an_engine_killed_while_it_serves_faults_loses_nothing() {
    let before = |world: &World| {
        some_of_each(world);
        world.evict_all();
    };
    at_each_point(before, |world| {
        write(world, [3, 9]);
        world.read_all();
    });
}

#[test]
fn an_engine_killed_while_it_shares_loses_nothing() {
    at_each_point(some_of_each, |world| {
        world.share(4, 6);
        write(world, [5, 7]);
        world.persist();
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_discards_is_asked_again() {
    at_each_point(some_of_each, |world| world.discard(2, 9));
}

#[test]
fn an_engine_killed_while_it_takes_a_lease_loses_nothing() {
    at_each_point(some_of_each, |world| {
        world.add_lease(OTHER);
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_evacuates_loses_nothing() {
    let before = |world: &World| {
        some_of_each(world);
        world.add_lease(OTHER);
    };
    at_each_point(before, |world| {
        world.evacuate(LeaseId(1), true);
        write(world, [3, 9]);
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_pages_come_home_loses_nothing() {
    at_each_point(some_of_each, |world| {
        world.limit(SHAPE.pages);
        world.evacuate(LeaseId(1), true);
        assert!(world.host().leases.borrow().is_empty());
        write(world, [3, 9]);
        while world.host().leases.borrow().is_empty() {
            world.add_lease(OTHER);
        }
        world.limit(SHAPE.frames);
        world.evict_all();
    });
}

#[test]
fn without_room_an_evacuation_is_refused_and_changes_nothing() {
    scene(None, &some_of_each, &|world| {
        world.evacuate(LeaseId(1), true);
        assert_eq!(world.host().leases.borrow().len(), 1);
        world.evict_all();
    });
}

#[test]
fn leases_that_change_during_a_hand_over_are_there_afterwards() {
    for rounds in [&[Round::Copy][..], &[Round::Clean]] {
        at_each_point(some_of_each, |world| {
            world.migrate_by(rounds, Round::Last, || {
                world.add_lease(OTHER);
                world.evacuate(LeaseId(1), false);
                write(world, [5, 6, 7]);
                world.persist();
            });
        });
    }
}

#[test]
fn an_engine_killed_while_it_recovers_loses_nothing() {
    at_each_point(some_of_each, |world| {
        world.evict(5);
        world.restart(&world.host());
    });
}

#[test]
fn engines_killed_while_they_hand_over_lose_nothing() {
    let rounds: [&[Round]; 2] = [&[Round::Copy, Round::Copy], &[Round::Clean]];
    for rounds in rounds {
        at_each_point(some_of_each, |world| {
            world.migrate_by(rounds, Round::Last, || write(world, [5, 6, 7]));
        });
    }
}

#[test]
fn engines_killed_while_pages_are_left_behind_lose_nothing() {
    at_each_point(some_of_each, |world| {
        world.migrate_by(&[], Round::Leave, || {});
        write(world, [4, 8]);
        while !world.fetch_postcopy(true) {}
        world.evict_all();
    });
}

#[test]
fn an_entry_that_vanished_does_not_make_its_page_clean() {
    scene(None, &some_of_each, &|world| {
        world.drop_entries(0, 24);
        world.migrate_by(&[], Round::Last, || {});
    });
    scene(None, &some_of_each, &|world| {
        world.drop_entries(0, 24);
        world.persist();
        world.evict_all();
    });
}

#[test]
fn a_host_that_gave_a_region_away_changes_no_lender() {
    // The other host stores pages that this host never stored.
    let before = |world: &World| {
        write(world, 0..3);
        world.persist();
        write(world, 3..14);
    };
    scene(None, &before, &|world| {
        let before = world.host();
        world.migrate_by(&[], Round::Leave, || {});
        write(world, 3..14);
        world.evict_all();
        world.restart(&before);
    });
}

#[test]
fn pages_persisted_during_a_hand_over_are_sent_again() {
    scene(None, &some_of_each, &|world| {
        world.migrate_by(&[Round::Copy, Round::Copy], Round::Last, || {
            write(world, [5, 6]);
            world.persist();
        });
    });
}

#[test]
fn writes_of_a_program_that_dies_in_a_hand_over_count() {
    scene(None, &some_of_each, &|world| {
        world.migrate_by(&[Round::Copy], Round::Last, || {
            write(world, [5, 6]);
            world.end_program(&world.host());
        });
    });
}

/// Two programs map the region. One writes to a page and dies before an engine scans. At that
/// moment no engine runs, or the other program's page is being mapped.
#[test]
fn writes_of_one_of_two_programs_survive_its_death() {
    for is_served in [false, true] {
        let before = |world: &World| {
            let host = world.host();
            some_of_each(world);
            world.start_program(&host);
            for program in [0, 1] {
                (0..12).for_each(|page| world.touch_by(&host, program, page, false));
            }
            world.persist();
        };
        at_each_point(before, |world| {
            let host = world.host();
            (0..12).step_by(2).for_each(|page| world.touch_by(&host, 1, page, true));
            if !is_served {
                world.lose_engine(&host);
            }
            world.end_program(&host);
            if !is_served {
                world.restart(&host);
            }
            world.evict_all();
        });
    }
}

/// Returns a lease with a second copy that the engine uses, and the lease that holds it.
fn pair(world: &World) -> Option<(LeaseId, LeaseId)> {
    let copies = world.host().engine().volume().copies();
    copies.first().map(|copy| (copy.of, copy.lease.lease))
}

/// Makes a second copy that has all pages.
fn with_copy(world: &World) {
    some_of_each(world);
    world.begin_copy();
    world.mend();
}

/// Reads all pages while each lender of the pair in turn is dead.
fn read_from_either(world: &World) {
    for is_first in [true, false] {
        world.mend();
        let Some((of, copy)) = pair(world) else { return };
        world.lender.kill(if is_first { of } else { copy });
        write(world, [5, 6]);
        world.evict_all();
        world.read_all();
    }
    world.mend();
}

#[test]
fn an_engine_killed_while_it_begins_a_copy_loses_nothing() {
    at_each_point_with_copies(some_of_each, |world| {
        world.begin_copy();
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_writes_two_copies_loses_nothing() {
    at_each_point_with_copies(with_copy, |world| {
        world.discard(2, 4);
        world.persist();
        write(world, [3, 9]);
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_repairs_a_copy_loses_nothing() {
    for is_first in [true, false] {
        let before = |world: &World| {
            with_copy(world);
            let (of, copy) = pair(world).expect("a copy");
            world.lender.kill(if is_first { of } else { copy });
            write(world, 3..9);
            world.discard(10, 3);
            world.persist();
        };
        at_each_point_with_copies(before, World::mend);
    }
}

#[test]
fn an_engine_killed_while_it_ends_a_copy_loses_nothing() {
    at_each_point_with_copies(with_copy, |world| {
        world.end_copy();
        write(world, [3, 9]);
        world.evict_all();
    });
}

#[test]
fn an_engine_killed_while_it_leaves_a_dead_lender_loses_nothing() {
    let before = |world: &World| {
        with_copy(world);
        world.lender.lose(LeaseId(1));
        write(world, 3..9);
    };
    at_each_point_with_copies(before, |world| {
        world.mend();
        assert!(!world.host().leases.borrow().contains(&LeaseId(1)));
        write(world, [3, 9]);
        world.evict_all();
    });
}
