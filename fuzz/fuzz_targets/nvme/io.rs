//! Steps of a broken host on an I/O queue.

use aquifer_fuzz::Number;
use aquifer_nvme::proto::Command;
use aquifer_nvme::proto::command::{DsmRange, FABRICS, Sgl, io};
use aquifer_nvme::proto::fabrics::kind;
use aquifer_page::PAGE_SIZE;
use arbitrary::Arbitrary;
use zerocopy::IntoBytes;

use crate::admin::{Nsid, with_all};
use crate::script::{Place, Script, ic_req};

#[derive(Arbitrary, Debug)]
pub enum Step<'a> {
    Read {
        start: Number,
        blocks: Count,
        place: Place,
    },
    Write {
        start: Number,
        blocks: Count,
        place: Place,
        fill: u8,
    },
    Compare {
        start: Number,
        blocks: Count,
        place: Place,
        fill: u8,
    },
    WriteZeroes {
        start: Number,
        blocks: Count,
        flags: u8,
    },
    Deallocate {
        ranges: Vec<(Number, Number)>,
        count: Option<u8>,
        place: Place,
    },
    Flush {
        nsid: Nsid,
    },
    Disconnect {
        format: u8,
    },
    /// Sends data that the target requests by R2T.
    Answer {
        which: u8,
        piece: Number,
        fill: u8,
    },
    Data {
        command: u8,
        tag: u8,
        offset: Number,
        data: &'a [u8],
        last: bool,
    },
    Any {
        opcode: u8,
        flags: u8,
        nsid: Nsid,
        dwords: [u32; 6],
        place: Place,
        data: &'a [u8],
    },
    Begin {
        digests: u8,
        alignment: u8,
    },
    Terminate(&'a [u8]),
    Bytes(&'a [u8]),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Count {
    Few(u8),
    Some(u8),
    Many(u16),
}

impl Count {
    fn number(self) -> u32 {
        1 + match self {
            Self::Few(few) => u32::from(few % 16),
            Self::Some(some) => some.into(),
            Self::Many(many) => many.into(),
        }
    }
}

impl Step<'_> {
    pub fn put(&self, script: &mut Script) {
        let id = script.id();
        match *self {
            Self::Read { start, blocks, place } => {
                let length = blocks.number() as usize * PAGE_SIZE;
                let place = if matches!(place, Place::Capsule) { Place::Apart } else { place };
                let command = Command::new(io::READ, id, 1, place.sgl(length));
                let command = command.with_blocks(start.blocks(), blocks.number());
                script.command(&command, Place::Apart, &[]);
            }
            Self::Write { start, blocks, place, fill } => {
                moved(
                    script,
                    Command::new(io::WRITE, id, 1, Sgl::NONE),
                    start,
                    blocks,
                    place,
                    fill,
                );
            }
            Self::Compare { start, blocks, place, fill } => {
                moved(
                    script,
                    Command::new(io::COMPARE, id, 1, Sgl::NONE),
                    start,
                    blocks,
                    place,
                    fill,
                );
            }
            Self::WriteZeroes { start, blocks, flags } => {
                let command = Command::new(io::WRITE_ZEROES, id, 1, Sgl::NONE);
                let mut command = command.with_blocks(start.blocks(), blocks.number());
                command.dword10[2] = (command.dword(12) | u32::from(flags) << 24).into();
                script.command(&command, Place::Apart, &[]);
            }
            Self::Deallocate { ref ranges, count, place } => {
                let range = |&(start, blocks): &(Number, Number)| DsmRange {
                    attributes: 0.into(),
                    blocks: (blocks.blocks() as u32).into(),
                    start: start.blocks().into(),
                };
                let ranges: Vec<_> = ranges.iter().map(range).collect();
                let data = ranges.as_bytes();
                let count = count.map_or(ranges.len().saturating_sub(1) as u32, u32::from);
                let command = Command::new(io::DATASET_MANAGEMENT, id, 1, place.sgl(data.len()));
                script.command_with_data(&command.with(10, count).with(11, 4), place, data);
            }
            Self::Flush { nsid } => {
                script.command(
                    &Command::new(io::FLUSH, id, nsid.number(), Sgl::NONE),
                    Place::Apart,
                    &[],
                );
            }
            Self::Disconnect { format } => {
                let command = Command::new(FABRICS, id, kind::DISCONNECT.into(), Sgl::NONE);
                script.command(&command.with(10, format.into()), Place::Apart, &[]);
            }
            Self::Answer { which, piece, fill } => {
                script.answer(which, piece.bytes() as usize, fill)
            }
            Self::Data { command, tag, offset, data, last } => {
                script.data(
                    100 + u16::from(command),
                    tag.into(),
                    offset.bytes() as u32,
                    data,
                    last,
                );
            }
            Self::Any { opcode, flags, nsid, dwords, place, data } => {
                let mut command = Command::new(opcode, id, nsid.number(), place.sgl(data.len()));
                command.flags ^= flags;
                script.command(&with_all(command, dwords), place, data);
            }
            Self::Begin { digests, alignment } => script.messages.push(ic_req(digests, alignment)),
            Self::Terminate(offence) => script.terminate(offence),
            Self::Bytes(bytes) => script.messages.push(bytes.to_vec()),
        }
    }
}

/// Puts a command with the data of whole blocks.
fn moved(
    script: &mut Script,
    command: Command,
    start: Number,
    blocks: Count,
    place: Place,
    fill: u8,
) {
    let data = vec![fill; (blocks.number() as usize).min(256) * PAGE_SIZE];
    let mut command = command.with_blocks(start.blocks(), blocks.number());
    command.sgl = place.sgl(data.len());
    script.command_with_data(&command, place, &data);
}
