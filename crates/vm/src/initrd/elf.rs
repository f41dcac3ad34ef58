//! The parts of a program file that a copy needs (System V ABI, "Object Files" and "Program
//! Loading"; 64 bits, little-endian).

use std::ops::Range;

const INTERPRETER: u32 = 3;
const EXECUTABLE: u16 = 2;
const SHARED: u16 = 3;

/// The headers of a program or a library.
#[derive(Debug)]
pub(super) struct Headers<'a> {
    content: &'a [u8],
    segments: Vec<(u32, Range<usize>)>,
}

fn number<const N: usize>(content: &[u8], at: usize) -> Option<u64> {
    let bytes: [u8; N] = content.get(at..at.checked_add(N)?)?.try_into().ok()?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

impl<'a> Headers<'a> {
    /// Parses a file's headers; returns `None` if it is not a 64-bit, little-endian ELF file.
    pub(super) fn of(content: &'a [u8]) -> Option<Self> {
        if !content.starts_with(b"\x7fELF\x02\x01")
            || ![EXECUTABLE, SHARED].contains(&kind(content)?)
        {
            return None;
        }
        let first = number::<8>(content, 0x20)? as usize;
        let [size, count] = [0x36, 0x38].map(|at| number::<2>(content, at));
        let (size, count) = (size? as usize, count? as usize);
        let segment = |index: usize| {
            let at = first.checked_add(index * size)?;
            let start = number::<8>(content, at + 8)? as usize;
            let length = number::<8>(content, at + 0x20)? as usize;
            let range = start..start.checked_add(length)?;
            (range.end <= content.len()).then_some((number::<4>(content, at)? as u32, range))
        };
        let segments = (0..count).map(segment).collect::<Option<_>>()?;
        Some(Self { content, segments })
    }

    /// Returns the path of the loader that the program names.
    pub(super) fn interpreter(&self) -> Option<&'a str> {
        let (_, range) = self.segments.iter().find(|(kind, _)| *kind == INTERPRETER)?;
        std::str::from_utf8(&self.content[range.clone()])
            .ok()
            .map(|path| path.trim_end_matches('\0'))
    }

    /// Returns whether the file can be loaded at any address, as libraries can.
    pub(super) fn is_shared(&self) -> bool {
        kind(self.content) == Some(SHARED)
    }

    /// Returns the file without its sections, which lie behind the segments: loaders read segments
    /// only.
    pub(super) fn lean(&self) -> Vec<u8> {
        let end =
            self.segments.iter().map(|(_, range)| range.end).max().unwrap_or_default().max(0x40);
        let mut lean = self.content[..end.min(self.content.len())].to_vec();
        // `e_shoff`, then `e_shnum` and `e_shstrndx`: the copy has no section headers.
        lean[0x28..0x30].fill(0);
        lean[0x3c..0x40].fill(0);
        lean
    }
}

fn kind(content: &[u8]) -> Option<u16> {
    number::<2>(content, 0x10).map(|kind| kind as u16)
}
