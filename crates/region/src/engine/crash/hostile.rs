//! A source host that sends any frames, also broken ones. The destination's engine refuses them and
//! works on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use aquifer_page::{ExtentIndex, LeaseId, PAGE_SIZE};
use aquifer_region_client::Run;

use super::super::incoming::Incoming;
use super::super::{Engine, Scheme};
use super::schedule::number;
use super::world::{Random, Shape, World};
use crate::effect;
use crate::handover;
use crate::handover::{Extent, Frame};
use crate::policy::PolicyKind;

/// Frames that one source sends.
const FRAMES: u64 = 60;

/// Sends frames from a seed to a new destination, which then owns the region. Returns how many
/// frames the engine took, and how many it refused.
fn play(seed: u64) -> (u64, u64) {
    let mut random = Random::new(seed);
    let shape = Shape {
        pages: 8 + random.below(40),
        frames: 48,
        policy: PolicyKind::Clock,
        scheme: Scheme::OnDemand,
        shares: false,
        moves: false,
        copies: false,
        lags: false,
    };
    let world = World::new(shape, Random::new(seed), true);
    let to = world.new_host();
    world.restart(&to);
    let engine: Arc<Engine> = to.engine();
    let (mut incoming, mut taken, mut refused) = (Incoming::default(), 0, 0);
    for _ in 0..FRAMES {
        let Some((frame, data)) = received(&mut random, shape.pages) else { continue };
        // A supervisor gives up at the first error. This one goes on.
        match engine.take_in(&mut incoming, &frame, &data) {
            Ok(()) => taken += 1,
            Err(_) => refused += 1,
        }
    }
    engine.own();
    for frame in [Frame::Tags(0), Frame::States(0), Frame::Leases, Frame::Extents(Vec::new())] {
        let late = engine.take_in(&mut incoming, &frame, &[0; 8]);
        assert!(late.is_err(), "the source changes a region that is no longer its own: {frame:?}");
    }
    (taken, refused)
}

/// Returns a frame as it arrives, perhaps broken on the way; `None` if it cannot be understood.
fn received(random: &mut Random, pages: u64) -> Option<(Frame, Vec<u8>)> {
    let (frame, data) = sent(random, pages);
    let mut bytes = Vec::new();
    frame.send(&mut bytes, &data).ok()?;
    if random.below(3) == 0 {
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
    }
    if random.below(8) == 0 {
        bytes.truncate(random.below(bytes.len() as u64) as usize);
    }
    let mut data = Vec::new();
    let frame = handover::receive(&mut &bytes[..], &mut data).ok()??;
    Some((frame, data))
}

/// Makes a frame of any kind, mostly near the region's bounds.
fn sent(random: &mut Random, pages: u64) -> (Frame, Vec<u8>) {
    let near = |random: &mut Random| match random.below(12) {
        0 => u64::MAX - random.below(3),
        1 => pages + random.below(3),
        2 => u64::MAX / 8,
        _ => random.below(pages),
    };
    let run = |random: &mut Random| {
        let first = near(random);
        let count = match random.below(10) {
            0 => u64::MAX - random.below(9),
            1 => 0,
            _ => 1 + random.below(pages.saturating_sub(first).clamp(1, 8)),
        };
        Run { first, count }
    };
    let bytes = |random: &mut Random, length: u64| {
        let length = if random.below(6) == 0 { random.below(length + 20) } else { length };
        (0..length).map(|_| random.below(256) as u8).collect::<Vec<_>>()
    };
    match random.below(16) {
        0..4 => {
            let run = run(random);
            let length = run.count.min(80) * PAGE_SIZE as u64;
            (Frame::Pages(run), bytes(random, length))
        }
        4 | 5 => (Frame::Purge((0..random.below(4)).map(|_| run(random)).collect()), Vec::new()),
        6..8 => {
            let first = if random.below(2) == 0 { 0 } else { near(random) };
            (Frame::States(first), bytes(random, pages.div_ceil(4)))
        }
        8..11 => {
            let first = if random.below(2) == 0 { 0 } else { near(random) };
            let count = random.below(2 * pages);
            (Frame::Tags(first), bytes(random, count * 8))
        }
        11..14 => {
            let extent = |random: &mut Random| Extent {
                extent: ExtentIndex(if random.below(3) == 0 { near(random) } else { 0 }),
                lease: LeaseId(random.below(3).into()),
                slot: if random.below(4) == 0 { u32::MAX } else { random.below(3) as u32 },
            };
            (Frame::Extents((0..random.below(4)).map(|_| extent(random)).collect()), Vec::new())
        }
        14 => {
            let lists: [&[u8]; 4] = [b"[]", b"[{}]", b"", b"[{\"lease\":1}]"];
            (Frame::Leases, lists[random.below(4) as usize].to_vec())
        }
        _ => {
            let all = [Frame::GiveAway, Frame::TellHot, Frame::Sync, Frame::Done];
            (all[random.below(4) as usize].clone(), bytes(random, 9))
        }
    }
}

#[test]
fn frames_of_a_hostile_source_end_no_engine() {
    let (first, count) = (number("AQUIFER_SEED", 1), number("AQUIFER_SCHEDULES", 200));
    let mut sum = (0, 0);
    for seed in first..first + count {
        let played = catch_unwind(AssertUnwindSafe(|| play(seed)));
        effect::set(None);
        let Ok((taken, refused)) = played else {
            panic!("AQUIFER_SEED={seed} AQUIFER_SCHEDULES=1 plays this again");
        };
        sum = (sum.0 + taken, sum.1 + refused);
    }
    assert!(sum.0 > 0 && sum.1 > 0, "frames taken and refused: {sum:?}");
}

#[test]
fn any_bytes_are_a_frame_or_an_error() {
    let mut random = Random::new(number("AQUIFER_SEED", 1));
    for _ in 0..number("AQUIFER_SCHEDULES", 200) * 50 {
        let mut bytes: Vec<u8> = (0..random.below(64)).map(|_| random.below(256) as u8).collect();
        if bytes.len() >= 8 && random.below(4) > 0 {
            // A length that fits, so that the message itself is read.
            let rest = bytes.len() - 8;
            let message = random.below(rest as u64 + 1) as usize;
            bytes[..4].copy_from_slice(&(message as u32).to_le_bytes());
            bytes[4..8].copy_from_slice(&((rest - message) as u32).to_le_bytes());
        }
        let mut data = Vec::new();
        if let Ok(Some(frame)) = Frame::receive(&mut &bytes[..], &mut data) {
            let mut again = Vec::new();
            frame.send(&mut again, &data).expect("a frame that came can be sent");
            let same = Frame::receive(&mut &again[..], &mut Vec::new());
            assert_eq!(same.expect("it is valid"), Some(frame));
        }
    }
}
