//! A holder that encrypts pages, and believes only the version of a page that it stored last.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use aquifer_page::blocks::in_blocks;
use aquifer_page::{PAGE_SIZE, WorkerId};

use super::{Holder, HolderError, Piece, PieceMut};
use crate::encryption::PageCipher;
use crate::lock_any;
use crate::tags::{Claim, OF_ZEROES, Tags, checksum};

/// Pages that a worker encrypts at a time.
pub(super) const BATCH: usize = 64;

/// Pages that a worker writes at a time without encryption.
const PLAIN: usize = 512;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages as they go to a lender, and their tags.
#[derive(Clone, Copy)]
pub(crate) struct Sealed<'a> {
    pieces: &'a [Piece<'a>],
    tags: &'a [u64],
}

/// Encrypts pages on write, decrypts them on read, and compares the tags of what it reads. Without
/// a cipher, it compares checksums. To write a part of a page, it reads the whole page, changes it
/// and writes it back.
pub(crate) struct VerifiedHolder {
    holder: Box<dyn Holder>,
    cipher: Option<PageCipher>,
    tags: Arc<Tags>,
    /// Buffers in which workers encrypt.
    rooms: Box<[Mutex<Box<[u8]>>]>,
}

/// Returns whether the range consists of whole pages.
pub(super) fn is_whole(offset: u64, length: usize) -> bool {
    (offset | length as u64).is_multiple_of(PAGE)
}

/// Returns the pages of a range of whole pages.
fn pages(offset: u64, length: u64) -> std::ops::Range<u64> {
    offset / PAGE..(offset + length) / PAGE
}

impl VerifiedHolder {
    pub(crate) fn new(
        holder: Box<dyn Holder>,
        cipher: Option<PageCipher>,
        tags: Arc<Tags>,
        workers: usize,
    ) -> Self {
        // Not zero, so that the kernel provides the memory now and not when memory is short.
        let room = || Mutex::new(vec![1; BATCH * PAGE_SIZE].into());
        Self { holder, cipher, tags, rooms: (0..workers.max(1)).map(|_| room()).collect() }
    }

