//! Fabrics commands, and the properties of a controller.

use zerocopy::byteorder::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Command, NQN_FIELD};

/// Types of fabrics command (Base, Figure 375 "Fabrics Command Type").
pub mod kind {
    /// Changes a property.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Makes the connection a queue.
    pub const CONNECT: u8 = 0x01;
    /// Tells a property.
    pub const PROPERTY_GET: u8 = 0x04;
    /// A message of the host's in an authentication.
    pub const AUTHENTICATION_SEND: u8 = 0x05;
    /// A message of the controller's in an authentication.
    pub const AUTHENTICATION_RECEIVE: u8 = 0x06;
    /// Ends an I/O queue.
    pub const DISCONNECT: u8 = 0x08;
}

/// The controller's identifier in the Connect of an admin queue: any.
pub const ANY_CONTROLLER: u16 = 0xFFFF;
/// What a completion says of the submission queue when its flow control is off: in the Connect's completion.
pub const NO_FLOW_CONTROL: u16 = 0xFFFF;
/// The security protocol of authentication commands, and its specifics (Base, Figures 376 and
/// 378).
pub const AUTHENTICATION_PROTOCOL: u32 = 0xE9_01_01_00;

/// Bits of [`Connect::attributes`] (Base, Figure 380) and of the result (Figures 382 and 383).
pub mod connect {
    /// The submission queue goes without flow control.
    pub const NO_FLOW_CONTROL: u8 = 1 << 2;
    /// The result's bit that demands a secure channel, made by authentication.
    pub const SECURE_CHANNEL_REQUIRED: u32 = 1 << 18;
    /// The result's bit that demands authentication before anything else.
    pub const AUTHENTICATION_REQUIRED: u32 = 1 << 17;
    /// Set in the result of an invalid Connect if the wrong field is in the data, not in the command.
    pub const IN_DATA: u32 = 1 << 16;
}

layout!(
    /// The data of a Connect command (Base, Figure 381 "Connect Command Data").
    ConnectData, 1024 {
        /// The host's identifier.
        host_id: [u8; 16],
        /// The controller of an I/O queue; of an admin queue [`ANY_CONTROLLER`].
        controller_id: U16,
        /// Zero.
        reserved: [u8; 238],
        /// The subsystem.
        subsystem: [u8; NQN_FIELD],
        /// The host.
        host: [u8; NQN_FIELD],
        /// Zero.
        reserved_end: [u8; 256],
    }
);

/// What a Connect command says besides its data (Base, Figure 380 "Connect Command").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// The format of command and data: 0.
    pub format: u16,
    /// The queue: 0 is the admin queue.
    pub queue: u16,
    /// Its size, minus one.
    pub size: u16,
    /// See [`connect`].
    pub attributes: u8,
    /// Of an admin queue: the keep alive time-out in milliseconds; 0 is none.
    pub keep_alive: u32,
}

impl Connect {
    /// Reads it.
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

    /// Writes it.
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

/// Size of a property in Property Get and Set, in dword 10: 8 bytes; else it is 4.
pub const PROPERTY_8_BYTES: u32 = 1;

/// Parts of [`property::CAPABILITIES`] (Base, Figure 36 "Offset 0h: CAP").
pub mod capabilities {
    /// The largest queue, minus one.
    pub const MAX_QUEUE: u64 = 0xFFFF;
    /// Queues must be contiguous: always on fabrics.
    pub const CONTIGUOUS: u64 = 1 << 16;
    /// The shift of the time to get ready or not ready, in half seconds.
    pub const TIMEOUT_SHIFT: u32 = 24;
    /// The NVM command set.
    pub const NVM: u64 = 1 << 37;
    /// The smallest memory page, as a power of two of 4096 bytes, from this bit on in four bits.
    pub const MIN_PAGE_SHIFT: u32 = 48;
    /// There is no I/O command set.
    pub const ADMIN_ONLY: u64 = 1 << 44;
    /// Ready means that the media are ready too.
    pub const READY_WITH_MEDIA: u64 = 1 << 59;
}

/// Parts of [`property::CONFIGURATION`] (Base, Figure 46 "Offset 14h: CC").
pub mod configuration {
    /// Enable; cleared is a reset.
    pub const ENABLE: u32 = 1 << 0;
    /// The command set: 0 is NVM, 0b111 admin only.
    pub const COMMAND_SET: u32 = 0b111 << 4;
    /// The memory page size; 0 is 4096.
    pub const PAGE_SIZE: u32 = 0xF << 7;
    /// Shutdown notification; 0 is none.
    pub const SHUTDOWN: u32 = 0b11 << 14;
    /// Log 2 of the size of commands on I/O queues.
    pub const COMMAND_SIZE: u32 = 0xF << 16;
    /// Log 2 of the size of completions on I/O queues.
    pub const COMPLETION_SIZE: u32 = 0xF << 20;
    /// What a host sets to start a controller of the NVM command set: sizes of 64 and 16 bytes, enabled.
    pub const START: u32 = 4 << 20 | 6 << 16 | ENABLE;
    /// Normal shutdown.
    pub const SHUTDOWN_NORMAL: u32 = 1 << 14;
}

/// Parts of [`property::STATUS`] (Base, Figure 47 "Offset 1Ch: CSTS").
pub mod status {
    /// Ready for commands.
    pub const READY: u32 = 1 << 0;
    /// Broken.
    pub const FATAL: u32 = 1 << 1;
    /// Shutdown state.
    pub const SHUTDOWN: u32 = 0b11 << 2;
    /// Shutdown state: it is done.
    pub const SHUTDOWN_COMPLETE: u32 = 0b10 << 2;
}

/// Version 2.0 (Base, section 3.1.3.2 "Offset 8h: VS").
pub const VERSION_2_0: u32 = 2 << 16;
