//! A lender that is always there, and always right.

use std::collections::BTreeMap;
use std::sync::Mutex;

use aquifer_page::{PAGE_SIZE, WorkerId};
use aquifer_volume::holder::{Holder, HolderError};

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages by number.
#[derive(Debug, Default)]
pub struct Memory(BTreeMap<u64, Vec<u8>>);

impl Memory {
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        for (page, into) in (offset / PAGE..).zip(into.chunks_mut(PAGE_SIZE)) {
            match self.0.get(&page) {
                Some(data) => into.copy_from_slice(&data[..into.len()]),
                None => into.fill(0),
            }
        }
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        for (page, data) in (offset / PAGE..).zip(data.chunks_exact(PAGE_SIZE)) {
            self.0.insert(page, data.to_vec());
        }
    }

    pub fn discard(&mut self, offset: u64, length: u64) {
        self.0.retain(|page, _| !(offset..offset + length).contains(&(page * PAGE)));
    }
}

#[derive(Debug, Default)]
pub struct Honest(Mutex<Memory>);

impl Holder for Honest {
    fn read(&self, _: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        self.0.lock().unwrap().read(offset, into);
        Ok(())
    }

    fn write(&self, _: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        self.0.lock().unwrap().write(offset, data);
        Ok(())
    }

    fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        self.0.lock().unwrap().discard(offset, length);
        Ok(())
    }

    fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
        Ok(())
    }
}
