//! A holder that passes only encrypted pages on.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use aquifer_page::blocks::in_blocks;
use aquifer_page::{PAGE_SIZE, WorkerId};

use super::{Holder, HolderError, Piece, PieceMut};
use crate::encryption::PageCipher;
use crate::{lock, lock_any};

/// Pages that a worker encrypts at a time.
const BATCH: usize = 64;

const PAGE: u64 = PAGE_SIZE as u64;

/// Locks for writes of partial pages, which lets some proceed in parallel.
const PARTS: usize = 16;

/// Encrypts pages on write and decrypts them on read. To write a part of a page, one worker at a
/// time reads the whole page, changes it and writes it back.
pub(crate) struct EncryptedHolder<H> {
    holder: H,
    cipher: PageCipher,
    /// Buffers in which workers encrypt.
    rooms: Box<[Mutex<Box<[u8]>>]>,
    /// Held during a write of a partial page. The page's number selects the lock.
    parts: [Mutex<()>; PARTS],
}

/// Returns whether the range consists of whole pages.
fn is_whole(offset: u64, length: usize) -> bool {
    (offset | length as u64).is_multiple_of(PAGE)
}

impl<H: Holder> EncryptedHolder<H> {
    pub(crate) fn new(holder: H, cipher: PageCipher, workers: usize) -> Self {
        // Not zero, so that the kernel provides the memory now and not when memory is short.
        let room = || Mutex::new(vec![1; BATCH * PAGE_SIZE].into());
        Self {
            holder,
            cipher,
            rooms: (0..workers.max(1)).map(|_| room()).collect(),
            parts: Default::default(),
        }
    }

    fn room(&self, worker: WorkerId) -> MutexGuard<'_, Box<[u8]>> {
        lock_any(&self.rooms, worker)
    }

    /// Writes whole pages.
    fn write_pages(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        let mut room = self.room(worker);
        let mut at = offset;
        for pages in data.chunks(room.len()) {
            let encrypted = &mut room[..pages.len()];
            encrypted.copy_from_slice(pages);
            self.cipher.encrypt(at, encrypted);
            self.holder.write(worker, at, encrypted)?;
            at += pages.len() as u64;
        }
        Ok(())
    }

    /// Reads and decrypts the page at `at` into the worker's buffer, and calls `what` with it.
    fn with_page<T>(
        &self,
        worker: WorkerId,
        at: u64,
        what: impl FnOnce(&mut [u8]) -> Result<T, HolderError>,
    ) -> Result<T, HolderError> {
        let mut room = self.room(worker);
        let page = &mut room[..PAGE_SIZE];
        self.holder.read(worker, at, page)?;
        self.cipher.decrypt(at, page);
        what(page)
    }

    /// Writes a page of which only a part changes.
    fn change_page(
        &self,
        worker: WorkerId,
        at: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), HolderError> {
        let _alone = lock(&self.parts[(at / PAGE) as usize % PARTS]);
        self.with_page(worker, at, |page| {
            change(page);
            self.cipher.encrypt(at, page);
            self.holder.write(worker, at, page)
        })
    }
}