    fn room(&self, worker: WorkerId) -> MutexGuard<'_, Box<[u8]>> {
        lock_any(&self.rooms, worker)
    }

    /// Writes runs, as [`Holder::write_many`] does. May call `meanwhile`, once or more, with what
    /// it writes, while the lender works.
    pub(crate) fn write_while(
        &self,
        worker: WorkerId,
        pieces: &[Piece<'_>],
        meanwhile: &mut dyn FnMut(Sealed<'_>),
    ) -> Result<(), HolderError> {
        let fits = |&(offset, data): &Piece<'_>| {
            is_whole(offset, data.len()) && data.len() <= BATCH * PAGE_SIZE
        };
        // A page that is there twice would wait for itself.
        let ascends = |one: &Piece<'_>, next: &Piece<'_>| one.0 + one.1.len() as u64 <= next.0;
        if !pieces.iter().all(fits) || !pieces.is_sorted_by(ascends) {
            return pieces.iter().try_for_each(|(offset, data)| self.write(worker, *offset, data));
        }
        let mut room = self.room(worker);
        let mut rest = pieces;
        while !rest.is_empty() {
            let mut left = &mut room[..];
            let mut encrypted: [Piece<'_>; BATCH] = [(0, &[]); BATCH];
            let mut claims: [Option<Claim<'_>>; BATCH] = [const { None }; BATCH];
            let mut tags = [OF_ZEROES; BATCH];
            let (mut count, mut sealed) = (0, 0);
            while count < BATCH
                && let Some((&(offset, data), others)) = rest.split_first()
                && data.len() <= left.len()
            {
                let (now, later) = left.split_at_mut(data.len());
                claims[count] = Some(self.tags.claim(pages(offset, data.len() as u64)));
                let tags = &mut tags[sealed..];
                encrypted[count] = (offset, self.seal_copy(offset, data, now, tags));
                sealed += data.len() / PAGE_SIZE;
                count += 1;
                (left, rest) = (later, others);
            }
            let pieces = &encrypted[..count];
            let of_pieces = &tags[..sealed];
            self.holder.write_while(worker, pieces, of_pieces, &mut || {
                meanwhile(Sealed { pieces, tags: of_pieces });
            })?;
            let mut tags = tags.into_iter();
            for claim in claims.into_iter().flatten() {
                claim.done(|_| tags.next().unwrap_or(OF_ZEROES));
            }
        }
        Ok(())
    }

    /// Writes what another holder with the same cipher has sealed.
    pub(crate) fn write_sealed(
        &self,
        worker: WorkerId,
        sealed: Sealed<'_>,
    ) -> Result<(), HolderError> {
        let mut claims: [Option<Claim<'_>>; BATCH] = [const { None }; BATCH];
        for (claim, (offset, data)) in claims.iter_mut().zip(sealed.pieces) {
            *claim = Some(self.tags.claim(pages(*offset, data.len() as u64)));
        }
        self.holder.write_tagged(worker, sealed.pieces, sealed.tags)?;
        let mut tags = sealed.tags.iter();
        for claim in claims.into_iter().flatten() {
            claim.done(|_| tags.next().copied().unwrap_or(OF_ZEROES));
        }
        Ok(())
    }

    /// Returns whole pages as they go to a lender, and stores their tags. Encrypts a copy of them,
    /// in `room`, if there is a cipher.
    fn seal_copy<'a>(
        &self,
        offset: u64,
        data: &'a [u8],
        room: &'a mut [u8],
        tags: &mut [u64],
    ) -> &'a [u8] {
        if self.cipher.is_none() {
            tags.iter_mut().zip(data.chunks(PAGE_SIZE)).for_each(|(tag, page)| {
                *tag = checksum(page);
            });
            return data;
        }
        room.copy_from_slice(data);
        self.seal(offset, room, tags);
        room
    }

    /// Encrypts whole pages in place, and stores their tags.
    fn seal(&self, offset: u64, pages: &mut [u8], tags: &mut [u64]) {
        let mut tags = tags.iter_mut();
        let mut made = |tag| tags.next().into_iter().for_each(|place| *place = tag);
        match &self.cipher {
            Some(cipher) => cipher.encrypt(offset, pages, |_, tag| made(tag)),
            None => pages.chunks(PAGE_SIZE).for_each(|page| made(checksum(page))),
        }
    }

    /// Decrypts whole pages in place. Calls `found` with the number of each page and its tag.
    fn unseal(&self, offset: u64, pages: &mut [u8], mut found: impl FnMut(u64, u64)) {
        match &self.cipher {
            Some(cipher) => cipher.decrypt(offset, pages, found),
            None => (offset / PAGE..)
                .zip(pages.chunks(PAGE_SIZE))
                .for_each(|(page, data)| found(page, checksum(data))),
        }
    }

    /// Decrypts whole pages in place, and compares their tags.
    fn open(&self, offset: u64, pages: &mut [u8]) -> Result<(), HolderError> {
        let mut all = Ok(());
        self.unseal(offset, pages, |page, tag| {
            all = all.and_then(|()| self.tags.check(page, tag));
        });
        all.map_err(HolderError::Wrong)
    }

    /// Writes whole pages.
    fn write_pages(&self, worker: WorkerId, offset: u64, data: &[u8]) -> Result<(), HolderError> {
        if self.cipher.is_none() {
            let mut at = offset;
            for data in data.chunks(PLAIN * PAGE_SIZE) {
                let claim = self.tags.claim(pages(at, data.len() as u64));
                let mut tags = [OF_ZEROES; PLAIN];
                tags.iter_mut().zip(data.chunks(PAGE_SIZE)).for_each(|(tag, page)| {
                    *tag = checksum(page);
                });
                self.holder.write_tagged(worker, &[(at, data)], &tags)?;
                claim.done(|page| tags[(page - at / PAGE) as usize]);
                at += data.len() as u64;
            }
            return Ok(());
        }
        let mut room = self.room(worker);
        let mut at = offset;
        for data in data.chunks(room.len()) {
            let encrypted = &mut room[..data.len()];
            encrypted.copy_from_slice(data);
            let claim = self.tags.claim(pages(at, data.len() as u64));
            let mut tags = [OF_ZEROES; BATCH];
            self.seal(at, encrypted, &mut tags);
            self.holder.write_tagged(worker, &[(at, encrypted)], &tags)?;
            claim.done(|page| tags[(page - at / PAGE) as usize]);
            at += data.len() as u64;
        }
        Ok(())
    }

    /// Copies a part of the page at `at`.
    fn read_part(
        &self,
        worker: WorkerId,
        at: u64,
        start: usize,
        into: &mut [u8],
    ) -> Result<(), HolderError> {
        let mut room = self.room(worker);
        let page = &mut room[..PAGE_SIZE];
        self.holder.read(worker, at, page)?;
        self.open(at, page)?;
        into.copy_from_slice(&page[start..][..into.len()]);
        Ok(())
    }

    /// Writes a page of which only a part changes.
    fn change_page(
        &self,
        worker: WorkerId,
        at: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), HolderError> {
        let mut room = self.room(worker);
        let page = &mut room[..PAGE_SIZE];
        let (claim, before) = self.tags.claim_part(at / PAGE);
        let read = self.holder.read(worker, at, page).and_then(|()| {
            let mut compared = Ok(());
            self.unseal(at, page, |_, tag| compared = Tags::compare(before, tag));
            compared.map_err(HolderError::Wrong)
        });
        if let Err(error) = read {
            // The lender still has what it had.
            claim.done(|_| before);
            return Err(error);
        }
        change(page);
        let mut tag = [OF_ZEROES];
        self.seal(at, page, &mut tag);
        self.holder.write_tagged(worker, &[(at, page)], &tag)?;
        claim.done(|_| tag[0]);
        Ok(())
    }
}

impl Holder for VerifiedHolder {
    fn read(&self, worker: WorkerId, offset: u64, into: &mut [u8]) -> Result<(), HolderError> {
        let mut rest = into;
        in_blocks(offset, rest.len() as u64, PAGE, |at, part| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(part.length);
            rest = later;
            if part.is_whole {
                self.holder.read(worker, at, now)?;
                return self.open(at, now);
            }
            self.read_part(worker, at, part.start, now)
        })
    }

    fn read_soon(
        &self,
        worker: WorkerId,
        offset: u64,
        into: &mut [u8],
        soon: Duration,
    ) -> Result<bool, HolderError> {
        if !is_whole(offset, into.len()) {
            return self.read(worker, offset, into).map(|()| true);
        }
        let is_here = self.holder.read_soon(worker, offset, into, soon)?;
        if is_here {
            self.open(offset, into)?;
        }
        Ok(is_here)
    }

    fn read_many(&self, worker: WorkerId, pieces: &mut [PieceMut<'_>]) -> Result<(), HolderError> {
        if !pieces.iter().all(|(offset, into)| is_whole(*offset, into.len())) {
            return pieces
                .iter_mut()
                .try_for_each(|(offset, into)| self.read(worker, *offset, into));
        }
        self.holder.read_many(worker, pieces)?;
        pieces.iter_mut().try_for_each(|(offset, pages)| self.open(*offset, pages))
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
                let claim = self.tags.claim(pages(at, part.length as u64));
                self.holder.discard(worker, at, part.length as u64)?;
                claim.done(|_| OF_ZEROES);
                return Ok(());
            }
            self.change_page(worker, at, |page| page[part.start..][..part.length].fill(0))
        })
    }

    fn flush(&self, worker: WorkerId) -> Result<(), HolderError> {
        self.holder.flush(worker)
    }

    fn write_many(&self, worker: WorkerId, pieces: &[Piece<'_>]) -> Result<(), HolderError> {
        Self::write_while(self, worker, pieces, &mut |_| ())
    }

    fn unreachable_for(&self) -> Option<Duration> {
        self.holder.unreachable_for()
    }

    fn is_lost(&self) -> bool {
        self.holder.is_lost()
    }

    fn set_patience(&self, patience: Option<Duration>) {
        self.holder.set_patience(patience);
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
    use crate::holder::Wrong;
    use crate::lock;

    const SIZE: usize = 200 * PAGE_SIZE;

    /// The memory of a lender that the test can inspect.
    struct Glass(Mutex<Vec<u8>>);

    impl Holder for Arc<Glass> {
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
        for mode in [None, Some(EncryptionMode::Deterministic), Some(EncryptionMode::Random)] {
            let glass = Arc::new(Glass(Mutex::new(vec![0; SIZE])));
            let cipher = mode.map(|mode| {
                PageCipher::new(&Encryption { mode, ..Encryption::random() }, LeaseId(1))
            });
            let is_encrypted = cipher.is_some();
            let tags = Arc::new(Tags::new(SIZE as u64 / PAGE));
            let holder = VerifiedHolder::new(Box::new(glass.clone()), cipher, tags, 2);
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
                assert_eq!(theirs == ours, is_zero || !is_encrypted);
            }
        }
    }

    /// Ways in which a lender can lie about a page.
    const LIES: [fn(&mut [u8]); 4] = [
        |all| all[5 * PAGE_SIZE + 17] ^= 4,
        |all| all[5 * PAGE_SIZE..][..PAGE_SIZE].fill(0),
        |all| all.copy_within(6 * PAGE_SIZE..7 * PAGE_SIZE, 5 * PAGE_SIZE),
        // The version before, which the test puts into page 100 of the lender.
        |all| all.copy_within(100 * PAGE_SIZE..101 * PAGE_SIZE, 5 * PAGE_SIZE),
    ];

    #[test]
    fn no_lie_of_a_lender_is_believed() {
        for mode in [None, Some(EncryptionMode::Deterministic), Some(EncryptionMode::Random)] {
            for (number, lie) in LIES.into_iter().enumerate() {
                let glass = Arc::new(Glass(Mutex::new(vec![0; SIZE])));
                let cipher = mode.map(|mode| {
                    PageCipher::new(&Encryption { mode, ..Encryption::random() }, LeaseId(1))
                });
                let tags = Arc::new(Tags::new(SIZE as u64 / PAGE));
                let holder = VerifiedHolder::new(Box::new(glass.clone()), cipher, tags, 1);
                let write = |page: u64, byte: u8| {
                    holder.write(WorkerId(0), page * PAGE, &[byte; PAGE_SIZE]).unwrap();
                };
                write(5, 1);
                lock(&glass.0).copy_within(5 * PAGE_SIZE..6 * PAGE_SIZE, 100 * PAGE_SIZE);
                write(5, 2);
                write(6, 3);
                lie(&mut lock(&glass.0));
                let mut page = vec![0; 3 * PAGE_SIZE];
                let refused = holder.read(WorkerId(0), 4 * PAGE, &mut page).unwrap_err();
                let expected = if number == 1 { Wrong::Zeroes } else { Wrong::Other };
                assert!(matches!(refused, HolderError::Wrong(wrong) if wrong == expected));
                // Not as a part either, nor under a change of another part.
                assert!(holder.read(WorkerId(0), 5 * PAGE + 512, &mut page[..512]).is_err());
                assert!(holder.write(WorkerId(0), 5 * PAGE, &[9; 512]).is_err());
                assert!(holder.read(WorkerId(0), 5 * PAGE, &mut page[..PAGE_SIZE]).is_err());
                holder.read(WorkerId(0), 6 * PAGE, &mut page[..PAGE_SIZE]).unwrap();
                assert!(page[..PAGE_SIZE] == [3; PAGE_SIZE]);
                write(5, 4);
                holder.read(WorkerId(0), 5 * PAGE, &mut page[..PAGE_SIZE]).unwrap();
                assert!(page[..PAGE_SIZE] == [4; PAGE_SIZE]);
            }
        }
    }

    #[test]
    fn data_in_a_page_that_was_discarded_is_not_believed() {
        let glass = Arc::new(Glass(Mutex::new(vec![0; SIZE])));
        let tags = Arc::new(Tags::new(SIZE as u64 / PAGE));
        let holder = VerifiedHolder::new(Box::new(glass.clone()), None, tags, 1);
        holder.write(WorkerId(0), 0, &[7; 2 * PAGE_SIZE]).unwrap();
        holder.discard(WorkerId(0), 0, PAGE).unwrap();
        lock(&glass.0)[..PAGE_SIZE].fill(7);
        let mut pages = [0; 2 * PAGE_SIZE];
        let refused = holder.read(WorkerId(0), 0, &mut pages).unwrap_err();
        assert!(matches!(refused, HolderError::Wrong(Wrong::Other)), "{refused}");
    }
}
