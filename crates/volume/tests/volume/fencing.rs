//! A write that the network delays, and delivers after newer ones were carried out.

use std::io::{self, Read, Write};
use std::iter;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use aquifer_page::{ExtentIndex, WorkerId};
use aquifer_transport::Address;
use aquifer_volume::{Claim, LeaseTarget, Volume, VolumeConfig};

use crate::common::*;

#[test]
fn a_write_that_arrives_late_does_not_undo_a_newer_one() {
    [Kind::Nbd, Kind::Nvme].into_iter().for_each(a_late_write_is_harmless);
}

fn a_late_write_is_harmless(kind: Kind) {
    let lender = OurLender::start_kind(kind, 1);
    let dir = tempfile::tempdir().unwrap();
    let network = Network::new(&lender, &dir.path().join("way"));
    let volume =
        Volume::new(VolumeConfig { io_timeout: Duration::from_secs(4), ..config(1) }).unwrap();
    let target = LeaseTarget { address: Address::Unix(network.path.clone()), ..lender.lease(2) };
    volume.add_lease(target).unwrap();
    write(&volume, 0, 1);
    write(&volume, 5 * PAGE, 1);
    // From now on, the network holds all that comes over the existing connections.
    network.hold();
    write(&volume, 0, 2);
    write(&volume, 0, 3);
    volume.write(WorkerId(1), 5 * PAGE, &content(5 * PAGE, 2)).unwrap();
    assert!(network.release(), "{kind:?}: nothing was kept back");
    expect(&volume, 0, 3);
    expect(&volume, 5 * PAGE, 2);
}

#[test]
fn a_host_that_the_owner_has_left_cannot_write_any_more() {
    for kind in [Kind::Nbd, Kind::Nvme] {
        let mut lender = OurLender::start_kind(kind, 1);
        let lease = lender.lease(2);
        let claim = Claim { keeps: true, ..lease.claim.clone().unwrap() };
        let config = || VolumeConfig { io_timeout: Duration::from_secs(1), ..config(1) };
        let source = Volume::new(config()).unwrap();
        source.add_lease(LeaseTarget { claim: Some(claim.clone()), ..lease.clone() }).unwrap();
        write(&source, 0, 1);
        // Both are connected until the destination owns the region.
        let destination = Volume::new(config()).unwrap();
        let claim = Claim { generation: 1, ..claim };
        destination.resume_lease(LeaseTarget { claim: Some(claim), ..lease.clone() }).unwrap();
        destination.restore(ExtentIndex(0), (lease.lease, 0), iter::once(0..PAGE)).unwrap();
        destination.restore_tags(ExtentIndex(0), &source.tags(ExtentIndex(0)));
        expect(&destination, 0, 1);
        write(&source, 0, 2);
        destination.end_older_generations();
        write(&destination, 0, 3);
        let error = source.write(WorkerId(0), 0, &content(0, 4)).unwrap_err();
        assert!(error.to_string().contains("has taken over"), "{kind:?}: {error}");
        lender.kill();
        lender.restart();
        source.write(WorkerId(0), 0, &content(0, 5)).unwrap_err();
        expect(&destination, 0, 3);
    }
}

/// The network between a borrower and a lender.
struct Network {
    path: PathBuf,
    ways: Arc<Mutex<Vec<Arc<Way>>>>,
}

/// One connection through the network.
struct Way {
    holds: AtomicBool,
    /// The bytes on their way to the lender.
    held: Mutex<Vec<u8>>,
    there: UnixStream,
}

impl Network {
    fn new(lender: &OurLender, path: &Path) -> Self {
        let Address::Unix(to) = lender.address() else {
            unreachable!("they listen on unix sockets")
        };
        let listener = UnixListener::bind(path).unwrap();
        let ways = Arc::<Mutex<Vec<_>>>::default();
        let all = Arc::clone(&ways);
        thread::spawn(move || {
            for here in listener.incoming().map_while(Result::ok) {
                let Ok(there) = UnixStream::connect(&to) else { return };
                let way = Way {
                    holds: false.into(),
                    held: Mutex::default(),
                    there: there.try_clone().unwrap(),
                };
                let way = Arc::new(way);
                all.lock().unwrap().push(Arc::clone(&way));
                let (mut back, mut from) = (here.try_clone().unwrap(), there);
                thread::spawn(move || {
                    let _ = io::copy(&mut from, &mut back);
                    let _ = back.shutdown(std::net::Shutdown::Both);
                });
                thread::spawn(move || way.carry(here));
            }
        });
        Self { path: path.to_owned(), ways }
    }

    fn hold(&self) {
        self.ways.lock().unwrap().iter().for_each(|way| way.holds.store(true, Ordering::SeqCst));
    }

    /// Delivers the held bytes, and waits until the lender has ended the connections. Returns
    /// whether there were any bytes.
    fn release(&self) -> bool {
        let mut was_held = false;
        for way in &*self.ways.lock().unwrap() {
            let held = std::mem::take(&mut *way.held.lock().unwrap());
            if held.is_empty() {
                continue;
            }
            was_held = true;
            // A lender that has ended the connection does not accept the bytes.
            if (&way.there).write_all(&held).is_ok() {
                let _ = way.there.shutdown(std::net::Shutdown::Write);
                way.there.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                let _ = (&way.there).read_to_end(&mut Vec::new());
            }
        }
        was_held
    }
}

impl Way {
    /// Carries the borrower's bytes. If they end, held bytes may still arrive later, so the
    /// connection to the lender stays open.
    fn carry(&self, mut here: UnixStream) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = here.read(&mut buffer) {
            if self.holds.load(Ordering::SeqCst) {
                self.held.lock().unwrap().extend_from_slice(&buffer[..length]);
            } else if (&self.there).write_all(&buffer[..length]).is_err() {
                return;
            }
        }
        if !self.holds.load(Ordering::SeqCst) {
            let _ = self.there.shutdown(std::net::Shutdown::Write);
        }
    }
}
