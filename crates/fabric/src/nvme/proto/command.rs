//! Commands: submission queue entries.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opcodes of admin commands (Base, Figure 138 "Opcodes for Admin Commands").
pub mod admin {
    /// Tells a log page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Tells what there is.
    pub const IDENTIFY: u8 = 0x06;
    /// Ends another command.
    pub const ABORT: u8 = 0x08;
    /// Changes a feature.
    pub const SET_FEATURES: u8 = 0x09;
    /// Tells a feature.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Completes when something happens.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Says that the host is alive.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Ours: says whose pages the namespace holds (see [`Introduction`](super::super::introduction::Introduction)).
    // Vendor specific commands have opcodes from C0h on; the low bits say which way data goes.
    pub const INTRODUCE: u8 = 0xC1;
    /// Ours: tells in words why the last introduction was refused.
    pub const REFUSAL: u8 = 0xC2;
}

/// Opcodes of I/O commands (NVM, Figure 18 "Opcodes for NVM Commands"; Base, Figure 390 "Opcodes for I/O Commands").
pub mod io {
    /// What was written is to be permanent.
    pub const FLUSH: u8 = 0x00;
    /// Writes blocks.
    pub const WRITE: u8 = 0x01;
    /// Reads blocks.
    pub const READ: u8 = 0x02;
    /// Compares blocks with data.
    pub const COMPARE: u8 = 0x05;
    /// Makes blocks zero.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Says what will happen to blocks; with it they are deallocated.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
}

/// The opcode of fabrics commands, on every queue; [`Command::fabrics_type`] says which.
pub const FABRICS: u8 = 0x7F;

/// Bits of [`Command::flags`] (Base, Figure 86 "Command Dword 0").
pub mod flag {
    /// The command is half of a fused operation.
    pub const FUSED: u8 = 0b11;
    /// The data is described by an SGL, as it always is on fabrics.
    pub const SGL: u8 = 1 << 6;
}

/// Bits of dword 12 of Read, Write, Compare and Write Zeroes (NVM, Figures 48, 63, 23, 73).
pub mod control {
    /// Deallocate: of Write Zeroes.
    pub const DEALLOCATE: u32 = 1 << 25;
    /// Protection information, which our namespaces have not.
    pub const PROTECTION: u32 = 0b1111 << 26;
    /// Force unit access.
    pub const FUA: u32 = 1 << 30;
    /// Few retries.
    pub const LIMITED_RETRY: u32 = 1 << 31;
}

/// Dword 11 of Dataset Management: deallocate the ranges (NVM, Figure 40).
pub const DSM_DEALLOCATE: u32 = 1 << 2;
/// The most ranges of a Dataset Management command.
pub const DSM_RANGES: usize = 256;

/// SGL descriptor types with their subtypes (Base, section 4.1.2 "Scatter Gather List").
pub mod sgl {
    /// Data Block with an offset: the data is in the capsule.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Transport Data Block: the data travels in PDUs of its own, or there is none.
    pub const TRANSPORT: u8 = 0x5A;
}

layout!(
    /// Where a command's data is (Base, section 4.1.2 "Scatter Gather List"; TCP, Figure 14).
    Sgl, 16 {
        /// In the capsule: the offset behind the command, always 0 here. Else 0.
        address: U64,
        /// Bytes of data.
        length: U32,
        /// Zero.
        reserved: [u8; 3],
        /// See [`sgl`].
        kind: u8,
    }
);
layout!(
    /// A command (Base, Figure 87 "Common Command Format"; of fabrics commands Figure 80).
    Command, 64 {
        /// See [`admin`], [`io`] and [`FABRICS`].
        opcode: u8,
        /// See [`flag`].
        flags: u8,
        /// Chosen by the host, in its queue unique among what is not completed; copied into the completion.
        id: U16,
        /// The namespace. Of fabrics commands: the first byte is the type.
        nsid: U32,
        /// Dwords 2 and 3.
        dword2: [U32; 2],
        /// Not used: there is no metadata.
        metadata: U64,
        /// The data.
        sgl: Sgl,
        /// Dwords 10 to 15, as the command defines them.
        dword10: [U32; 6],
    }
);
layout!(
    /// One range of a Dataset Management command (NVM, Figure 41 "Range Definition").
    DsmRange, 16 {
        /// Hints.
        attributes: U32,
        /// Blocks.
        blocks: U32,
        /// The first block.
        start: U64,
    }
);

impl Sgl {
    /// No data.
    pub const NONE: Self = Self::transport(0);

    /// So many bytes in the same capsule.
    pub const fn in_capsule(length: u32) -> Self {
        Self {
            address: U64::ZERO,
            length: U32::new(length),
            reserved: [0; 3],
            kind: sgl::IN_CAPSULE,
        }
    }

    /// So many bytes to be sent or received apart.
    pub const fn transport(length: u32) -> Self {
        Self {
            address: U64::ZERO,
            length: U32::new(length),
            reserved: [0; 3],
            kind: sgl::TRANSPORT,
        }
    }
}

impl Command {
    /// A command whose dwords are zero.
    pub fn new(opcode: u8, id: u16, nsid: u32, sgl: Sgl) -> Self {
        Self {
            opcode,
            flags: flag::SGL,
            id: id.into(),
            nsid: nsid.into(),
            dword2: [U32::ZERO; 2],
            metadata: U64::ZERO,
            sgl,
            dword10: [U32::ZERO; 6],
        }
    }

    /// With dword `number`, 10 to 15, set.
    #[must_use]
    pub fn with(mut self, number: usize, value: u32) -> Self {
        self.dword10[number - 10] = value.into();
        self
    }

    /// With a range of `blocks`, 1 to 65536, from `start` on: of Read, Write, Compare and Write Zeroes.
    #[must_use]
    pub fn with_blocks(self, start: u64, blocks: u32) -> Self {
        self.with(10, start as u32).with(11, (start >> 32) as u32).with(12, blocks - 1)
    }

    /// Dword `number`, 10 to 15.
    pub fn dword(&self, number: usize) -> u32 {
        self.dword10[number - 10].get()
    }

    /// The first block of Read, Write, Compare and Write Zeroes.
    pub fn start_block(&self) -> u64 {
        u64::from(self.dword(10)) | u64::from(self.dword(11)) << 32
    }

    /// The number of blocks of Read, Write, Compare and Write Zeroes, 1 to 65536.
    pub fn blocks(&self) -> u32 {
        (self.dword(12) & 0xFFFF) + 1
    }

    /// What fabrics command this is, see [`fabrics::kind`](super::fabrics::kind).
    pub fn fabrics_type(&self) -> u8 {
        self.nsid.get() as u8
    }
}
