//! Many operations of a connection at once, by any protocol.

use aquifer_transport::initiator::Operation;

pub fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 7 + (at >> 8)) as u8 | 1).collect()
}

/// Runs many writes in one batch from `base` on, with gaps between them, then as many reads.
///
/// Returns the content of the first page.
pub fn many_in_flight(base: u64, mut run: impl FnMut(&mut [Operation<'_>])) -> Vec<u8> {
    let mut data = pattern(300 * 8192, 2);
    let places = || (base..).step_by(12_288);
    let pieces = data.chunks(8192).zip(places());
    let mut writes: Vec<_> =
        pieces.map(|(from, offset)| Operation::Write { offset, from }).collect();
    writes.push(Operation::Flush);
    writes.push(Operation::Write { offset: 0, from: &[] });
    run(&mut writes);
    let mut back = vec![0; data.len()];
    let pieces = back.chunks_mut(8192).zip(places());
    let mut reads: Vec<_> = pieces.map(|(into, offset)| Operation::Read { offset, into }).collect();
    run(&mut reads);
    assert!(back == data);
    data.truncate(4096);
    data
}
