//! Log pages.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::NQN_FIELD;

/// Log page identifiers (Base, Figure 202 "Log Page Identifiers").
pub mod page {
    /// The log pages there are: 256 dwords, bit 0 set for those.
    pub const SUPPORTED: u8 = 0x00;
    /// [`ErrorEntry`](super::ErrorEntry)s, the newest first.
    pub const ERROR: u8 = 0x01;
    /// [`Smart`](super::Smart).
    pub const SMART: u8 = 0x02;
    /// [`FirmwareSlots`](super::FirmwareSlots).
    pub const FIRMWARE_SLOTS: u8 = 0x03;
    /// Identifiers of changed namespaces, as dwords.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// [`Effects`](super::Effects).
    pub const EFFECTS: u8 = 0x05;
    /// A [`DiscoveryHeader`](super::DiscoveryHeader) and [`DiscoveryEntry`](super::DiscoveryEntry)s.
    pub const DISCOVERY: u8 = 0x70;
}

/// Bit 15 of Get Log Page's dword 10: the event that told of the page stays.
pub const RETAIN_EVENT: u32 = 1 << 15;
/// Identifiers in the log of changed namespaces; the first is 0xFFFFFFFF if there were more.
pub const CHANGED_NAMESPACES: usize = 1024;

/// What Get Log Page asks for (Base, Figures 197 to 201).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// See [`page`].
    pub page: u8,
    /// Bytes wanted.
    pub length: u64,
    /// First byte wanted.
    pub offset: u64,
    /// The event that told of the page stays.
    pub retain: bool,
}

impl Request {
    /// Reads it.
    pub fn of(command: &super::Command) -> Self {
        let dword = |number| u64::from(command.dword(number));
        let dwords = (dword(10) >> 16 | (dword(11) & 0xFFFF) << 16) + 1;
        Self {
            page: command.dword(10) as u8,
            length: dwords * 4,
            offset: dword(12) | dword(13) << 32,
            retain: command.dword(10) & RETAIN_EVENT != 0,
        }
    }

    /// Writes it. The length must be a multiple of 4, and not 0.
    pub fn put(self, command: super::Command) -> super::Command {
        let dwords = self.length / 4 - 1;
        let retain = if self.retain { RETAIN_EVENT } else { 0 };
        command
            .with(10, u32::from(self.page) | retain | (dwords as u32) << 16)
            .with(11, (dwords >> 16) as u32 & 0xFFFF)
            .with(12, self.offset as u32)
            .with(13, (self.offset >> 32) as u32)
    }
}

layout!(
    /// An error (Base, Figure 206 "Error Information Log Entry").
    ErrorEntry, 64 {
        /// Counts errors; 0 in an entry that is not used.
        count: U64,
        /// The queue.
        queue: U16,
        /// The command.
        command_id: U16,
        /// The completion's status field.
        status: U16,
        /// Where in the command.
        location: U16,
        /// The first block with the error.
        block: U64,
        /// The namespace.
        nsid: U32,
        /// Zero.
        reserved: [u8; 36],
    }
);
layout!(
    /// Health (Base, Figure 207 "SMART / Health Information Log Page").
    Smart, 512 {
        /// Bits of critical warnings.
        warning: u8,
        /// In Kelvin.
        temperature: U16,
        /// Percent.
        spare: u8,
        /// Percent below which there is a warning.
        spare_threshold: u8,
        /// Percent.
        used: u8,
        /// Zero.
        reserved_6: [u8; 26],
        /// In 1000 times 512 bytes, rounded up; this and the next are numbers of 16 bytes.
        data_read: [U64; 2],
        /// In 1000 times 512 bytes, rounded up.
        data_written: [U64; 2],
        /// Commands.
        reads: [U64; 2],
        /// Commands.
        writes: [U64; 2],
        /// Minutes.
        busy: [U64; 2],
        /// Times.
        power_cycles: [U64; 2],
        /// Hours.
        power_on: [U64; 2],
        /// Times.
        unsafe_shutdowns: [U64; 2],
        /// Times.
        media_errors: [U64; 2],
        /// Entries in the error log, ever.
        error_entries: [U64; 2],
        /// Zero.
        reserved_192: [u8; 320],
    }
);
layout!(
    /// Firmware (Base, Figure 209 "Firmware Slot Information Log Page").
    FirmwareSlots, 512 {
        /// The active slot.
        active: u8,
        /// Zero.
        reserved: [u8; 7],
        /// The revisions in the slots.
        revisions: [[u8; 8]; 7],
        /// Zero.
        reserved_64: [u8; 448],
    }
);
layout!(
    /// Commands and what they do (Base, Figure 210 "Commands Supported and Effects Log Page").
    Effects, 4096 {
        /// By opcode, see [`effect`].
        admin: [U32; 256],
        /// By opcode, see [`effect`].
        io: [U32; 256],
        /// Zero.
        reserved: [u8; 2048],
    }
);

/// What commands do (Base, Figure 211 "Commands Supported and Effects Data Structure").
pub mod effect {
    /// The command is supported.
    pub const SUPPORTED: u32 = 1 << 0;
    /// It may change the content of blocks.
    pub const CHANGES_CONTENT: u32 = 1 << 1;
}

layout!(
    /// Start of the discovery log (Base, Figure 264 "Discovery Log Page").
    DiscoveryHeader, 1024 {
        /// Changes with every change of the log.
        generation: U64,
        /// Entries that follow.
        records: U64,
        /// 0.
        format: U16,
        /// Zero.
        reserved: [u8; 1006],
    }
);
layout!(
    /// A way to a subsystem (Base, Figure 265 "Discovery Log Page Entry Data Structure").
    DiscoveryEntry, 1024 {
        /// [`discovery::TCP`].
        transport: u8,
        /// See [`discovery`].
        family: u8,
        /// What subsystem it is.
        subsystem_kind: u8,
        /// Requirements of the transport; see [`discovery::FLOW_CONTROL_OPTIONAL`].
        requirements: u8,
        /// The port's number.
        port: U16,
        /// 0xFFFF: controllers are made as hosts come.
        controller_id: U16,
        /// The largest admin queue.
        admin_queue: U16,
        /// Flags.
        flags: U16,
        /// Zero.
        reserved_12: [u8; 20],
        /// The port's name in the transport: text, ended by zero or space.
        service: [u8; 32],
        /// Zero.
        reserved_64: [u8; 192],
        /// The subsystem.
        subsystem: [u8; NQN_FIELD],
        /// The address in the transport: text.
        address: [u8; 256],
        /// The first byte is the kind of transport security: 0 is none (TCP, Figure 17).
        specific: [u8; 256],
    }
);

/// Values in [`DiscoveryEntry`].
pub mod discovery {
    /// NVMe/TCP.
    pub const TCP: u8 = 3;
    /// IPv4.
    pub const IPV4: u8 = 1;
    /// IPv6.
    pub const IPV6: u8 = 2;
    /// Another discovery subsystem.
    pub const REFERRAL: u8 = 1;
    /// A subsystem with namespaces.
    pub const NVM: u8 = 2;
    /// The discovery subsystem that tells.
    pub const CURRENT_DISCOVERY: u8 = 3;
    /// Requirement: queues may go without flow control, and nothing is said of a secure channel.
    pub const FLOW_CONTROL_OPTIONAL: u8 = 1 << 2;
}
