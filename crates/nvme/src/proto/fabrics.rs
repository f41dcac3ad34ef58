//! Fabrics commands, and the properties of a controller.

use aquifer_transport::layout;
use zerocopy::byteorder::little_endian::U16;

use super::{Command, NQN_FIELD};

/// Types of fabrics command (Base, Figure 375 "Fabrics Command Type").
pub mod kind {
    /// Writes a property.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Makes the connection a queue.
    pub const CONNECT: u8 = 0x01;
    /// Reads a property.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Carries an authentication message of the host.
    pub const AUTHENTICATION_SEND: u8 = 0x05;
    /// Fetches an authentication message of the controller.
    pub const AUTHENTICATION_RECEIVE: u8 = 0x06;
    /// Ends an I/O queue.
    pub const DISCONNECT: u8 = 0x08;
}

/// The controller identifier in the Connect of an admin queue: the target chooses.
pub const ANY_CONTROLLER: u16 = 0xFFFF;
/// The submission queue head in the completion of a Connect without flow control.
pub const NO_FLOW_CONTROL: u16 = 0xFFFF;
/// The security protocol of authentication commands, and its specific fields (Base, Figures 376 and
/// 378).
pub const AUTHENTICATION_PROTOCOL: u32 = 0xE9_01_01_00;

/// Bits of [`Connect::attributes`] (Base, Figure 380) and of the result (Figures 382 and 383).
pub mod connect {
    /// Attribute: the submission queue has no flow control.
    pub const NO_FLOW_CONTROL: u8 = 1 << 2;
    /// Result: the controller demands a secure channel set up by authentication.
    pub const SECURE_CHANNEL_REQUIRED: u32 = 1 << 18;
    /// Result: the controller demands authentication before any other command.
    pub const AUTHENTICATION_REQUIRED: u32 = 1 << 17;
    /// Result of an invalid Connect: the wrong field is in the data, not in the command.
    pub const IN_DATA: u32 = 1 << 16;
}

layout!(
    /// The data of a Connect command (Base, Figure 381 "Connect Command Data").
    ConnectData, 1024 {
        /// The host's identifier.
        host_id: [u8; 16],
        /// The controller of an I/O queue; [`ANY_CONTROLLER`] for an admin queue.
        controller_id: U16,
        /// Zero.
        reserved: [u8; 238],
        /// The subsystem's name.
        subsystem: [u8; NQN_FIELD],
        /// The host's name.
        host: [u8; NQN_FIELD],
        /// Zero.
        reserved_end: [u8; 256],
    }
);

/// The fields of a Connect command besides its data (Base, Figure 380 "Connect Command").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// The format of command and data: 0.
    pub format: u16,
    /// The queue's number; 0 is the admin queue.
    pub queue: u16,
    /// The queue's size in entries, minus one.
    pub size: u16,
    /// Attributes, see [`connect`].
    pub attributes: u8,
    /// For an admin queue: the keep alive timeout in milliseconds; 0 is none.
    pub keep_alive: u32,
}

impl Connect {
    /// Reads the fields from a command.
    pub fn of(command: &Command) -> Self {
        let (first, second) = (command.dword(10), command.dword(11));
        Self {
            format: first as u16,
            queue: (first >> 16) as u16,
            size: second as u16,
            attributes: (second >> 16) as u8,
            keep_alive: command.dword(12),
        }
    }

    /// Writes the fields into a command.
    pub fn put(self, command: Command) -> Command {
        command
            .with(10, u32::from(self.format) | u32::from(self.queue) << 16)
            .with(11, u32::from(self.size) | u32::from(self.attributes) << 16)
            .with(12, self.keep_alive)
    }
}

/// Offsets of properties (Base, Figure 35 "Property Definition").
pub mod property {
    /// Controller Capabilities: 8 bytes.
    pub const CAPABILITIES: u32 = 0x00;
    /// Version.
    pub const VERSION: u32 = 0x08;
    /// Controller Configuration.
    pub const CONFIGURATION: u32 = 0x14;
    /// Controller Status.
    pub const STATUS: u32 = 0x1C;
    /// NVM Subsystem Reset.
    pub const SUBSYSTEM_RESET: u32 = 0x20;
    /// Controller Ready Timeouts.
    pub const READY_TIMEOUTS: u32 = 0x68;
}

/// Bit of dword 10 of Property Get and Set: the property has 8 bytes, not 4.
pub const PROPERTY_8_BYTES: u32 = 1;

/// Parts of [`property::CAPABILITIES`] (Base, Figure 36 "Offset 0h: CAP").
pub mod capabilities {
    /// The largest queue in entries, minus one.
    pub const MAX_QUEUE: u64 = 0xFFFF;
    /// Queues must be contiguous; always set on fabrics.
    pub const CONTIGUOUS: u64 = 1 << 16;
    /// Position of the time to become ready or not ready, in units of 500 ms.
    pub const TIMEOUT_SHIFT: u32 = 24;
    /// The NVM command set is supported.
    pub const NVM: u64 = 1 << 37;
    /// Position of the smallest memory page, in four bits: 2^n units of 4096 bytes.
    pub const MIN_PAGE_SHIFT: u32 = 48;
    /// No I/O command set is supported.
    pub const ADMIN_ONLY: u64 = 1 << 44;
    /// "Ready" includes the media.
    pub const READY_WITH_MEDIA: u64 = 1 << 59;
}

/// Parts of [`property::CONFIGURATION`] (Base, Figure 46 "Offset 14h: CC").
pub mod configuration {
    /// Enables the controller; clearing it resets the controller.
    pub const ENABLE: u32 = 1 << 0;
    /// The command set: 0 is NVM, 0b111 admin only.
    pub const COMMAND_SET: u32 = 0b111 << 4;
    /// The memory page size; 0 is 4096 bytes.
    pub const PAGE_SIZE: u32 = 0xF << 7;
    /// Shutdown notification; 0 is none.
    pub const SHUTDOWN: u32 = 0b11 << 14;
    /// Log 2 of the bytes of a command on I/O queues.
    pub const COMMAND_SIZE: u32 = 0xF << 16;
    /// Log 2 of the bytes of a completion on I/O queues.
    pub const COMPLETION_SIZE: u32 = 0xF << 20;
    /// Value that enables a controller of the NVM command set: commands of 64 bytes, completions of
    /// 16.
    pub const START: u32 = 4 << 20 | 6 << 16 | ENABLE;
    /// Requests a normal shutdown.
    pub const SHUTDOWN_NORMAL: u32 = 1 << 14;
}

/// Parts of [`property::STATUS`] (Base, Figure 47 "Offset 1Ch: CSTS").
pub mod status {
    /// The controller is ready for commands.
    pub const READY: u32 = 1 << 0;
    /// The controller has failed.
    pub const FATAL: u32 = 1 << 1;
    /// Shutdown state.
    pub const SHUTDOWN: u32 = 0b11 << 2;
    /// Shutdown state: the shutdown is complete.
    pub const SHUTDOWN_COMPLETE: u32 = 0b10 << 2;
}

/// Version 2.0 (Base, section 3.1.3.2 "Offset 8h: VS").
pub const VERSION_2_0: u32 = 2 << 16;
