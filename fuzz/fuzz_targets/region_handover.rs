//! A fuzz target that sends the frames of a hand-over between hosts, also broken ones, and any
//! bytes, to what receives them.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

use aquifer_fuzz::{Number, Twist, Twisted};
use aquifer_page::{ExtentIndex, LeaseId};
use aquifer_region::handover::{Extent, Frame, Round};
use aquifer_region_client::Run;
use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

/// The most frames of one input.
const MAX_FRAMES: usize = 64;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    frames: Vec<(Sent, &'a [u8])>,
    twists: Vec<(u8, Twist)>,
    rest: &'a [u8],
}

#[derive(Arbitrary, Debug)]
enum Sent {
    Tags(Number),
    States(Number),
    Pages(Number, Number),
    Purge(Vec<(Number, Number)>),
    Extents(Vec<(Number, u8, u32)>),
    Leases,
    Round(u8),
    Failed(String),
    Next(bool),
    GiveAway,
    Sync,
}

impl Sent {
    fn frame(&self) -> Frame {
        let run =
            |first: &Number, count: &Number| Run { first: first.blocks(), count: count.blocks() };
        let extent = |(extent, lease, slot): &(Number, u8, u32)| Extent {
            extent: ExtentIndex(extent.blocks()),
            lease: LeaseId(u128::from(*lease)),
            slot: *slot,
        };
        match self {
            Self::Tags(first) => Frame::Tags(first.blocks()),
            Self::States(first) => Frame::States(first.blocks()),
            Self::Pages(first, count) => Frame::Pages(run(first, count)),
            Self::Purge(runs) => {
                Frame::Purge(runs.iter().map(|(first, count)| run(first, count)).collect())
            }
            Self::Extents(extents) => Frame::Extents(extents.iter().map(extent).collect()),
            Self::Leases => Frame::Leases,
            Self::Round(number) => {
                let all = [
                    Round::Copy,
                    Round::Clean,
                    Round::Last,
                    Round::Rest,
                    Round::Leave,
                    Round::Tags,
                ];
                Frame::Round(all[usize::from(*number) % all.len()])
            }
            Self::Failed(why) => Frame::Failed(why.clone()),
            Self::Next(all) => Frame::Next { all: *all },
            Self::GiveAway => Frame::GiveAway,
            Self::Sync => Frame::Sync,
        }
    }
}

fuzz_target!(|input: Input| {
    let mut messages = Twisted::default();
    let frames = &input.frames[..input.frames.len().min(MAX_FRAMES)];
    for (sent, data) in frames {
        let mut bytes = Vec::new();
        sent.frame().send(&mut bytes, data).unwrap();
        messages.push(bytes);
    }
    messages.twist(&input.twists);
    let bytes = [messages.bytes(), input.rest.to_vec()].concat();
    let (mut from, mut data) = (&bytes[..], Vec::new());
    let mut came = Vec::new();
    while let Ok(Some(frame)) = Frame::receive(&mut from, &mut data) {
        // What came can be sent on, and is the same then.
        let (mut again, mut same) = (Vec::new(), Vec::new());
        frame.send(&mut again, &data).unwrap();
        assert_eq!(Frame::receive(&mut &again[..], &mut same).unwrap(), Some(frame.clone()));
        assert_eq!(same, data);
        came.push(frame);
    }
    if input.twists.is_empty() {
        let sent = frames.iter().map(|(sent, _)| sent.frame());
        assert!(came.len() >= frames.len() && sent.eq(came.into_iter().take(frames.len())));
    }
});
