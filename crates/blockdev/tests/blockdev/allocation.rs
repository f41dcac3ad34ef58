//! A test that backends do not allocate between a request and its reply.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex};

use aquifer_blockdev::Disk;
use aquifer_blockdev::backend::{self, Options};
use aquifer_page::{Bytes, PAGE_SIZE, WorkerId};

use crate::alone::alone;
use crate::common::aligned::Aligned;
use crate::counting::allocations;

/// A disk in RAM that allocates all its memory at the start.
struct FlatDisk(Mutex<Vec<u8>>);

impl Disk for FlatDisk {
    fn capacity(&self) -> Bytes {
        Bytes(self.0.lock().unwrap().len() as u64)
    }

    fn read(&self, _worker: WorkerId, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let offset = offset as usize;
        data.copy_from_slice(&self.0.lock().unwrap()[offset..offset + data.len()]);
        Ok(())
    }

    fn write(&self, _worker: WorkerId, offset: u64, data: &[u8]) -> io::Result<()> {
        let offset = offset as usize;
        self.0.lock().unwrap()[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn discard(&self, _worker: WorkerId, offset: u64, len: u64) -> io::Result<()> {
        self.0.lock().unwrap()[offset as usize..(offset + len) as usize].fill(0);
        Ok(())
    }

    fn flush(&self, _worker: WorkerId) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn no_backend_allocates_between_a_request_and_its_answer() {
    alone("allocation::no_backend_allocates_between_a_request_and_its_answer", || {
        for backend in backend::backends().into_iter().filter(|backend| backend.probe().is_ok()) {
            let disk = Arc::new(FlatDisk(Mutex::new(vec![0; 8 << 20])));
            let options = Options { workers: 3, spare: 0, label: "aquifer-test".to_owned() };
            let mut device = backend.attach(disk, &options).unwrap();
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_DIRECT)
                .open(device.path())
                .unwrap();
            let mut page = Aligned::new(PAGE_SIZE);
            let mut many = Aligned::new(1 << 20);
            let before = allocations();
            for round in 0..500u64 {
                let offset = round % 1024 * PAGE_SIZE as u64;
                page.fill(round as u8);
                file.write_all_at(&page, offset).unwrap();
                file.read_exact_at(&mut page, offset).unwrap();
                assert_eq!(page[0], round as u8);
                if round % 50 == 0 {
                    file.read_exact_at(&mut many, 4 << 20).unwrap();
                    file.write_all_at(&many, 4 << 20).unwrap();
                    crate::common::sys::discard(&file, 0, 1 << 20).unwrap();
                    file.sync_all().unwrap();
                }
            }
            assert_eq!(allocations() - before, 0, "backend {}", backend.kind());
            drop(file);
            device.detach().unwrap();
        }
    });
}
