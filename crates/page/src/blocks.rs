//! Byte ranges cut into blocks, for storage that reads and writes only whole blocks.

/// A part of a range: some whole blocks, or a part of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The part's offset in its first block, in bytes.
    pub start: usize,
    /// The part's length in bytes.
    pub length: usize,
    /// Whether the part is of whole blocks.
    pub is_whole: bool,
}

/// Cuts a range at its first and last block if it covers those only partly. Calls `what` with the
/// offset of each part's first block and the part, in order.
///
/// # Errors
/// The first error of `what`, which is then called no more.
pub fn in_blocks<E>(
    offset: u64,
    length: u64,
    block: u64,
    mut what: impl FnMut(u64, Part) -> Result<(), E>,
) -> Result<(), E> {
    let (mut at, end) = (offset, offset + length);
    while at < end {
        let start = at % block;
        let length = if start == 0 && end - at >= block {
            (end - at) / block * block
        } else {
            (block - start).min(end - at)
        };
        let is_whole = start == 0 && length >= block;
        what(at - start, Part { start: start as usize, length: length as usize, is_whole })?;
        at += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_where_they_have_a_part_of_a_block() {
        let cut = |offset, length| {
            let mut parts = Vec::new();
            in_blocks::<()>(offset, length, 100, |at, part| {
                parts.push((at, part.start, part.length, part.is_whole));
                Ok(())
            })
            .map(|()| parts)
        };
        assert_eq!(cut(0, 0), Ok(vec![]));
        assert_eq!(cut(200, 300), Ok(vec![(200, 0, 300, true)]));
        assert_eq!(cut(210, 20), Ok(vec![(200, 10, 20, false)]));
        assert_eq!(cut(200, 20), Ok(vec![(200, 0, 20, false)]));
        assert_eq!(
            cut(290, 220),
            Ok(vec![(200, 90, 10, false), (300, 0, 200, true), (500, 0, 10, false)])
        );
        assert_eq!(cut(290, 20), Ok(vec![(200, 90, 10, false), (300, 0, 10, false)]));
    }
}