impl<H: Holder> Holder for EncryptedHolder<H> {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let mut rest = into;
        in_blocks(offset, rest.len() as u64, PAGE, |at, part| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(part.length);
            rest = later;
            if part.is_whole {
                self.holder.read(worker, at, now)?;
                self.cipher.decrypt(at, now);
                return Ok(());
            }
            self.with_page(worker, at, |page| {
                now.copy_from_slice(&page[part.start..][..part.length]);
                Ok(())
            })
        })
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        if !pieces.iter().all(|(offset, into)| is_whole(*offset, into.len())) {
            return pieces
                .iter_mut()
                .try_for_each(|(offset, into)| self.read(worker, *offset, into));
        }
        self.holder.read_many(worker, pieces)?;
        pieces.iter_mut().for_each(|(offset, pages)| self.cipher.decrypt(*offset, pages));
        Ok(())
    }

    fn write(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        let mut rest = data;
        in_blocks(offset, rest.len() as u64, PAGE, |at, part| {
            let (now, later) = rest.split_at(part.length);
            rest = later;
            if part.is_whole {
                return self.write_pages(worker, at, now);
            }
            self.change_page(worker, at, |page| {
                page[part.start..][..part.length].copy_from_slice(now)
            })
        })
    }

    fn discard(&self, worker: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
        in_blocks(offset, length, PAGE, |at, part| {
            if part.is_whole {
                return self.holder.discard(worker, at, part.length as u64);
            }
            self.change_page(worker, at, |page| page[part.start..][..part.length].fill(0))
        })
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.holder.flush(worker)
    }

    fn write_many(&self, worker: WorkerId, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        let fits = |&(offset, data): &Piece<'_>| {
            is_whole(offset, data.len()) && data.len() <= BATCH * PAGE_SIZE
        };
        if !pieces.iter().all(fits) {
            return pieces.iter().try_for_each(|(offset, data)| self.write(worker, *offset, data));
        }
        let mut room = self.room(worker);
        let mut rest = pieces;
        while !rest.is_empty() {
            let mut left = &mut room[..];
            let mut encrypted: [Piece<'_>; BATCH] = [(0, &[]); BATCH];
            let mut count = 0;
            while count < BATCH
                && let Some((&(offset, data), others)) = rest.split_first()
                && data.len() <= left.len()
            {
                let (now, later) = left.split_at_mut(data.len());
                now.copy_from_slice(data);
                self.cipher.encrypt(offset, now);
                encrypted[count] = (offset, &*now);
                count += 1;
                (left, rest) = (later, others);
            }
            self.holder.write_many(worker, &encrypted[..count])?;
        }
        Ok(())
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.holder.unreachable_for()
    }

    fn is_lost(&self) -> bool {
        self.holder.is_lost()
    }

    fn probe(&self) {
        self.holder.probe();
    }

    fn end_older(&self) {
        self.holder.end_older();
    }

    fn close(&self) {
        self.holder.close();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_page::LeaseId;

    use super::*;
    use crate::encryption::{Encryption, EncryptionMode};

    const SIZE: usize = 200 * PAGE_SIZE;

    /// The memory of a lender that the test can inspect.
    struct Glass(Mutex<Vec<u8>>);

    impl Holder for &Glass {
        fn read(&self, _: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
            into.copy_from_slice(&lock(&self.0)[offset as usize..][..into.len()]);
            Ok(())
        }

        fn write(&self, _: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
            lock(&self.0)[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }

        fn discard(&self, _: WorkerId, offset: u64, length: u64) -> Result<(), HolderError> {
            lock(&self.0)[offset as usize..][..length as usize].fill(0);
            Ok(())
        }

        fn flush(&self, _: WorkerId) -> Result<(), HolderError> {
            Ok(())
        }
    }

    #[test]
    fn ranges_read_back_as_written_and_the_holder_sees_ciphertext() {
        for mode in [EncryptionMode::Deterministic, EncryptionMode::Random] {
            let glass = Glass(Mutex::new(vec![0; SIZE]));
            let cipher = PageCipher::new(&Encryption { mode, ..Encryption::random() }, LeaseId(1));
            let holder = EncryptedHolder::new(&glass, cipher, 2);
            let mut model = vec![0_u8; SIZE];
            let mut state = 7_u64;
            let mut next = |below: usize| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            for turn in 0..600 {
                let align = [1, 512, PAGE_SIZE][turn % 3];
                let length = next(90 * PAGE_SIZE) / align * align;
                let offset = next(SIZE - length) / align * align;
                let bytes = &mut model[offset..][..length];
                match next(4) {
                    0 => {
                        bytes.fill(0);
                        holder.discard(WorkerId(turn), offset as u64, length as u64).unwrap();
                    }
                    1 => {
                        bytes.fill(turn as u8 | 1);
                        let pieces: Vec<_> = bytes
                            .chunks(3 * PAGE_SIZE)
                            .scan(offset, |at, piece| {
                                let here = *at as u64;
                                *at += piece.len();
                                Some((here, piece))
                            })
                            .collect();
                        holder.write_many(WorkerId(turn), &pieces).unwrap();
                    }
                    _ => {
                        bytes.iter_mut().for_each(|byte| *byte = next(255) as u8 + 1);
                        holder.write(WorkerId(turn), offset as u64, bytes).unwrap();
                    }
                }
                let mut back = vec![0; length];
                holder.read(WorkerId(turn), offset as u64, &mut back).unwrap();
                assert!(back == model[offset..][..length], "turn {turn}");
                back.fill(0);
                let offsets = (offset as u64..).step_by(3 * PAGE_SIZE);
                let mut pieces: Vec<_> = offsets.zip(back.chunks_mut(3 * PAGE_SIZE)).collect();
                holder.read_many(WorkerId(turn), &mut pieces).unwrap();
                assert!(back == model[offset..][..length], "turn {turn}, many reads");
            }
            let mut all = vec![0; SIZE];
            holder.read(WorkerId(0), 0, &mut all).unwrap();
            assert!(all == model);
            let seen = lock(&glass.0);
            for (theirs, ours) in seen.chunks(PAGE_SIZE).zip(model.chunks(PAGE_SIZE)) {
                let is_zero = ours.iter().all(|byte| *byte == 0);
                assert_eq!(theirs == ours, is_zero);
            }
        }
    }
}
