//! Commands: submission queue entries.

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

/// Opcodes of admin commands (Base, Figure 138 "Opcodes for Admin Commands").
pub mod admin {
    /// Reads a log page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Reads properties of the controller or of a namespace.
    pub const IDENTIFY: u8 = 0x06;
    /// Aborts another command.
    pub const ABORT: u8 = 0x08;
    /// Changes a feature.
    pub const SET_FEATURES: u8 = 0x09;
    /// Reads a feature.
    pub const GET_FEATURES: u8 = 0x0A;
    /// Completes when an event occurs.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0C;
    /// Resets the keep alive timer.
    pub const KEEP_ALIVE: u8 = 0x18;
    /// Ours: names the owner of the pages in the namespace (see
    /// [`Introduction`](super::super::introduction::Introduction)).
    // Vendor specific opcodes start at C0h; the two low bits give the direction of the data.
    pub const INTRODUCE: u8 = 0xC1;
    /// Ours: reads the reason, as text, why the last introduction was refused.
    pub const REFUSAL: u8 = 0xC2;
}

/// Opcodes of I/O commands (NVM, Figure 18 "Opcodes for NVM Commands"; Base, Figure 390 "Opcodes
/// for I/O Commands").
pub mod io {
    /// Makes completed writes permanent.
    pub const FLUSH: u8 = 0x00;
    /// Writes blocks.
    pub const WRITE: u8 = 0x01;
    /// Reads blocks.
    pub const READ: u8 = 0x02;
    /// Compares blocks with data.
    pub const COMPARE: u8 = 0x05;
    /// Makes blocks zero.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Announces the use of blocks, or deallocates blocks.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
}

/// The opcode of fabrics commands, on every queue; [`Command::fabrics_type`] returns the type.
pub const FABRICS: u8 = 0x7F;

/// Bits of [`Command::flags`] (Base, Figure 86 "Command Dword 0").
pub mod flag {
    /// The command is half of a fused operation.
    pub const FUSED: u8 = 0b11;
    /// An SGL describes the data, as always on fabrics.
    pub const SGL: u8 = 1 << 6;
}

/// Bits of dword 12 of Read, Write, Compare and Write Zeroes (NVM, Figures 48, 63, 23, 73).
pub mod control {
    /// For Write Zeroes: the controller should deallocate the blocks.
    pub const DEALLOCATE: u32 = 1 << 25;
    /// Protection information, which our namespaces lack.
    pub const PROTECTION: u32 = 0b1111 << 26;
    /// Force unit access: the data must be permanent at completion.
    pub const FUA: u32 = 1 << 30;
    /// The controller should limit its retries.
    pub const LIMITED_RETRY: u32 = 1 << 31;
}

/// Dword 11 of Dataset Management: deallocate the ranges (NVM, Figure 40).
pub const DSM_DEALLOCATE: u32 = 1 << 2;
/// The most ranges of one Dataset Management command.
pub const DSM_RANGES: usize = 256;

/// SGL descriptor types with their subtypes (Base, section 4.1.2 "Scatter Gather List").
pub mod sgl {
    /// Data Block with an offset: the data is in the capsule.
    pub const IN_CAPSULE: u8 = 0x01;
    /// Transport Data Block: the data travels in PDUs of its own, or there is none.
    pub const TRANSPORT: u8 = 0x5A;
}

layout!(
    /// The place of a command's data (Base, section 4.1.2 "Scatter Gather List"; TCP, Figure 14).
    Sgl, 16 {
        /// For data in the capsule: the offset behind the command, always 0 here. Else 0.
        address: U64,
        /// Length of the data, in bytes.
        length: U32,
        /// Zero.
        reserved: [u8; 3],
        /// The descriptor type, see [`sgl`].
        kind: u8,
    }
);
layout!(
    /// A command (Base, Figure 87 "Common Command Format"; fabrics commands: Figure 80).
    Command, 64 {
        /// The opcode, see [`admin`], [`io`] and [`FABRICS`].
        opcode: u8,
        /// Flags, see [`flag`].
        flags: u8,
        /// Chosen by the host, unique among the queue's commands in flight; copied into the
        /// completion.
        id: U16,
        /// The namespace. In fabrics commands, the first byte is the type.
        nsid: U32,
        /// Dwords 2 and 3.
        dword2: [U32; 2],
        /// Not used: there is no metadata.
        metadata: U64,
        /// The place of the data.
        sgl: Sgl,
        /// Dwords 10 to 15, which depend on the opcode.
        dword10: [U32; 6],
    }
);
layout!(
    /// One range of a Dataset Management command (NVM, Figure 41 "Range Definition").
    DsmRange, 16 {
        /// Context attributes: hints on the use of the blocks.
        attributes: U32,
        /// The number of blocks.
        blocks: U32,
        /// The first block.
        start: U64,
    }
);

impl Sgl {
    /// Describes no data.
    pub const NONE: Self = Self::transport(0);

    /// Describes `length` bytes in the same capsule.
    pub const fn in_capsule(length: u32) -> Self {
        Self {
            address: U64::ZERO,
            length: U32::new(length),
            reserved: [0; 3],
            kind: sgl::IN_CAPSULE,
        }
    }

    /// Describes `length` bytes that are sent or received in data PDUs.
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
    /// Makes a command with dwords 10 to 15 zero.
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

    /// Sets dword `number`, which must be 10 to 15.
    #[must_use]
    pub fn with(mut self, number: usize, value: u32) -> Self {
        self.dword10[number - 10] = value.into();
        self
    }

    /// Sets a range of `blocks`, 1 to 65536, from `start` on: for Read, Write, Compare and Write
    /// Zeroes.
    #[must_use]
    pub fn with_blocks(self, start: u64, blocks: u32) -> Self {
        self.with(10, start as u32).with(11, (start >> 32) as u32).with(12, blocks - 1)
    }

    /// Returns dword `number`, which must be 10 to 15.
    pub fn dword(&self, number: usize) -> u32 {
        self.dword10[number - 10].get()
    }

    /// Returns the first block of Read, Write, Compare or Write Zeroes.
    pub fn start_block(&self) -> u64 {
        u64::from(self.dword(10)) | u64::from(self.dword(11)) << 32
    }

    /// Returns the number of blocks of Read, Write, Compare or Write Zeroes, 1 to 65536.
    pub fn blocks(&self) -> u32 {
        (self.dword(12) & 0xFFFF) + 1
    }

    /// Returns the type of a fabrics command, see [`fabrics::kind`](super::fabrics::kind).
    pub fn fabrics_type(&self) -> u8 {
        self.nsid.get() as u8
    }
}
