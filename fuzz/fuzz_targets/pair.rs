//! A fuzz target that runs a volume with two copies of each page, one of them at a broken NBD
//! server that lies, forgets, and breaks the protocol.
#![no_main]
#![allow(clippy::unwrap_used, reason = "a panic reports a finding")]

#[path = "pair/broken.rs"]
mod broken;
#[path = "pair/honest.rs"]
mod honest;

use std::time::Duration;

use aquifer_page::{Bytes, EXTENT_SIZE, LeaseId, PAGE_SIZE, VolumeId, WorkerId};
use aquifer_transport::Address;
use aquifer_volume::holder::Holder;
use aquifer_volume::{
    Encryption, LeaseTarget, Protocol, SecondCopy, Volume, VolumeConfig, VolumeError,
};
use arbitrary::Arbitrary;
use broken::{Answer, Broken};
use honest::Honest;
use libfuzzer_sys::fuzz_target;

const PAGE: u64 = PAGE_SIZE as u64;
const WORKER: WorkerId = WorkerId(0);
/// Pages that the volume uses.
const PAGES: u64 = 16;
/// The most steps of one input.
const MAX_STEPS: usize = 64;

#[derive(Arbitrary, Debug)]
struct Input {
    is_first_broken: bool,
    is_encrypted: bool,
    answers: Vec<Answer>,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Step {
    Write { page: u8, pages: u8, byte: u8 },
    Discard { page: u8, pages: u8 },
    Read { page: u8, pages: u8 },
    Repair,
    Scrub,
}

fn target(lease: u128, encryption: Option<Encryption>) -> LeaseTarget {
    LeaseTarget {
        lease: LeaseId(lease),
        lender: "lender".parse().unwrap(),
        address: Address::Unix(format!("/{lease}").into()),
        protocol: Protocol::Nbd { export: String::new(), secure: false },
        capacity: Bytes(EXTENT_SIZE),
        encryption,
        claim: None,
    }
}

fn volume(input: &Input) -> Volume {
    let config = VolumeConfig {
        id: VolumeId(1),
        capacity: Bytes(EXTENT_SIZE),
        workers: 1,
        io_timeout: Duration::ZERO,
        tls: None,
        spill: None,
        ledger: None,
    };
    let volume = Volume::new(config).unwrap();
    let key = Encryption { key: aquifer_volume::EncryptionKey::random(), ..Encryption::random() };
    let key = Some(key).filter(|_| input.is_encrypted);
    let broken: Box<dyn Holder> = Box::new(Broken::new(&input.answers));
    let honest: Box<dyn Holder> = Box::<Honest>::default();
    let (first, second) = if input.is_first_broken { (broken, honest) } else { (honest, broken) };
    volume.add_holder(target(1, key.clone()), first, 1, |_| true).unwrap();
    let record = |_: &SecondCopy| Ok::<_, VolumeError>(());
    let copy = SecondCopy { of: LeaseId(1), lease: target(2, key), lags: false };
    volume.add_copy_holder(copy, second, record).unwrap();
    // All is zeroes so far, of which the second copy gets to know without a read.
    volume.repair_copies(|| true);
    volume
}

/// Returns the range of pages, in bytes.
fn range(page: u8, pages: u8) -> (u64, u64) {
    let page = u64::from(page) % PAGES;
    (page * PAGE, (1 + u64::from(pages) % (PAGES - page)) * PAGE)
}

fuzz_target!(|input: Input| {
    let volume = volume(&input);
    let mut model = vec![0; (PAGES * PAGE) as usize];
    // The honest lender is always there, so nothing may fail.
    for step in input.steps.iter().take(MAX_STEPS) {
        match *step {
            Step::Write { page, pages, byte } => {
                let (at, length) = range(page, pages);
                let part = &mut model[at as usize..(at + length) as usize];
                part.fill(byte);
                volume.write(WORKER, at, part).unwrap();
            }
            Step::Discard { page, pages } => {
                let (at, length) = range(page, pages);
                model[at as usize..(at + length) as usize].fill(0);
                volume.discard(WORKER, at, length).unwrap();
            }
            Step::Read { page, pages } => {
                let (at, length) = range(page, pages);
                let mut data = vec![0xee; length as usize];
                volume.read(WORKER, at, &mut data).unwrap();
                assert!(data == model[at as usize..(at + length) as usize], "a lie was shown");
            }
            Step::Repair => _ = volume.repair_copies(|| true),
            Step::Scrub => _ = volume.scrub_copies(),
        }
    }
    let mut all = vec![0xee; model.len()];
    volume.read(WORKER, 0, &mut all).unwrap();
    assert!(all == model, "a lie was shown at last");
});
