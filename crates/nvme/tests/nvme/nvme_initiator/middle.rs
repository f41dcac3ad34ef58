//! A proxy between host and target, which can take a connection over and misbehave.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use aquifer_nvme::proto::Command;
use aquifer_nvme::proto::command::{FABRICS, admin};
use aquifer_nvme::proto::fabrics::{Connect, kind as fabrics};
use aquifer_nvme::proto::pdu::{CapsuleCmd, CommonHeader, kind};
use aquifer_transport::Address;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::TIMEOUT;
use crate::nvme_target::harness::Served;

/// Takes over a host's connection at its first I/O command, in place of the target.
type Mischief = Arc<dyn Fn(UnixStream, Command) + Send + Sync>;

/// The proxy; it listens until the test process ends.
pub struct Middle {
    pub address: Address,
    pub signs_of_life: Arc<AtomicUsize>,
    pub admin_queues: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
}

#[derive(Clone)]
struct Shared {
    target: PathBuf,
    mischief: Option<Mischief>,
    signs_of_life: Arc<AtomicUsize>,
    admin_queues: Arc<AtomicUsize>,
}

impl Middle {
    /// Starts a proxy that forwards everything.
    pub fn honest(served: &Served) -> Self {
        Self::start(&served.socket(), None)
    }

    pub fn with(
        served: &Served,
        mischief: impl Fn(UnixStream, Command) + Send + Sync + 'static,
    ) -> Self {
        Self::start(&served.socket(), Some(Arc::new(mischief)))
    }

    fn start(target: &Path, mischief: Option<Mischief>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let (signs_of_life, admin_queues) =
            (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let shared = Shared {
            target: target.to_owned(),
            mischief,
            signs_of_life: Arc::clone(&signs_of_life),
            admin_queues: Arc::clone(&admin_queues),
        };
        // The listening thread ends with the test process, the others end with their connections.
        thread::spawn(move || {
            for host in listener.incoming() {
                let (host, shared) = (host.unwrap(), shared.clone());
                thread::spawn(move || shared.pass(host));
            }
        });
        Self { address: Address::Unix(path), signs_of_life, admin_queues, _dir: dir }
    }
}

impl Shared {
    /// Forwards both directions; the end of one ends the other.
    fn pass(&self, mut host: UnixStream) {
        host.set_write_timeout(Some(TIMEOUT)).unwrap();
        let Ok(mut target) = UnixStream::connect(&self.target) else { return };
        let (mut from_target, mut to_host) =
            (target.try_clone().unwrap(), host.try_clone().unwrap());
        let taken_over = Arc::new(AtomicBool::new(false));
        let back = thread::spawn({
            let taken_over = Arc::clone(&taken_over);
            move || {
                let _ = std::io::copy(&mut from_target, &mut to_host);
                if !taken_over.load(Ordering::SeqCst) {
                    let _ = to_host.shutdown(Shutdown::Both);
                }
            }
        });
        let mut is_io = false;
        while let Some(pdu) = next(&mut host) {
            let command =
                CapsuleCmd::read_from_prefix(&pdu).ok().filter(|_| pdu[0] == kind::CAPSULE_CMD);
            if let Some((capsule, _)) = command {
                let command = capsule.command;
                if command.opcode == FABRICS && command.fabrics_type() == fabrics::CONNECT {
                    is_io = Connect::of(&command).queue != 0;
                    self.admin_queues.fetch_add((!is_io).into(), Ordering::SeqCst);
                } else if command.opcode == admin::KEEP_ALIVE && !is_io {
                    self.signs_of_life.fetch_add(1, Ordering::SeqCst);
                } else if let Some(mischief) = &self.mischief
                    && is_io
                    && command.opcode != FABRICS
                {
                    // The target sees a closed connection, and its answer does not reach the host.
                    taken_over.store(true, Ordering::SeqCst);
                    let _ = target.shutdown(Shutdown::Both);
                    back.join().unwrap();
                    mischief(host, command);
                    return;
                }
            }
            if target.write_all(&pdu).is_err() {
                break;
            }
        }
        let _ = target.shutdown(Shutdown::Both);
        back.join().unwrap();
        let _ = host.shutdown(Shutdown::Both);
    }
}

fn next(host: &mut UnixStream) -> Option<Vec<u8>> {
    let mut header = [0; size_of::<CommonHeader>()];
    host.read_exact(&mut header).ok()?;
    let header = CommonHeader::read_from_bytes(&header).unwrap();
    let mut pdu = header.as_bytes().to_vec();
    pdu.resize(header.length.get() as usize, 0);
    host.read_exact(&mut pdu[size_of::<CommonHeader>()..]).ok()?;
    Some(pdu)
}
