//! Log pages.

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

use super::NQN_FIELD;

/// Log page identifiers (Base, Figure 202 "Log Page Identifiers").
pub mod page {
    /// The supported log pages: 256 dwords, each with bit 0 set if its page is supported.
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
    /// A [`DiscoveryHeader`](super::DiscoveryHeader) and
    /// [`DiscoveryEntry`](super::DiscoveryEntry)s.
    pub const DISCOVERY: u8 = 0x70;
}

/// Bit 15 of Get Log Page's dword 10: reading does not clear the event that announced the page.
pub const RETAIN_EVENT: u32 = 1 << 15;
/// The most identifiers in the log of changed namespaces; the first is 0xFFFFFFFF on overflow.
pub const CHANGED_NAMESPACES: usize = 1024;

/// The fields of Get Log Page (Base, Figures 197 to 201).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The page, see [`page`].
    pub page: u8,
    /// Length wanted, in bytes.
    pub length: u64,
    /// The first byte wanted.
    pub offset: u64,
    /// Whether the event that announced the page stays.
    pub retain: bool,
}

impl Request {
    /// Reads the fields from a command.
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

    /// Writes the fields into a command. The length must be a positive multiple of 4.
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
        /// The error's number; 0 in an unused entry.
        count: U64,
        /// The submission queue's number.
        queue: U16,
        /// The command's identifier.
        command_id: U16,
        /// The status field of the completion.
        status: U16,
        /// Position of the wrong field in the command.
        location: U16,
        /// The first block with the error.
        block: U64,
        /// The namespace's identifier.
        nsid: U32,
        /// Zero.
        reserved: [u8; 36],
    }
);
layout!(
    /// Health of the controller (Base, Figure 207 "SMART / Health Information Log Page").
    Smart, 512 {
        /// Bits of critical warnings.
        warning: u8,
        /// Temperature in Kelvin.
        temperature: U16,
        /// Available spare capacity, in percent.
        spare: u8,
        /// Spare capacity below which there is a warning, in percent.
        spare_threshold: u8,
        /// Used part of the lifetime, in percent.
        used: u8,
        /// Zero.
        reserved_6: [u8; 26],
        /// Data read, in units of 512,000 bytes, rounded up. All fields from here on are integers
        /// of 16 bytes.
        data_read: [U64; 2],
        /// Data written, in units of 512,000 bytes, rounded up.
        data_written: [U64; 2],
        /// Completed read commands.
        reads: [U64; 2],
        /// Completed write commands.
        writes: [U64; 2],
        /// Time busy with I/O, in minutes.
        busy: [U64; 2],
        /// Power cycles.
        power_cycles: [U64; 2],
        /// Time powered on, in hours.
        power_on: [U64; 2],
        /// Unsafe shutdowns.
        unsafe_shutdowns: [U64; 2],
        /// Media and data integrity errors.
        media_errors: [U64; 2],
        /// Entries ever made in the error log.
        error_entries: [U64; 2],
        /// Zero.
        reserved_192: [u8; 320],
    }
);
layout!(
    /// Firmware slots (Base, Figure 209 "Firmware Slot Information Log Page").
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
    /// The supported commands and their effects (Base, Figure 210 "Commands Supported and Effects
    /// Log Page").
    Effects, 4096 {
        /// Effects of admin commands by opcode, see [`effect`].
        admin: [U32; 256],
        /// Effects of I/O commands by opcode, see [`effect`].
        io: [U32; 256],
        /// Zero.
        reserved: [u8; 2048],
    }
);

/// Effects of commands (Base, Figure 211 "Commands Supported and Effects Data Structure").
pub mod effect {
    /// The command is supported.
    pub const SUPPORTED: u32 = 1 << 0;
    /// The command may change the content of blocks.
    pub const CHANGES_CONTENT: u32 = 1 << 1;
}

layout!(
    /// Start of the discovery log (Base, Figure 264 "Discovery Log Page").
    DiscoveryHeader, 1024 {
        /// Number that changes with every change of the log.
        generation: U64,
        /// The number of entries that follow.
        records: U64,
        /// The format: 0.
        format: U16,
        /// Zero.
        reserved: [u8; 1006],
    }
);
layout!(
    /// A path to a subsystem (Base, Figure 265 "Discovery Log Page Entry Data Structure").
    DiscoveryEntry, 1024 {
        /// The transport: [`discovery::TCP`].
        transport: u8,
        /// The address family, see [`discovery`].
        family: u8,
        /// The type of subsystem, see [`discovery`].
        subsystem_kind: u8,
        /// Requirements of the transport, see [`discovery::FLOW_CONTROL_OPTIONAL`].
        requirements: u8,
        /// The port's identifier in the subsystem.
        port: U16,
        /// 0xFFFF: the target makes a controller for each host that connects.
        controller_id: U16,
        /// The largest admin queue, in entries.
        admin_queue: U16,
        /// Flags.
        flags: U16,
        /// Zero.
        reserved_12: [u8; 20],
        /// The transport service (the TCP port): text, ended by a zero or a space.
        service: [u8; 32],
        /// Zero.
        reserved_64: [u8; 192],
        /// The subsystem's name.
        subsystem: [u8; NQN_FIELD],
        /// The transport address: text.
        address: [u8; 256],
        /// Transport specific; the first byte is the kind of transport security, 0 is none (TCP,
        /// Figure 17).
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
    /// Subsystem type: another discovery subsystem.
    pub const REFERRAL: u8 = 1;
    /// Subsystem type: one with namespaces.
    pub const NVM: u8 = 2;
    /// Subsystem type: the discovery subsystem that returns the log.
    pub const CURRENT_DISCOVERY: u8 = 3;
    /// Requirement: flow control is optional, and a secure channel is not specified.
    pub const FLOW_CONTROL_OPTIONAL: u8 = 1 << 2;
}
